"""Processes that replicas run in.

An ``EngineProcess`` can carry one replica after another, or one rank of it; a test that kills one starts its own.
They are forked from a server that has imported torch, which takes seconds. ``RankProcesses`` are the processes of a
replica of several ranks. KV memory is filled with a large finite sentinel, so that a slot that is read before it was
written shows in the tokens.
"""

import contextlib
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

import psutil

from kv_transfer.cluster_token import ClusterToken
from worker.config import EngineConfig
from worker.replica_record import ReplicaRecord

TOKEN = ClusterToken("the-token-of-every-test")

SENTINEL_BYTE = 0x4B
"""Repeated, it is 1.3e7 in float32 and bfloat16, and 14.6 in float16."""

_ROOT = Path(__file__).resolve().parents[1]
_CALL_SECONDS = 120.0

_FORKED = multiprocessing.get_context("forkserver")
# A configuration of transformers' imports what all of them need.
_FORKED.set_forkserver_preload(["tests.engine_host", "transformers.models.llama.configuration_llama"])


class EngineProcessFailed(Exception):
    """A process did not do what it was told; the message holds its traceback or the end of its log."""


def _forked(connection: Connection, log: Path) -> None:
    """What a forked process does."""
    with log.open("wb") as output:
        os.dup2(output.fileno(), sys.stdout.fileno())
        os.dup2(output.fileno(), sys.stderr.fileno())
    # Who asks need not import torch.
    from tests.engine_host import serve  # noqa: PLC0415

    serve(connection)


class EngineProcess:
    """One process. ``log`` receives its output. ``inside`` puts a command elsewhere, such as onto another host."""

    def __init__(self, log: Path, inside: Callable[..., list[str]] | None = None) -> None:
        self._log = log
        self._shown = 0
        self._connection, theirs = multiprocessing.Pipe()
        if inside is None:
            forked = _FORKED.Process(target=_forked, args=(theirs, log), daemon=True)
            forked.start()
            assert forked.pid is not None
            self._process = psutil.Process(forked.pid)
        else:
            descriptor = theirs.fileno()
            with log.open("wb") as output:
                self._process = psutil.Popen(
                    inside(sys.executable, "-c", f"from tests.engine_host import serve_at; serve_at({descriptor})"),
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
        with contextlib.suppress(psutil.NoSuchProcess):
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
