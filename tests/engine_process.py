"""Replicas in processes of their own, and a client that speaks to them as a front end does.

An ``EngineProcess`` is started once (importing torch takes seconds) and can carry one replica after another, or one
rank of it; a test that kills one starts its own. ``RankProcesses`` are the processes of a replica of several ranks.
``colocated`` and ``disaggregated`` put replicas with a cluster token into processes, hand out clients, and on the way
out check that every replica gave back every block. KV memory is filled with a large finite sentinel, so that a slot
that is read before it was written shows in the tokens.
"""

import contextlib
import itertools
import os
import queue
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import grpc

from kv_transfer.cluster_token import ClusterToken, metadata_of
from worker.config import EngineConfig, Role
from worker.replica_record import ReplicaRecord
from worker.wire import engine_pb2 as wire
from worker.wire import engine_pb2_grpc

if TYPE_CHECKING:
    from worker.prefill_selector import PrefillCandidate

TOKEN = ClusterToken("the-token-of-every-test")

SENTINEL_BYTE = 0x4B
"""Repeated, it is 1.3e7 in float32 and bfloat16, and 14.6 in float16."""

_ROOT = Path(__file__).resolve().parents[1]
_CALL_SECONDS = 120.0
_ANSWER_SECONDS = 120.0
_SETTLE_SECONDS = 20.0


class EngineProcessFailed(Exception):
    """A process did not do what it was told; the message holds its traceback or the end of its log."""


class RequestFailed(Exception):
    """A request ended with an error instead of tokens."""

    def __init__(self, error: wire.Error) -> None:
        super().__init__(f"{wire.ErrorKind.Name(error.kind)}: {error.message}")
        self.kind = error.kind
        self.message = error.message


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


@dataclass
class Choice:
    """One choice of an answer."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[wire.TokenLogprobs] = field(default_factory=list)
    finish_reason: int = wire.FINISH_REASON_UNSPECIFIED
    stop_token_id: int | None = None


@dataclass
class Answer:
    """Everything that came back for one request."""

    choices: list[Choice]
    prompt_info: wire.PromptInfo

    @property
    def tokens(self) -> list[int]:
        """The only choice's tokens."""
        (choice,) = self.choices
        return choice.tokens


class PendingAnswer:
    """A request on its way. Also checks that the engine keeps to the protocol."""

    def __init__(self, client: "EngineClient", request_id: str, n: int) -> None:
        self._client = client
        self._request_id = request_id
        self._choices = [Choice() for _ in range(n)]
        self._prompt_info: wire.PromptInfo | None = None
        self._failure: Exception | None = None
        self._changed = threading.Condition()

    def result(self, timeout: float = _ANSWER_SECONDS) -> Answer:
        """Wait for the last token. Raises ``RequestFailed``."""
        self._wait(lambda: self._prompt_info is not None and all(c.finish_reason for c in self._choices), timeout)
        assert self._prompt_info is not None
        return Answer(self._choices, self._prompt_info)

    def wait_for_tokens(self, count: int, timeout: float = _ANSWER_SECONDS) -> None:
        """Wait until so many tokens have come, over all choices."""
        self._wait(lambda: sum(len(choice.tokens) for choice in self._choices) >= count, timeout)

    def abort(self) -> None:
        """Lose interest. Nothing more is delivered."""
        self._client.abort(self._request_id)

    def take(self, output: wire.Output) -> None:
        """Add what one step produced."""
        with self._changed:
            try:
                self._add(output)
            except AssertionError as violation:
                self._failure = violation
            self._changed.notify_all()

    def fail(self, failure: Exception) -> None:
        """End without an answer."""
        with self._changed:
            self._failure = self._failure or failure
            self._changed.notify_all()

    def _add(self, output: wire.Output) -> None:
        if output.HasField("error"):
            assert output.finish_reason == wire.FINISH_REASON_ERROR
            self._failure = RequestFailed(output.error)
            return
        assert output.HasField("prompt_info") == (self._prompt_info is None), "prompt_info comes first, and once"
        if output.HasField("prompt_info"):
            self._prompt_info = output.prompt_info
        choice = self._choices[output.choice]
        assert not choice.finish_reason, f"choice {output.choice} goes on after its end"
        choice.tokens += output.token_ids
        choice.logprobs += output.logprobs
        choice.finish_reason = output.finish_reason
        if output.HasField("stop_token_id"):
            choice.stop_token_id = output.stop_token_id

    def _wait(self, condition: Any, timeout: float) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: self._failure is not None or condition(), timeout):
                raise TimeoutError(f"{self._request_id}: no answer within {timeout} s, only {self._choices}")
            if self._failure is not None:
                raise self._failure


class EngineClient:
    """A front end's session with one replica."""

    def __init__(self, address: str, token: ClusterToken | None = TOKEN) -> None:
        self._metadata = metadata_of(token)
        options = (("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1))
        self._channel = grpc.insecure_channel(address, options=options)
        self._stub = engine_pb2_grpc.EngineStub(self._channel)  # type: ignore[no-untyped-call]
        self._numbers = itertools.count()
        self._pending: dict[str, PendingAnswer] = {}
        self._outgoing: queue.SimpleQueue[wire.ClientMessage | None] = queue.SimpleQueue()
        self._session = self._stub.Session(iter(self._outgoing.get, None), metadata=self._metadata)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def submit(
        self,
        token_ids: Sequence[int],
        *,
        n: int = 1,
        prompt_len: int | None = None,
        cache_salt: str = "",
        timeout_ms: int = 0,
        **sampling: Any,
    ) -> PendingAnswer:
        """Ask for tokens: greedy and past any end of sequence, unless ``sampling`` (``wire.Sampling``) says else."""
        request_id = f"request-{next(self._numbers)}"
        settings = {"top_p": 1.0, "repetition_penalty": 1.0, "ignore_eos": True, "max_tokens": 16} | sampling
        pending = self._pending[request_id] = PendingAnswer(self, request_id, n)
        message = wire.Submit(
            request_id=request_id,
            token_ids=token_ids,
            prompt_len=len(token_ids) if prompt_len is None else prompt_len,
            sampling=wire.Sampling(**settings),
            n=n,
            cache_salt=cache_salt,
            timeout_ms=timeout_ms,
        )
        self._outgoing.put(wire.ClientMessage(submit=message))
        return pending

    def generate(self, token_ids: Sequence[int], **settings: Any) -> Answer:
        """Submit and wait. Raises ``RequestFailed``."""
        return self.submit(token_ids, **settings).result()

    def abort(self, request_id: str) -> None:
        """Cancel a request."""
        self._outgoing.put(wire.ClientMessage(abort=wire.Abort(request_id=request_id)))

    def status(self) -> wire.StatusReply:
        """What the replica says of itself."""
        reply: wire.StatusReply = self._stub.Status(
            wire.StatusRequest(), timeout=_SETTLE_SECONDS, metadata=self._metadata
        )
        return reply

    def settled(self) -> wire.StatusReply:
        """The status once no request is left; checks that every block is free or cached."""
        status = self.wait_for_status(
            lambda s: not (s.load.running_requests or s.load.waiting_requests or s.load.receiving_requests)
        )
        assert status.held_blocks == 0, f"{status.held_blocks} blocks are still held"
        assert status.load.free_blocks + status.load.cached_blocks == status.load.total_blocks
        return status

    def wait_for_status(self, condition: Any) -> wire.StatusReply:
        """Ask until ``condition`` holds of the answer."""
        deadline = time.monotonic() + _SETTLE_SECONDS
        while not condition(status := self.status()):
            assert time.monotonic() < deadline, f"waited {_SETTLE_SECONDS} s; the last status is {status}"
            time.sleep(0.005)
        return status

    def close(self) -> None:
        """End the session, as a front end does that goes away."""
        self._outgoing.put(None)
        self._session.cancel()
        self._channel.close()
        self._thread.join()

    def _read(self) -> None:
        failure: Exception = ConnectionError("the session has ended")
        try:
            for message in self._session:
                for output in message.outputs:
                    self._pending[output.request_id].take(output)
        except grpc.RpcError as error:
            failure = ConnectionError(f"the session has ended: {error}")
        for pending in self._pending.values():
            pending.fail(failure)


@contextlib.contextmanager
def connected(record: ReplicaRecord) -> Iterator[EngineClient]:
    """A client of a replica."""
    client = EngineClient(record.session_address)
    try:
        yield client
    finally:
        client.close()


@contextlib.contextmanager
def colocated(process: ReplicaProcess, config: EngineConfig) -> Iterator[EngineClient]:
    """A replica that does both phases; afterwards it must hold nothing."""
    record = process.start(replace(config, role=Role.COLOCATED, threads=1, token=TOKEN))
    try:
        with connected(record) as client:
            yield client
            client.settled()
            process.require_health()
    finally:
        process.stop_replica()


@dataclass(frozen=True, slots=True)
class Pair:
    """Clients of a decode replica, which generates, and of its prefill replica, which only has a status."""

    decode: EngineClient
    prefill: EngineClient


@contextlib.contextmanager
def disaggregated(
    prefill: ReplicaProcess, decode: ReplicaProcess, config: EngineConfig, **prefill_settings: Any
) -> Iterator[Pair]:
    """A prefill and a decode replica, connected; afterwards both must hold nothing.

    ``prefill_settings`` are what the prefill replica's configuration has otherwise.
    """
    prefill_record = prefill.start(replace(config, role=Role.PREFILL, threads=1, token=TOKEN, **prefill_settings))
    try:
        decode_record = decode.start(replace(config, role=Role.DECODE, threads=1, token=TOKEN))
        decode.use_prefill_replicas(prefill_record)
        with connected(decode_record) as client, connected(prefill_record) as prefill_client:
            status = client.status()
            assert status.load.prefill_peers == 1, status.prefill_error
            yield Pair(client, prefill_client)
            client.settled()
            prefill_client.settled()
            decode.require_health()
            prefill.require_health()
    finally:
        decode.stop_replica()
        prefill.stop_replica()
