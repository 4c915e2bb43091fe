"""How much of a transfer is hidden behind the computation of the prompt, over a link of 1 Gbit/s.

    sudo make bench-overlap

A prefill and a decode replica run in network namespaces of their own, joined by virtual interfaces that ``tc``
slows down. SmolLM2, one prompt, no prefix cache, one thread each. For every sharing rule the prompt is served in two
ways: *apart*, where nothing is sent before everything is computed, and *overlapped*, as replicas do by themselves. Both
processes read the machine's one monotonic clock, so times of either can be compared. *tail* is the time from the end
of the prompt's computation to the last byte in the decode replica's pages, *whole prefill* a forward of every layer on
the same thread. Prints a table, writes ``bench-results/overlap.json`` and a plot of every layer, ``overlap.svg``.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import grpc
import matplotlib
import numpy as np
import torch
from matplotlib import pyplot
from rich.console import Console
from rich.table import Table

import worker.replica
from cluster.model_store import resolve_model
from kv_transfer.transfer import PieceArrived
from worker.config import EngineConfig, Role
from worker.incoming_transfers import IncomingTransfers
from worker.kv_cache.specs import LayerName
from worker.layers.cached_layer import Stored, nobody_asks
from worker.model_runner import ModelRunner
from worker.models.decoder import Decoder
from worker.models.model import StepInputs
from worker.prefill_selector import PrefillCandidate
from worker.ranks.commands import SequenceRows
from worker.replica import Replica
from worker.replica_record import ReplicaRecord
from worker.wire import engine_pb2 as wire
from worker.wire import engine_pb2_grpc

RATE = "1gbit"
PROMPT_TOKENS = 2000
ROUNDS = 3
RULES = ("none", "after:14")
NEVER = 1 << 40
HOSTS = {"prefill": "10.77.0.1", "decode": "10.77.0.2"}
RESULTS = Path("bench-results")


@dataclass(frozen=True, slots=True)
class Timeline:
    """One prompt. Seconds since the decode replica asked; ``stored`` and ``arrived`` are of every owner layer."""

    computed: float
    complete: float
    payload_bytes: int
    stored: dict[str, float]
    arrived: dict[str, float]

    @property
    def tail(self) -> float:
        """Seconds from the end of the computation to complete KV."""
        return self.complete - self.computed


# In a namespace


class Side:
    """A replica in this process, and when its layers were stored or arrived. Commands come over ``connection``."""

    def __init__(self, role: str, connection: Connection) -> None:
        self._role = role
        self._connection = connection
        self._replica: Replica | None = None
        self._stored: dict[str, float] = {}
        self._arrived: dict[str, float] = {}
        self._ended = 0.0

    def serve(self) -> None:
        """Carry out calls until the other end hangs up."""
        while True:
            try:
                method, arguments = self._connection.recv()
            except EOFError:
                return
            self._connection.send(getattr(self, method)(*arguments))

    def start(self, config: EngineConfig) -> ReplicaRecord:
        """Make a replica."""
        watcher = self

        class WatchedRunner(ModelRunner):
            def execute(self, scheduled: Sequence[SequenceRows], stored: Stored = nobody_asks) -> torch.Tensor | None:
                def watched(layer: LayerName) -> None:
                    watcher._stored[layer] = time.monotonic()
                    stored(layer)

                result = super().execute(scheduled, watched)
                watcher._ended = time.monotonic()
                return result

        class WatchedTransfers(IncomingTransfers):
            def take(self, event: PieceArrived) -> None:
                super().take(event)
                now = time.monotonic()
                piece = event.frame.piece
                owners = self._runner.layout.sections[piece.section].owners
                for owner in owners[piece.layer_begin : piece.layer_end]:
                    watcher._arrived[owner.name] = now

        # Where the replica finds them.
        vars(worker.replica).update(ModelRunner=WatchedRunner, IncomingTransfers=WatchedTransfers)
        self._replica = Replica(config, First())
        return self._replica.record

    def connect(self, replicas: dict[str, tuple[str, ...]]) -> None:
        """Tell a decode replica of its prefill replica."""
        self._running.use_prefill_replicas(replicas)

    def ask(self, token_ids: list[int]) -> tuple[float, float, int, dict[str, float]]:
        """Have one token generated; when it was asked for, when KV was complete, bytes, arrivals."""
        self._arrived = {}
        sampling = wire.Sampling(top_p=1.0, repetition_penalty=1.0, ignore_eos=True, max_tokens=1)
        submit = wire.Submit(
            request_id=str(time.monotonic_ns()),
            token_ids=token_ids,
            prompt_len=len(token_ids),
            n=1,
            sampling=sampling,
        )
        with grpc.insecure_channel(self._running.record.session_address) as channel:
            asked = time.monotonic()
            messages = engine_pb2_grpc.EngineStub(channel).Session(_once(submit))  # type: ignore[no-untyped-call]
            for message in messages:
                for output in message.outputs:
                    if output.finish_reason:
                        assert not output.HasField("error"), output.error
                        payload = output.prompt_info.transfer.payload_bytes
                        return asked, max(self._arrived.values()), payload, dict(self._arrived)
        raise AssertionError("the session ended without an answer")

    def computed(self) -> tuple[float, dict[str, float]]:
        """When the last step ended, and when every layer was stored in it."""
        return self._ended, dict(self._stored)

    def whole_prefill(self, config: EngineConfig, token_ids: list[int]) -> float:
        """Seconds of a prompt in a colocated engine that runs every layer on every token."""
        return _whole_prefill(config, token_ids)

    def stop(self) -> None:
        """End the replica."""
        self._running.stop(grace=0.0)
        self._replica = None

    @property
    def _running(self) -> Replica:
        assert self._replica is not None
        return self._replica


class First:
    """There is one prefill replica."""

    def choose(self, candidates: Sequence[PrefillCandidate], token_ids: Sequence[int], salt: str) -> str:
        """It."""
        del token_ids, salt
        return str(candidates[0].incarnation)


def _once(submit: wire.Submit) -> Iterator[wire.ClientMessage]:
    yield wire.ClientMessage(submit=submit)
    time.sleep(3600)


def _whole_prefill(config: EngineConfig, token_ids: list[int]) -> float:
    torch.set_num_threads(config.threads or 1)
    runner = ModelRunner(config)
    blocks = np.arange(-(-len(token_ids) // config.block_size), dtype=np.int64)
    seconds = []
    with torch.inference_mode():
        for _ in range(ROUNDS):
            begun = time.monotonic()
            # Wanted logits make every layer run on every row; the head is left to the last chunk's last row.
            step = runner._inputs([SequenceRows(np.array(token_ids), 0, len(token_ids), (blocks,))], runner.device)
            assert isinstance(runner.model, Decoder)
            hidden = _every_layer(runner.model, step)
            assert len(hidden) == len(token_ids)
            seconds.append(time.monotonic() - begun)
    return statistics.median(seconds)


def _every_layer(model: Decoder, step: StepInputs) -> torch.Tensor:
    hidden = model.embedding(step.token_ids)
    rotation = model._rotary.at(step.rows.positions)
    for layer in (*model.before_last_owner, *model.from_last_owner):
        query = layer.project(hidden, rotation, step.rows)
        hidden = layer.finish(query, hidden, step.rows)
    model.head(model.norm(hidden[-1:]))
    return hidden


# Outside


@contextmanager
def namespaces() -> Iterator[None]:
    """Two network namespaces and a slow link between them."""

    def run(*words: str) -> None:
        subprocess.run(words, check=True)

    names = [f"crosskv-{role}" for role in HOSTS]
    try:
        for name in names:
            run("ip", "netns", "add", name)
        run("ip", "link", "add", "ck0", "netns", names[0], "type", "veth", "peer", "name", "ck1", "netns", names[1])
        for name, device, address in zip(names, ("ck0", "ck1"), HOSTS.values(), strict=True):
            inside = ("ip", "netns", "exec", name)
            run(*inside, "ip", "addr", "add", f"{address}/24", "dev", device)
            run(*inside, "ip", "link", "set", device, "up")
            run(*inside, "ip", "link", "set", "lo", "up")
            run(*inside, *f"tc qdisc add dev {device} root tbf rate {RATE} burst 256kb latency 50ms".split())
        yield
    finally:
        for name in names:
            subprocess.run(("ip", "netns", "delete", name), check=False)


class Remote:
    """A ``Side`` in a namespace."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def call(self, method: str, *arguments: object) -> Any:
        """Have it done and return what it returns."""
        self._connection.send((method, arguments))
        return self._connection.recv()


@contextmanager
def side(role: str, directory: Path) -> Iterator[Remote]:
    """A process in a namespace. They talk over a Unix socket, which namespaces do not separate."""
    path = str(directory / f"{role}.sock")
    with Listener(path, "AF_UNIX") as listener:
        command = ("ip", "netns", "exec", f"crosskv-{role}", sys.executable, "-m", "benchmarks.overlap", role, path)
        process = subprocess.Popen(command)
        try:
            with listener.accept() as connection:
                yield Remote(connection)
        finally:
            process.kill()
            process.wait()


def measure(
    prefill: Remote,
    decode: Remote,
    prefill_config: EngineConfig,
    decode_config: EngineConfig,
    prompts: Sequence[list[int]],
) -> list[Timeline]:
    """One replica of each role, one prompt after another. The first one warms up and is not kept."""
    record = prefill.call("start", prefill_config)
    decode.call("start", decode_config)
    decode.call("connect", {record.incarnation: record.kv_addresses})
    found = []
    for prompt in prompts:
        asked, complete, payload, arrived = decode.call("ask", prompt)
        ended, stored = prefill.call("computed")
        found.append(
            Timeline(
                computed=ended - asked,
                complete=complete - asked,
                payload_bytes=payload,
                stored={layer: when - asked for layer, when in stored.items()},
                arrived={layer: when - asked for layer, when in arrived.items()},
            )
        )
    decode.call("stop")
    prefill.call("stop")
    return found[1:]


def main() -> None:
    """Measure and report."""
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(100, 40_000, (PROMPT_TOKENS,), generator=generator).tolist() for _ in range(ROUNDS + 1)]
    table = Table(
        "KV sharing", "mode", "computed", "complete", "tail", "tail / apart's", "whole prefill", title="seconds"
    )
    report: dict[str, Any] = {"rate": RATE, "prompt_tokens": PROMPT_TOKENS, "cpus": os.cpu_count(), "rules": {}}
    with ExitStack() as stack:
        stack.enter_context(namespaces())
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        prefill, decode = (stack.enter_context(side(role, directory)) for role in HOSTS)
        for rule in RULES:
            base = EngineConfig(
                model=str(resolve_model("smollm2").weights),
                role=Role.COLOCATED,
                kv_sharing=rule,
                max_model_len=4096,
                max_batched_tokens=4096,
                prefix_caching=False,
                threads=1,
            )
            whole = prefill.call("whole_prefill", base, prompts[0])
            decode_config = replace(base, role=Role.DECODE, advertised_host=HOSTS["decode"])
            runs: dict[str, list[Timeline]] = {}
            for mode, least in (("apart", NEVER), ("overlapped", base.min_piece_bytes)):
                prefill_config = replace(
                    base, role=Role.PREFILL, advertised_host=HOSTS["prefill"], min_piece_bytes=least
                )
                runs[mode] = measure(prefill, decode, prefill_config, decode_config, prompts)
            apart = statistics.median(one.tail for one in runs["apart"])
            for mode, timelines in runs.items():
                middle = {
                    name: statistics.median(getattr(one, name) for one in timelines)
                    for name in ("computed", "complete", "tail")
                }
                table.add_row(
                    rule,
                    mode,
                    *(f"{value:.3f}" for value in middle.values()),
                    f"{middle['tail'] / apart:.0%}",
                    f"{whole:.3f}",
                )
            report["rules"][rule] = {"whole_prefill": whole} | {
                mode: [asdict(one) for one in timelines] for mode, timelines in runs.items()
            }
    Console().print(table)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "overlap.json").write_text(json.dumps(report, indent=1))
    plot(report["rules"], RESULTS / "overlap.svg")


def plot(rules: dict[str, Any], path: Path) -> None:
    """When each owner layer was stored by the prefill replica, and when it had arrived."""
    matplotlib.use("agg")
    figure, axes = pyplot.subplots(1, len(rules), figsize=(4 * len(rules), 4), sharey=True, layout="constrained")
    for axis, (rule, modes) in zip(axes, rules.items(), strict=True):
        for mode, colour in (("apart", "tab:orange"), ("overlapped", "tab:blue")):
            one = modes[mode][-1]
            layers = list(one["stored"])
            owners = [layer for layer in layers if layer in one["arrived"]]
            axis.plot([one["stored"][o] for o in owners], range(len(owners)), ".", color="grey", markersize=3)
            axis.plot([one["arrived"][o] for o in owners], range(len(owners)), color=colour, label=f"arrived, {mode}")
        axis.axvline(modes["whole_prefill"], color="black", linestyle=":", label="whole prefill")
        axis.set(title=f"KV sharing {rule}", xlabel="seconds since the request")
    axes[0].set_ylabel("owner layer")
    axes[0].legend()
    figure.savefig(path)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        with Client(sys.argv[2], "AF_UNIX") as parent:
            Side(sys.argv[1], parent).serve()
    else:
        main()
