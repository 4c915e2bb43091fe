"""KV moved between two processes, end to end, by each transport, beside a raw copy over TCP.

    make bench-transfer

One process gathers pieces out of pages and sends them, the other scatters them into its own: a rank's side of a
transfer on each end, with all its checks, but no model is computed. Payloads of 1, 16 and 64 MiB of SmolLM2-135M's
shape in bfloat16. The raw copy is a socket that is read into memory that is there, in chunks as large as the pieces.

The same transfers' parts say what limits: gather and scatter alone, each in one process, and the wire alone, where the
sender has its pieces ready and the receiver drops them. The ways take turns, once each in every round; every figure is
the median of the rounds. CPU is what all threads of both processes use: two cores have 2 s of it in a second. Prints a
table and writes ``bench-results/transfer.json``.
"""

import json
import multiprocessing
import os
import platform
import queue
import resource
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from kernels.pages import IntArray
from kv_transfer.frame import EndFrame, PieceFrame
from kv_transfer.group_sender import GroupSender
from kv_transfer.layout import Piece, SlotRange
from kv_transfer.pair_group import GroupSettings
from kv_transfer.plan import plan_pieces, whole_section
from kv_transfer.prefill_server import PrefillJob, PrefillServer, RankStream
from kv_transfer.rank_pair import ONLY_PAIR, PairLayout, pair_layout
from kv_transfer.staging import StagingBudget
from kv_transfer.transfer import PieceArrived, TransferEvent
from kv_transfer.transport import Transport
from worker.config import EngineConfig, Role
from worker.heap import keep_freed_memory
from worker.incoming_transfers import IncomingTransfers
from worker.model_runner import ModelRunner
from worker.outgoing_transfers import OutgoingTransfers
from worker.prefill_peers import PrefillPeers
from worker.ranks.commands import ConnectPeer, OpenIncoming, OpenOutgoing, SendComputed, Summary

MIB = 1 << 20
SIZES = (MIB, 16 * MIB, 64 * MIB)
ROUNDS = 7
LAYERS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 30, 3, 64, 16
TOKEN_BYTES = LAYERS * 2 * KV_HEADS * HEAD_DIM * 2
SECONDS = 120.0
SETTINGS = GroupSettings("127.0.0.1", torch.device("cpu"))
RAW, GATHER, SCATTER = "raw TCP", "gather", "scatter"
TARGETS = {Transport.GRPC.value: 0.8, Transport.TORCH.value: 0.9}
READY = "ready"
"""As a request's cache salt: the sender is to send pieces that it has gathered before."""


def tokens_of(size: int) -> int:
    """As many as have about ``size`` bytes in all layers."""
    return round(size / TOKEN_BYTES)


def write_checkpoint(directory: Path) -> None:
    """A model whose KV is SmolLM2-135M's and whose weights, which nobody uses, are next to nothing."""
    hidden, heads = 6, KV_HEADS * HEAD_DIM
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 8,
        "hidden_size": hidden,
        "intermediate_size": hidden,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": KV_HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 2 * tokens_of(max(SIZES)),
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "eos_token_id": 1,
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (8, hidden), "model.norm.weight": (hidden,)}
    for layer in range(LAYERS):
        shapes |= {
            f"model.layers.{layer}.{name}.weight": shape
            for name, shape in {
                "input_layernorm": (hidden,),
                "post_attention_layernorm": (hidden,),
                "self_attn.q_proj": (heads, hidden),
                "self_attn.k_proj": (heads, hidden),
                "self_attn.v_proj": (heads, hidden),
                "self_attn.o_proj": (hidden, heads),
                "mlp.gate_proj": (hidden, hidden),
                "mlp.up_proj": (hidden, hidden),
                "mlp.down_proj": (hidden, hidden),
            }.items()
        }
    (directory / "config.json").write_text(json.dumps(config))
    save_file({n: torch.zeros(s, dtype=torch.bfloat16) for n, s in shapes.items()}, directory / "model.safetensors")


class Rank:
    """A rank's pages, and a sequence as long as the largest payload whose blocks lie in no order."""

    def __init__(self, checkpoint: Path, role: Role, seed: int) -> None:
        memory = (tokens_of(max(SIZES)) + 2 * BLOCK_SIZE) * TOKEN_BYTES
        self.config = EngineConfig(
            model=str(checkpoint),
            role=role,
            dtype="bfloat16",
            device="cpu",
            block_size=BLOCK_SIZE,
            kv_cache_memory=memory,
        )
        self.runner = ModelRunner(self.config)
        self.tables: tuple[IntArray, ...] = (np.random.default_rng(seed).permutation(self.runner.num_blocks),)
        self.passing: PairLayout = pair_layout(self.runner.layout, ONLY_PAIR)

    def pieces(self, slots: SlotRange) -> Iterator[Piece]:
        layout = self.runner.layout
        return plan_pieces(layout, whole_section(layout, 0, slots), self.config.max_piece_bytes)

    def gather(self, piece: Piece) -> memoryview:
        return self.runner.read_piece(self.passing, piece, self.tables)

    def scatter(self, piece: Piece, payload: memoryview) -> None:
        self.runner.write_piece(self.passing, piece, self.tables, payload)


# The sending process


def serve_jobs(rank: Rank, jobs: "queue.SimpleQueue[PrefillJob | RankStream]") -> None:
    """The engine's thread: packs pieces while earlier ones are on their way."""
    config = rank.config
    outgoing = OutgoingTransfers(
        rank.runner, 0, 1, min_piece_bytes=config.min_piece_bytes, max_piece_bytes=config.max_piece_bytes
    )
    ready: dict[SlotRange, list[PieceFrame]] = {}
    with torch.inference_mode():
        while True:
            job = jobs.get()
            assert isinstance(job, PrefillJob), "neither side is split"
            (slots,) = job.lacking
            if job.cache_salt == READY:
                if slots not in ready:
                    ready[slots] = [PieceFrame(0, piece, rank.gather(piece)) for piece in rank.pieces(slots)]
                for frame in ready[slots]:
                    job.stream.put(replace(frame, epoch=job.name.epoch))
                job.stream.put(EndFrame(job.name.epoch, 0, len(ready[slots]), 0, 0.0, 0.0))
            else:
                outgoing.attach(RankStream(job.name, 0, job.stream))
                outgoing.open(OpenOutgoing(job.name, 1, slots.end + 1, job.lacking, SECONDS))
                outgoing.send(SendComputed(job.name, slots.end, rank.tables, Summary(0, 0.0, 0.0)))


def send(connection: Connection, checkpoint: Path) -> None:
    """Serve all ways until the parent hangs up."""
    keep_freed_memory()
    torch.set_num_threads(1)
    rank = Rank(checkpoint, Role.PREFILL, seed=1)
    jobs: queue.SimpleQueue[PrefillJob | RankStream] = queue.SimpleQueue()
    threading.Thread(target=serve_jobs, args=(rank, jobs), daemon=True).start()
    layout = rank.runner.layout
    servers = {
        Transport.GRPC: PrefillServer(layout, "prefill", 1, jobs.put, host="127.0.0.1"),
        Transport.TORCH: PrefillServer(layout, "prefill", 1, jobs.put, host="127.0.0.1", sender=GroupSender(SETTINGS)),
    }
    for server in servers.values():
        server.start()
    listener = socket.create_server(("127.0.0.1", 0))
    connection.send(({name: server.port for name, server in servers.items()}, listener.getsockname()[1]))
    raw, _ = listener.accept()
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    threading.Thread(target=tell_cpu_seconds, args=(connection,), daemon=True).start()
    memory, chunk = memoryview(bytearray(max(SIZES) + MIB)), rank.config.max_piece_bytes
    while len(request := raw.recv(8, socket.MSG_WAITALL)) == 8:
        size = int.from_bytes(request, "little")
        for begin in range(0, size, chunk):
            raw.sendall(memory[begin : min(size, begin + chunk)])
    os._exit(0)


def tell_cpu_seconds(connection: Connection) -> None:
    """Answer every message with what this process has used."""
    while True:
        connection.recv()
        connection.send(cpu_seconds())


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


# The receiving process


class Receiver:
    """One transport: asks for tokens and takes what comes, on one thread as an engine does."""

    def __init__(self, transport: Transport, port: int, rank: Rank) -> None:
        self._tables = rank.tables
        self._staging = StagingBudget(rank.config.max_staged_bytes)
        self._events: queue.SimpleQueue[TransferEvent] = queue.SimpleQueue()
        group = SETTINGS if transport is Transport.TORCH else None
        self._peers = PrefillPeers(rank.runner.layout, "decode", self._staging, self._events.put, group=group)
        self._peers.connect(ConnectPeer("prefill", (f"127.0.0.1:{port}",)))
        self._incoming = IncomingTransfers(rank.runner, self._peers, self._staging)
        self._epoch = 0

    def receive(self, size: int) -> None:
        """Into the pages."""
        self._incoming.open(self._command(size))
        while not (ended := self._incoming.take_ended()):
            event = self._events.get(timeout=SECONDS)
            if isinstance(event, PieceArrived):
                self._incoming.take(event)
            else:
                self._incoming.end(event)
        assert [received.received_bytes for received in ended] == [size], ended

    def receive_ready(self, size: int) -> None:
        """Drop what comes."""
        self._peers.open(replace(self._command(size), cache_salt=READY))
        arrived = 0
        while isinstance(event := self._events.get(timeout=SECONDS), PieceArrived):
            arrived += event.frame.payload.nbytes
            self._staging.give_back(event.frame.payload.nbytes)
        assert arrived == size, event.error

    def close(self) -> None:
        self._peers.close()

    def _command(self, size: int) -> OpenIncoming:
        self._epoch += 1
        tokens = size // TOKEN_BYTES
        # Tokens that say as little as they can: they are not what is measured.
        return OpenIncoming(
            "request", self._epoch, "prefill", (SlotRange(0, tokens),), self._tables, SECONDS, (0,) * tokens
        )


def receive_raw(raw: socket.socket, memory: memoryview, chunk_bytes: int, size: int) -> None:
    raw.sendall(size.to_bytes(8, "little"))
    for at in range(0, size, chunk_bytes):
        chunk = memory[at : min(size, at + chunk_bytes)]
        while len(chunk):
            chunk = chunk[raw.recv_into(chunk) :]


def gather_alone(rank: Rank, size: int) -> None:
    for piece in rank.pieces(SlotRange(0, size // TOKEN_BYTES)):
        rank.gather(piece)


def scatter_alone(rank: Rank, memory: memoryview, size: int) -> None:
    for piece in rank.pieces(SlotRange(0, size // TOKEN_BYTES)):
        rank.scatter(piece, memory[: piece.payload_bytes(rank.runner.layout)])


Move = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Moved:
    """One run: GB/s, and CPU seconds per GB."""

    rate: float
    cpu: float


@contextmanager
def ways(checkpoint: Path) -> Iterator[tuple[dict[str, Move], Callable[[], float]]]:
    """By name, functions that move so many bytes; and one that says what both processes have used of the CPU."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=send, args=(theirs, checkpoint), daemon=True)
    process.start()
    rank = Rank(checkpoint, Role.DECODE, seed=2)
    ports, raw_port = ours.recv()
    memory = memoryview(bytearray(max(SIZES) + MIB))

    def used() -> float:
        ours.send(None)
        other: float = ours.recv()
        return other + cpu_seconds()

    with ExitStack() as stack:
        stack.callback(process.kill)
        raw = stack.enter_context(socket.create_connection(("127.0.0.1", raw_port)))
        found: dict[str, Move] = {RAW: partial(receive_raw, raw, memory, rank.config.max_piece_bytes)}
        for transport in Transport:
            receiver = Receiver(transport, ports[transport], rank)
            stack.callback(receiver.close)
            found[transport.value] = receiver.receive
            found[f"{transport.value} wire"] = receiver.receive_ready
        found[GATHER] = partial(gather_alone, rank)
        found[SCATTER] = partial(scatter_alone, rank, memory)
        yield found, used


def measure(found: dict[str, Move], used: Callable[[], float], size: int) -> dict[str, list[Moved]]:
    """All ways in turns."""
    moved: dict[str, list[Moved]] = {name: [] for name in found}
    for move in found.values():
        move(size)
    for _ in range(ROUNDS):
        for name, move in found.items():
            cpu, begin = used(), time.perf_counter()
            move(size)
            seconds = time.perf_counter() - begin
            moved[name].append(Moved(size / seconds / 1e9, (used() - cpu) / size * 1e9))
    return moved


def main() -> None:
    keep_freed_memory()
    torch.set_num_threads(1)
    results: list[dict[str, object]] = []
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; GB/s, median of {ROUNDS} (lowest–highest)")
    print("  MiB  way         GB/s                 × raw   target   CPU s/GB")
    with tempfile.TemporaryDirectory() as directory, torch.inference_mode():
        write_checkpoint(Path(directory))
        with ways(Path(directory)) as (found, used):
            for size in (tokens_of(size) * TOKEN_BYTES for size in SIZES):
                measured = measure(found, used, size)
                raw = statistics.median(one.rate for one in measured[RAW])
                for name, runs in measured.items():
                    rates = [one.rate for one in runs]
                    median, cpu = statistics.median(rates), statistics.median(one.cpu for one in runs)
                    target = TARGETS.get(name)
                    spread = f"({min(rates):.2f}–{max(rates):.2f})"
                    wanted = f"{target:.1f}" if target is not None and size >= 15 * MIB else ""
                    print(
                        f"{size / MIB:5.1f}  {name:10} {median:5.2f}  {spread:14} {median / raw:6.2f}   {wanted:6} "
                        f"{cpu:10.2f}"
                    )
                    results.append(
                        {
                            "bytes": size,
                            "way": name,
                            "gigabytes_per_second": rates,
                            "of_raw": median / raw,
                            "cpu_seconds_per_gigabyte": [one.cpu for one in runs],
                        }
                    )
    path = Path("bench-results/transfer.json")
    path.parent.mkdir(exist_ok=True)
    machine = {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count(), "load": os.getloadavg()}
    path.write_text(json.dumps({"machine": machine, "torch": torch.__version__, "results": results}, indent=2))
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
