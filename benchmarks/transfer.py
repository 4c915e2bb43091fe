"""KV moved between two processes, end to end, by each transport, beside a raw copy over TCP.

    make bench-transfer

One process gathers pieces out of pages and sends them, the other scatters them into its own pages: the steps of a
transfer, without a model. Payloads of 1, 16 and 64 MiB of SmolLM2-135M's shape in bfloat16. The raw copy is a socket
that is read into memory that is there, in chunks as large as the pieces. Gather and scatter alone, in one process and
with nothing on the wire, say how much of the time is not the transport's. The ways take turns, once each in every
round; every figure is the median of the rounds. Prints a table and writes ``bench-results/transfer.json``.
"""

import json
import multiprocessing
import os
import platform
import queue
import socket
import statistics
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch

from kernels.pages import IntArray, gather_tokens, scatter_tokens
from kv_transfer.frame import EndFrame, PieceFrame
from kv_transfer.group_sender import GroupSender
from kv_transfer.layout import CacheLayout, Lifetime, OwnerLayer, Piece, Section, SlotRange
from kv_transfer.pair_group import GroupSettings
from kv_transfer.plan import plan_pieces
from kv_transfer.prefill_peer import PrefillPeer
from kv_transfer.prefill_server import PrefillJob, PrefillServer
from kv_transfer.staging import StagingBudget
from kv_transfer.transfer import PieceArrived, TransferEvent
from kv_transfer.transport import Transport
from kv_transfer.wire import kv_transfer_pb2 as wire

MIB = 1 << 20
SIZES = (MIB, 16 * MIB, 64 * MIB)
ROUNDS = 5
PIECE_BYTES = 4 * MIB
LAYERS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 30, 3, 64, 16
SHAPE = (2, KV_HEADS, BLOCK_SIZE, HEAD_DIM)
TOKEN_BYTES = 2 * KV_HEADS * HEAD_DIM * 2
LAYOUT = CacheLayout(
    fingerprint="benchmark",
    kv_dtype="bfloat16",
    sections=(
        Section(
            Lifetime.EVERY_TOKEN,
            0,
            0,
            tuple(OwnerLayer(f"layers.{i}", KV_HEADS, TOKEN_BYTES, 0) for i in range(LAYERS)),
        ),
    ),
    sharing_digest="",
    sharing_layers=0,
)
SETTINGS = GroupSettings("127.0.0.1", torch.device("cpu"))
RAW, GATHER, SCATTER = "raw TCP", "gather", "scatter"
TARGETS = {Transport.GRPC.value: 0.8, Transport.TORCH.value: 0.9}


def tokens_of(size: int) -> int:
    """As many as have about ``size`` bytes in all layers."""
    return round(size / (LAYERS * TOKEN_BYTES))


class Pages:
    """KV memory of every layer and a table whose blocks lie in no order."""

    def __init__(self, seed: int) -> None:
        blocks = tokens_of(max(SIZES)) // BLOCK_SIZE + 1
        generator = torch.Generator().manual_seed(seed)
        self.caches = [torch.randn(blocks, *SHAPE, generator=generator).to(torch.bfloat16) for _ in range(LAYERS)]
        self.table: IntArray = np.random.default_rng(seed).permutation(blocks)

    def gather(self, piece: Piece) -> memoryview:
        packed = torch.empty(piece.payload_bytes(LAYOUT), dtype=torch.uint8)
        gather_tokens(*self._arguments(piece, packed))
        return memoryview(packed.numpy())

    def scatter(self, piece: Piece, payload: memoryview) -> None:
        scatter_tokens(*self._arguments(piece, torch.frombuffer(payload, dtype=torch.uint8)))

    def _arguments(
        self, piece: Piece, packed: torch.Tensor
    ) -> tuple[list[torch.Tensor], IntArray, int, int, list[torch.Tensor]]:
        parts = packed.view(torch.bfloat16).view(piece.layer_end - piece.layer_begin, 2, KV_HEADS, -1, HEAD_DIM)
        layers = self.caches[piece.layer_begin : piece.layer_end]
        return layers, self.table, piece.slot_begin, piece.slot_end, list(parts)


# The sending process


def gather_jobs(jobs: "queue.SimpleQueue[PrefillJob]") -> None:
    """The engine's thread: packs pieces while earlier ones are on their way."""
    pages = Pages(seed=1)
    with torch.inference_mode():
        while True:
            job = jobs.get()
            pieces = list(plan_pieces(LAYOUT, 0, job.lacking[0], PIECE_BYTES))
            for piece in pieces:
                job.stream.put(PieceFrame(job.epoch, piece, pages.gather(piece)))
            job.stream.put(EndFrame(job.epoch, 0, len(pieces), 0, 0.0, 0.0))


def send(connection: Connection) -> None:
    """Serve all three ways until the parent hangs up."""
    torch.set_num_threads(1)
    jobs: queue.SimpleQueue[PrefillJob] = queue.SimpleQueue()
    threading.Thread(target=gather_jobs, args=(jobs,), daemon=True).start()
    servers = {
        Transport.GRPC: PrefillServer(LAYOUT, "prefill", 1, jobs.put, host="127.0.0.1"),
        Transport.TORCH: PrefillServer(LAYOUT, "prefill", 1, jobs.put, host="127.0.0.1", sender=GroupSender(SETTINGS)),
    }
    for server in servers.values():
        server.start()
    listener = socket.create_server(("127.0.0.1", 0))
    connection.send(({name: server.port for name, server in servers.items()}, listener.getsockname()[1]))
    raw, _ = listener.accept()
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    memory = memoryview(bytearray(max(SIZES)))
    while len(request := raw.recv(8, socket.MSG_WAITALL)) == 8:
        size = int.from_bytes(request, "little")
        for begin in range(0, size, PIECE_BYTES):
            raw.sendall(memory[begin : min(size, begin + PIECE_BYTES)])
    os._exit(0)


# The receiving process


def receive_raw(raw: socket.socket, memory: memoryview, size: int) -> float:
    begin = time.perf_counter()
    raw.sendall(size.to_bytes(8, "little"))
    for at in range(0, size, PIECE_BYTES):
        chunk = memory[at : min(size, at + PIECE_BYTES)]
        while len(chunk):
            chunk = chunk[raw.recv_into(chunk) :]
    return time.perf_counter() - begin


def time_gather(pages: Pages, size: int) -> float:
    begin = time.perf_counter()
    for piece in plan_pieces(LAYOUT, 0, SlotRange(0, tokens_of(size)), PIECE_BYTES):
        pages.gather(piece)
    return time.perf_counter() - begin


def time_scatter(pages: Pages, memory: memoryview, size: int) -> float:
    begin = time.perf_counter()
    for piece in plan_pieces(LAYOUT, 0, SlotRange(0, tokens_of(size)), PIECE_BYTES):
        pages.scatter(piece, memory[: piece.payload_bytes(LAYOUT)])
    return time.perf_counter() - begin


class Receiver:
    """One transport: asks for tokens, scatters what comes, on one thread as an engine does."""

    def __init__(self, transport: Transport, port: int, pages: Pages) -> None:
        self._pages = pages
        self._staging = StagingBudget(64 * MIB)
        self._events: queue.SimpleQueue[TransferEvent] = queue.SimpleQueue()
        group = SETTINGS if transport is Transport.TORCH else None
        self._peer = PrefillPeer(f"127.0.0.1:{port}", LAYOUT, "decode", self._staging, group)
        self._peer.connect()
        self._epoch = 0

    def receive(self, size: int) -> float:
        self._epoch += 1
        slots = SlotRange(0, tokens_of(size))
        begin = time.perf_counter()
        request = wire.PrefillRequest(
            request_id="request",
            epoch=self._epoch,
            prefill_incarnation="prefill",
            decode_incarnation="decode",
            # Tokens that say as little as they can: they are not what is measured.
            token_ids=[0] * slots.end,
            lacking=[wire.SlotRange(begin=slots.begin, end=slots.end)],
        )
        self._peer.open(request, self._events.put, timeout=120.0)
        while isinstance(event := self._events.get(timeout=120.0), PieceArrived):
            self._pages.scatter(event.frame.piece, event.frame.payload)
            self._staging.give_back(event.frame.payload.nbytes)
        taken = time.perf_counter() - begin
        assert event.end is not None, event.error
        return taken

    def close(self) -> None:
        self._peer.close()


@contextmanager
def ways() -> Iterator[dict[str, Callable[[int], float]]]:
    """By name, functions that move so many bytes and return the seconds it took."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=send, args=(theirs,), daemon=True)
    process.start()
    ports, raw_port = ours.recv()
    pages, memory = Pages(seed=2), memoryview(bytearray(max(SIZES)))
    with ExitStack() as stack:
        stack.callback(process.kill)
        raw = stack.enter_context(socket.create_connection(("127.0.0.1", raw_port)))
        found: dict[str, Callable[[int], float]] = {RAW: lambda size: receive_raw(raw, memory, size)}
        for transport in Transport:
            receiver = Receiver(transport, ports[transport], pages)
            stack.callback(receiver.close)
            found[transport.value] = receiver.receive
        found[GATHER] = partial(time_gather, pages)
        found[SCATTER] = partial(time_scatter, pages, memory)
        yield found


def main() -> None:
    torch.set_num_threads(1)
    # What gRPC delivers is not writable, and nobody writes it.
    warnings.filterwarnings("ignore", message="The given buffer is not writable")
    results: list[dict[str, object]] = []
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; GB/s, median of {ROUNDS} (lowest–highest)")
    print("  MiB  way      GB/s                  × raw   target")
    with torch.inference_mode(), ways() as found:
        for size in SIZES:
            moved = tokens_of(size) * LAYERS * TOKEN_BYTES
            rates: dict[str, list[float]] = {name: [] for name in found}
            for move in found.values():
                move(moved)
            for _ in range(ROUNDS):
                for name, move in found.items():
                    rates[name].append(moved / move(moved) / 1e9)
            raw = statistics.median(rates[RAW])
            for name, measured in rates.items():
                median, target = statistics.median(measured), TARGETS.get(name)
                spread = f"({min(measured):.2f}–{max(measured):.2f})"
                wanted = f"{target:.1f}" if target is not None and size >= 16 * MIB else ""
                print(f"{moved / MIB:5.1f}  {name:8} {median:5.2f}  {spread:14} {median / raw:6.2f}   {wanted}")
                results.append({"bytes": moved, "way": name, "gigabytes_per_second": measured, "of_raw": median / raw})
    path = Path("bench-results/transfer.json")
    path.parent.mkdir(exist_ok=True)
    machine = {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count(), "load": os.getloadavg()}
    path.write_text(json.dumps({"machine": machine, "torch": torch.__version__, "results": results}, indent=2))
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
