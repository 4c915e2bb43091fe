"""Processes that replicas run in.

An ``EngineProcess`` is started once (importing torch takes seconds) and can carry one replica after another, or one
rank of it; a test that kills one starts its own. ``RankProcesses`` are the processes of a replica of several ranks.
KV memory is filled with a large finite sentinel, so that a slot that is read before it was written shows in the tokens.
"""

import os
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from kv_transfer.cluster_token import ClusterToken
from worker.config import EngineConfig
from worker.replica_record import ReplicaRecord

if TYPE_CHECKING:
    from worker.prefill_selector import PrefillCandidate

TOKEN = ClusterToken("the-token-of-every-test")

SENTINEL_BYTE = 0x4B
"""Repeated, it is 1.3e7 in float32 and bfloat16, and 14.6 in float16."""

_ROOT = Path(__file__).resolve().parents[1]
_CALL_SECONDS = 120.0


class EngineProcessFailed(Exception):
    """A process did not do what it was told; the message holds its traceback or the end of its log."""


class LeastOutstanding:
    """A prefill selector: the replica with the least to do, then by name."""

    def choose(self, candidates: "Sequence[PrefillCandidate]", token_ids: Sequence[int], salt: str) -> str:
        del token_ids, salt
        return min(candidates, key=lambda candidate: (candidate.outstanding_tokens, candidate.incarnation)).incarnation


class _Host:
    """What runs inside the process: at most one replica at a time, or one rank that follows another process."""

    def __init__(self) -> None:
        # The parent need not import torch.
        from cluster.model_store import resolve_model  # noqa: PLC0415
        from cluster.text.vocabulary import vocabulary_of  # noqa: PLC0415
        from worker.ranks.follower import Follower  # noqa: PLC0415
        from worker.ranks.followers import Followers  # noqa: PLC0415
        from worker.replica import Replica, new_incarnation  # noqa: PLC0415

        self._make = Replica
        self._vocabulary = lambda model: vocabulary_of(resolve_model(model).tokenizer)
        self._make_followers = Followers
        self._make_follower = Follower
        self._new_incarnation = new_incarnation
        self._replica: Replica | None = None
        self._followers: Followers | None = None
        self._following: threading.Thread | None = None

    def start(self, config: EngineConfig, fill: int) -> ReplicaRecord:
        if self._replica is not None:
            self.stop()
        vocabulary = partial(self._vocabulary, config.model)
        self._replica = self._make(config, LeastOutstanding(), self._followers, vocabulary, fill=fill)
        return self._replica.record

    def lead(self, config: EngineConfig) -> tuple[str, str]:
        """Open the place where other ranks join the replica that ``start`` will make."""
        self.stop()
        incarnation = self._new_incarnation(config.role)
        self._followers = self._make_followers(
            incarnation, config.tensor_parallel_size, config.advertised_host, config.token
        )
        return incarnation, self._followers.address

    def follow(self, config: EngineConfig, rank: int, incarnation: str, leader: str, fill: int) -> None:
        """Be a rank of another process's replica until that ends."""
        self.stop()

        def run() -> None:
            try:
                self._make_follower(config, rank, incarnation, leader, fill=fill).run()
            except Exception:
                traceback.print_exc()

        self._following = threading.Thread(target=run)
        self._following.start()

    def use_prefill_replicas(self, replicas: dict[str, tuple[str, ...]], draining: frozenset[str]) -> None:
        assert self._replica is not None
        self._replica.use_prefill_replicas(replicas, draining)

    def drain(self, seconds: float) -> bool:
        assert self._replica is not None
        return self._replica.drain(seconds)

    def resident_bytes(self) -> int:
        import psutil  # noqa: PLC0415

        return int(psutil.Process().memory_info().rss)

    def require_health(self) -> None:
        assert self._replica is not None
        self._replica.require_health()

    def stop(self) -> None:
        if self._replica is not None:
            self._replica.stop(grace=0.0)
            self._replica = None
        if self._followers is not None:
            self._followers.stop()
        self._followers = None
        if self._following is not None:
            self._following.join()
            self._following = None


def host(descriptor: int) -> None:
    """Serve the parent's calls until it closes the connection or dies."""
    import logging  # noqa: PLC0415

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(threadName)s %(message)s")
    connection = Connection(descriptor)
    replicas = _Host()
    while True:
        try:
            method, arguments = connection.recv()
        except EOFError:
            break
        try:
            connection.send((getattr(replicas, method)(*arguments), None))
        except Exception:
            connection.send((None, traceback.format_exc()))
    os._exit(0)


class EngineProcess:
    """One process. ``log`` receives its output. ``inside`` puts a command elsewhere, such as onto another host."""

    def __init__(self, log: Path, inside: Callable[..., list[str]] = lambda *command: [*command]) -> None:
        self._log = log
        self._shown = 0
        self._connection, theirs = Pipe()
        descriptor = theirs.fileno()
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                inside(sys.executable, "-c", f"from tests.engine_process import host; host({descriptor})"),
                pass_fds=[descriptor],
                cwd=_ROOT,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        theirs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def start(self, config: EngineConfig, fill: int = SENTINEL_BYTE) -> ReplicaRecord:
        """Make a replica, ending the one before it."""
        record: ReplicaRecord = self._call("start", config, fill)
        return record

    def lead(self, config: EngineConfig) -> tuple[str, str]:
        """Get ready to lead other ranks; returns the coming replica's incarnation, and where they join it."""
        incarnation, address = self._call("lead", config)
        return incarnation, address

    def follow(self, config: EngineConfig, rank: int, incarnation: str, leader: str, fill: int = SENTINEL_BYTE) -> None:
        """Begin to be a rank of another process's replica."""
        self._call("follow", config, rank, incarnation, leader, fill)

    def use_prefill_replicas(self, *records: ReplicaRecord) -> None:
        """Tell a decode replica which prefill replicas there are; it is connected to them when this returns."""
        draining = frozenset(record.incarnation for record in records if record.draining)
        self._call("use_prefill_replicas", {record.incarnation: record.kv_addresses for record in records}, draining)

    def drain(self, seconds: float) -> bool:
        """Have the replica finish what it has; whether it has."""
        finished: bool = self._call("drain", seconds)
        return finished

    def resident_bytes(self) -> int:
        """The process' memory."""
        size: int = self._call("resident_bytes")
        return size

    def require_health(self) -> None:
        """Raise unless the replica's engine is alive."""
        self._call("require_health")

    def stop_replica(self) -> None:
        """End the replica; the process stays for the next one."""
        self._call("stop")

    @property
    def pid(self) -> int:
        """The process' id."""
        return self._process.pid

    def signal(self, number: int) -> None:
        """Send a signal to the process, such as SIGKILL or SIGSTOP."""
        self._process.send_signal(number)

    def close(self) -> None:
        """End the process."""
        self._connection.close()
        self._process.kill()
        self._process.wait()

    def new_output(self) -> str:
        """What it has written since it was last asked."""
        with self._log.open("rb") as output:
            output.seek(self._shown)
            text = output.read()
        self._shown += len(text)
        return text.decode(errors="replace")

    def _call(self, method: str, *arguments: object) -> Any:
        try:
            self._connection.send((method, arguments))
            if not self._connection.poll(_CALL_SECONDS):
                raise EngineProcessFailed(f"{method} took more than {_CALL_SECONDS} s:\n{self.new_output()}")
            result, error = self._connection.recv()
        except (EOFError, OSError) as lost:
            raise EngineProcessFailed(f"the process has died:\n{self.new_output()}") from lost
        if error is not None:
            raise EngineProcessFailed(error)
        return result


@dataclass(frozen=True)
class RankProcesses:
    """The processes of one replica, the leading rank's first. Used like the one process of a replica of one rank."""

    processes: Sequence[EngineProcess]

    def start(self, config: EngineConfig, fill: int = SENTINEL_BYTE) -> ReplicaRecord:
        """Make a replica of as many ranks, ending the one before it."""
        leader, *others = self.processes
        config = replace(config, tensor_parallel_size=len(self.processes))
        if not others:
            return leader.start(config, fill)
        incarnation, address = leader.lead(config)
        for rank, process in enumerate(others, start=1):
            process.follow(config, rank, incarnation, address, fill)
        return leader.start(config, fill)

    def use_prefill_replicas(self, *records: ReplicaRecord) -> None:
        """See ``EngineProcess``."""
        self.processes[0].use_prefill_replicas(*records)

    def require_health(self) -> None:
        """See ``EngineProcess``."""
        self.processes[0].require_health()

    def stop_replica(self) -> None:
        """End the replica; the processes stay for the next one."""
        for process in self.processes:
            process.stop_replica()


ReplicaProcess = EngineProcess | RankProcesses
