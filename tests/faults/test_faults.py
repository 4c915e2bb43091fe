"""Processes of a running cluster are killed or stopped in every state of a request.

Afterwards nothing hangs, the client has the text that it would have had, or one clear error where the process held its
socket, and no replica that lives holds a block.
"""

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise

import grpc
import httpx
import psutil
import pytest

from cluster.config import ClusterConfig
from cluster.ports import free_port
from kv_transfer.transport import Transport
from tests.faults.cell import Cell, Outcome, Outcomes, State, Target
from tests.faults.stream import Stream
from tests.faults.view import Replica, listening_process, replicas
from tests.serving import Serving
from tests.tiny_checkpoints import VOCAB_SIZE
from worker.config import Role

NUMBERS = random.Random(77)
PROMPT = [NUMBERS.randrange(4, VOCAB_SIZE) for _ in range(1200)]
TOKENS = 200
SHORT_PROMPT = PROMPT[:8]
MANY_TOKENS = 2500
SEATS = 2
BYTES_PER_TOKEN = 4 * 2 * 2 * 16 * 4
NOTICED_SECONDS = 10.0
"""Generous: the machine may be busy. What it takes is in the table."""
SECONDS = 60.0
RECOVERY_SECONDS = 180.0


@dataclass
class Undisturbed:
    """What the two kinds of requests give when nothing happens."""

    whole: list[int] = field(default_factory=list)
    text: str = ""
    long: list[int] = field(default_factory=list)


@pytest.fixture(scope="module")
def undisturbed() -> Undisturbed:
    return Undisturbed()


@pytest.fixture
def serving(one_cluster: Serving, cell: Cell, undisturbed: Undisturbed) -> Iterator[Serving]:
    """The session's cluster as this cell needs it, whole before and after."""
    deploy(one_cluster, *cell.deployment)
    wait_until_whole(one_cluster)
    if not undisturbed.whole:
        answer = Stream.whole(one_cluster.base_url, PROMPT, TOKENS, "undisturbed")
        undisturbed.whole, undisturbed.text = answer.tokens, answer.text
        undisturbed.long = Stream.whole(one_cluster.base_url, SHORT_PROMPT, MANY_TOKENS, "undisturbed").tokens
    yield one_cluster
    wait_until_whole(one_cluster)
    again = Stream.whole(one_cluster.base_url, PROMPT, 5, f"after {cell}")
    assert again.tokens == undisturbed.whole[:5]
    one_cluster.wait_until_idle()


def deploy(cluster: Serving, transport: Transport, ranks: int) -> None:
    config: ClusterConfig = cluster.config.replace(
        transport=transport,
        prefill_replicas=2 if ranks == 1 else 1,
        tensor_parallel_size=ranks,
        kv_cache_memory="16MiB",
        # So little at a time that every state lasts long enough to be seen.
        max_batched_tokens=4,
        max_running_requests=SEATS,
    )
    if config.replace(port=cluster.deployed.port) != cluster.deployed:
        # Another port, because the one before may linger.
        cluster.require(config.replace(port=free_port("127.0.0.1")))


def wait_until_whole(cluster: Serving) -> None:
    """Every replica that should be there is there and connected, and the front end answers."""
    wanted = cluster.deployed.replicas
    deadline = time.monotonic() + RECOVERY_SECONDS
    while True:
        try:
            statuses = cluster.statuses()
            found = {role: sum(s["role"] == role.value for s in statuses) for role in wanted}
            peers = [s["load"]["prefill_peers"] for s in statuses if s["role"] == Role.DECODE.value]
            if found == wanted and all(count == wanted[Role.PREFILL] for count in peers):
                return
            seen = f"{found}, peers {peers}"
        except httpx.HTTPError as error:
            seen = repr(error)
        assert time.monotonic() < deadline, f"not whole within {RECOVERY_SECONDS} s: {seen}"
        time.sleep(0.1)


class Scene:
    """A request in a certain state, and everything that is there."""

    def __init__(self, cluster: Serving, cell: Cell, found: list[Replica]) -> None:
        self.cluster = cluster
        self.cell = cell
        self.prefill = [replica for replica in found if replica.role is Role.PREFILL]
        self.decode = [replica for replica in found if replica.role is Role.DECODE]
        self.before = {replica.record.incarnation: replica.status() for replica in found}
        # Looked up before there is a request: it takes as long as some requests do.
        self.victims = self._victims()
        self.others: list[Stream] = []
        if cell.state is State.QUEUED:
            self._take_every_seat()
        self.request = Stream(cluster.base_url, PROMPT, TOKENS, f"{cell} {time.time()}")
        self.owner = self._reach()

    def _take_every_seat(self) -> None:
        for number in range(SEATS * len(self.decode)):
            salt = f"{self.cell} {number} {time.time()}"
            self.others.append(Stream(self.cluster.base_url, SHORT_PROMPT, MANY_TOKENS, salt))
            self.others[-1].wait_for_tokens(1, SECONDS)

    def _reach(self) -> Replica:
        """Return as soon as the request is in its state: the decode replica that has it."""
        if self.cell.state is State.DECODE:
            self.request.wait_for_tokens(20, SECONDS)
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            for replica in self.decode:
                if self._is_reached(replica):
                    return replica
        raise AssertionError(f"never {self.cell.state}: {[replica.status() for replica in self.decode]}")

    def _is_reached(self, replica: Replica) -> bool:
        now, before = replica.status(), self.before[replica.record.incarnation]
        part = (now.counters.payload_bytes - before.counters.payload_bytes) / (len(PROMPT) * BYTES_PER_TOKEN)
        match self.cell.state:
            case State.QUEUED:
                return now.load.waiting_requests > 0
            case State.PREFILL:
                return now.load.receiving_requests > 0 and 0.0 < part < 0.5
            case State.TRANSFER:
                return now.load.receiving_requests > 0 and 0.5 <= part < 1.0
            case State.COMMITTED:
                return now.counters.transfers > before.counters.transfers
            case State.DECODE:
                return now.load.running_requests > 0

    def victim(self) -> psutil.Process:
        """The process to be struck: of those with the request, where there are several."""
        match self.cell.target:
            case Target.DECODE | Target.DECODE_RANK:
                return self.victims[self.owner.record.incarnation]
            case Target.PREFILL | Target.PREFILL_RANK:
                sender = max(self.prefill, key=lambda replica: replica.status().load.running_requests)
                return self.victims[sender.record.incarnation]
            case Target.FRONT_END:
                (process,) = self.victims.values()
                return process

    def _victims(self) -> dict[str, psutil.Process]:
        """All processes that may be struck, by whose they are."""
        match self.cell.target:
            case Target.DECODE:
                return {replica.record.incarnation: replica.process() for replica in self.decode}
            case Target.DECODE_RANK:
                return {replica.record.incarnation: replica.follower() for replica in self.decode}
            case Target.PREFILL:
                return {replica.record.incarnation: replica.process() for replica in self.prefill}
            case Target.PREFILL_RANK:
                return {replica.record.incarnation: replica.follower() for replica in self.prefill}
            case Target.FRONT_END:
                return {"front end": listening_process(self.cluster.deployed.port)}

    def noticed(self) -> bool | None:
        """Whether somebody has turned away from the process; None if nobody has a reason to."""
        match self.cell.target:
            case Target.DECODE | Target.DECODE_RANK:
                return any(self._has_more(replica) for replica in self.decode if replica is not self.owner)
            case Target.PREFILL | Target.PREFILL_RANK:
                if self.cell.state not in (State.PREFILL, State.TRANSFER):
                    return None
                failed = self.before[self.owner.record.incarnation].counters.transfers_failed
                return self.owner.status().counters.transfers_failed > failed
            case Target.FRONT_END:
                now = [(replica.status(), self.before[replica.record.incarnation]) for replica in self.decode]
                if any(status.counters.requests_aborted > before.counters.requests_aborted for status, before in now):
                    return True
                # It may have come to its end before anybody noticed.
                return None if all(status.held_blocks == 0 for status, _ in now) else False

    def _has_more(self, replica: Replica) -> bool:
        load = replica.status().load
        return load.running_requests + load.waiting_requests + load.receiving_requests > (
            SEATS if self.cell.state is State.QUEUED else 0
        )


def test_fault(serving: Serving, cell: Cell, undisturbed: Undisturbed, outcomes: Outcomes) -> None:
    with ExitStack() as stack:
        scene = Scene(serving, cell, stack.enter_context(replicas()))
        victim = scene.victim()
        victim.send_signal(cell.number)
        struck = time.monotonic()
        if cell.number is signal.SIGSTOP and not cell.stays:
            stack.callback(go_on, victim)
        noticed = wait_until(scene.noticed, struck)
        if cell.number is signal.SIGSTOP and cell.target is Target.FRONT_END:
            # It holds the client's socket; the client gets its text if it goes on.
            go_on(victim)
        for other in scene.others:
            other.leave()
        for other in scene.others:
            other.wait_for_end(SECONDS)
        scene.request.wait_for_end(SECONDS)
    streams = [scene.request, *scene.others]
    lost = [stream.error for stream in streams if not stream.done and stream.error != "closed"]
    later = [struck, *(arrival for arrival in scene.request.arrivals if arrival > struck)]
    wait = max((after - before for before, after in pairwise(later)), default=None)
    result = "the same text" if not lost else f"error: {lost[0]}"
    outcomes.add(Outcome(cell, result, noticed, wait, len(lost)))
    if cell.target is Target.FRONT_END and cell.number is signal.SIGKILL:
        assert scene.request.error is not None, "who answered?"
    else:
        assert not lost
        assert scene.request.tokens == undisturbed.whole
        assert scene.request.text == undisturbed.text
    for stream in streams:
        expected = undisturbed.whole if stream is scene.request else undisturbed.long
        assert stream.tokens == expected[: len(stream.tokens)]


@pytest.fixture
def pair_of_each(one_cluster: Serving) -> Iterator[Serving]:
    """Two replicas of each role, whole before and after."""
    deploy(one_cluster, Transport.GRPC, 1)
    wait_until_whole(one_cluster)
    yield one_cluster
    wait_until_whole(one_cluster)
    one_cluster.wait_until_idle()


def kill_who_decodes(seen: set[str]) -> None:
    """Kill the decode replica that generates, unless it has been ``seen``."""
    deadline = time.monotonic() + SECONDS
    with replicas() as found:
        while time.monotonic() < deadline:
            for replica in found:
                if replica.role is Role.DECODE and replica.record.incarnation not in seen and generates(replica):
                    seen.add(replica.record.incarnation)
                    replica.process().kill()
                    return
    raise AssertionError("nobody decodes")


def generates(replica: Replica) -> bool:
    try:
        return replica.status().load.running_requests > 0
    except grpc.RpcError:
        return False


def test_several_choices_go_on_as_they_would_have(pair_of_each: Serving) -> None:
    """Sampled, with log-probabilities, a penalty, and the prompt repeated: as if nothing had happened."""
    ask = {
        "prompt": PROMPT[:50],
        "n": SEATS,
        "seed": 5,
        "temperature": 1.0,
        "frequency_penalty": 0.5,
        "max_tokens": 800,
        "min_tokens": 700,
        "logprobs": 2,
        "echo": True,
    }
    url = f"{pair_of_each.base_url}/v1/completions"
    expected = httpx.post(url, json=ask, timeout=SECONDS).json()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(httpx.post, url, json=ask | {"cache_salt": "victim"}, timeout=3 * SECONDS)
        kill_who_decodes(set())
        resumed = answer.result().json()
    assert resumed["usage"]["crosskv"]["resumptions"] >= 1
    assert resumed["usage"]["total_tokens"] == expected["usage"]["total_tokens"]
    for got, wanted in zip(resumed["choices"], expected["choices"], strict=True):
        assert (got["text"], got["finish_reason"]) == (wanted["text"], wanted["finish_reason"])
        assert got["logprobs"]["tokens"] == wanted["logprobs"]["tokens"]
        assert got["logprobs"]["token_logprobs"][1:] == pytest.approx(
            wanted["logprobs"]["token_logprobs"][1:], abs=1e-3
        )


def test_a_request_that_two_replicas_die_with_is_refused(pair_of_each: Serving) -> None:
    ask = {"prompt": SHORT_PROMPT, "max_tokens": MANY_TOKENS, "temperature": 0, "ignore_eos": True}
    seen: set[str] = set()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(
            httpx.post, f"{pair_of_each.base_url}/v1/completions", json=ask | {"cache_salt": "poison"}, timeout=SECONDS
        )
        kill_who_decodes(seen)
        kill_who_decodes(seen)
        refused = answer.result()
    assert refused.status_code == 500
    assert refused.json()["error"]["code"] == "poison_request"


def wait_until(condition: Callable[[], bool | None], since: float) -> float | None:
    """Seconds until something holds, or None if it never can."""
    while True:
        try:
            holds = condition()
        except grpc.RpcError:
            holds = False
        if holds is None:
            return None
        took = time.monotonic() - since
        if holds:
            return took
        assert took < NOTICED_SECONDS, f"nobody has noticed within {NOTICED_SECONDS} s"
        time.sleep(0.01)


def go_on(process: psutil.Process) -> None:
    """Let a process that was stopped go on, if it is still there."""
    if process.is_running():
        os.kill(process.pid, signal.SIGCONT)
