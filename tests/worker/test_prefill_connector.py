import queue
import threading
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Sequences
from dataclasses import replace

import pytest

from kv_transfer import prefill_peer
from kv_transfer.layout import CacheLayout, Lifetime, OwnerLayer, Section, SlotRange
from kv_transfer.prefill_peer import TransferEnded, TransferEvent
from kv_transfer.prefill_server import PrefillJob, PrefillServer, RankStream, TransferName
from kv_transfer.staging import StagingBudget
from kv_transfer.transfer import Transfer
from worker.prefill_connector import (
    BUSY_BACKOFF,
    BUSY_PATIENCE,
    FIRST_BACKOFF,
    LONGEST_BACKOFF,
    OpenTransfer,
    Outcome,
    PrefillConnector,
    Received,
)
from worker.prefill_peers import PrefillPeers
from worker.prefill_selector import PrefillCandidate
from worker.ranks.commands import OpenIncoming
from worker.ranks.team import RankTeam
from worker.sampling_params import SamplingParams
from worker.scheduler import NO_PREFILL, PrefillCredit
from worker.sequence import Epoch, RequestId, Sequence

LAYOUT = CacheLayout(
    "model",
    "float32",
    (
        Section(Lifetime.EVERY_TOKEN, 0, 0, (OwnerLayer("a", 1, 4, 0),)),
        Section(Lifetime.STATE, 0, 0, (OwnerLayer("b", 0, 8, 0),)),
    ),
    "digest",
    0,
)
LACKING = (SlotRange(2, 9), SlotRange(0, 1))
SECONDS = 20.0
STREAMS = 3


class LeastLoaded:
    """A selector that notes what it was asked and may do something in between."""

    def __init__(self) -> None:
        self.asked: list[list[PrefillCandidate]] = []
        self.meanwhile: Callable[[], None] = lambda: None

    def choose(self, candidates: Sequences[PrefillCandidate], token_ids: Sequences[int], salt: str) -> str:
        assert list(token_ids) == list(range(9))
        assert salt == "salt"
        self.asked.append(sorted(candidates, key=lambda candidate: candidate.incarnation))
        self.meanwhile()
        return min(candidates, key=lambda candidate: (candidate.outstanding_tokens, candidate.incarnation)).incarnation


class Cluster:
    """One connector, and as many real prefill servers as a test starts."""

    def __init__(self) -> None:
        self.servers: dict[str, PrefillServer] = {}
        self.calls: queue.Queue[PrefillJob | RankStream] = queue.Queue()
        self.events: queue.Queue[TransferEvent] = queue.Queue()
        self.selector = LeastLoaded()
        self.peers = PrefillPeers(LAYOUT, "decode-1", StagingBudget(1 << 20), self.events.put)
        # Nothing is computed.
        team = RankTeam(None, peers=self.peers)  # type: ignore[arg-type]
        self.connector = PrefillConnector(team, self.selector, transfer_timeout=SECONDS)

    def start(self, *incarnations: str, layout: CacheLayout = LAYOUT) -> dict[str, tuple[str, ...]]:
        """Start servers; returns what the directory would say of them."""
        for incarnation in incarnations:
            server = PrefillServer(layout, incarnation, STREAMS, self.calls.put, host="127.0.0.1")
            server.start()
            self.servers[incarnation] = server
        return {incarnation: self.address(incarnation) for incarnation in incarnations}

    def address(self, incarnation: str) -> tuple[str, ...]:
        return (f"127.0.0.1:{self.servers[incarnation].port}",)

    def open(self, now: float = 0.0, deadline: float = 1e6) -> OpenTransfer | None:
        sequence = Sequence(
            request_id=RequestId("request"),
            choice=0,
            tokens=list(range(10)),
            prompt_len=10,
            sampling=SamplingParams(),
            salt="salt",
            arrival=0.0,
            deadline=deadline,
            epoch=Epoch(1),
        )
        return self.connector.open(sequence, now)

    def opened(self, now: float = 0.0) -> OpenTransfer:
        transfer = self.open(now)
        assert transfer is not None
        return transfer

    def call(self, opened: OpenTransfer) -> tuple[Transfer, ...]:
        """Ask the replica that was chosen at time 0."""
        prompt = tuple(range(9))
        command = OpenIncoming(
            "request",
            1,
            opened.incarnation,
            LACKING,
            (),
            opened.deadline,
            token_ids=prompt,
            cache_salt="salt",
            caller="me",
            priority=-3,
        )
        return tuple(transfer for _, transfer in self.peers.open(command))

    def close(self) -> None:
        self.connector.close()
        for server in self.servers.values():
            server.stop(0.0)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    cluster = Cluster()
    yield cluster
    cluster.close()


def test_credit_is_what_all_replicas_grant_less_what_is_open(cluster: Cluster) -> None:
    assert cluster.connector.credit(0.0) == NO_PREFILL
    cluster.connector.update(cluster.start("p1", "p2"))
    assert cluster.connector.peers == 2
    assert cluster.connector.last_error == ""
    assert cluster.connector.credit(0.0) == PrefillCredit(True, 2 * STREAMS)
    opened = [cluster.opened() for _ in range(2 * STREAMS)]
    assert cluster.connector.credit(0.0) == PrefillCredit(True, 0)
    assert cluster.open() is None
    assert sorted(transfer.incarnation for transfer in opened) == ["p1"] * STREAMS + ["p2"] * STREAMS
    cluster.connector.closed(opened[0], Outcome.COMPLETE, 0.0)
    assert cluster.connector.credit(0.0) == PrefillCredit(True, 1)
    assert cluster.opened().incarnation == opened[0].incarnation


def test_a_call_carries_the_prompt_without_its_last_token(cluster: Cluster) -> None:
    cluster.connector.update(cluster.start("p1"))
    (transfer,) = cluster.call(cluster.opened())
    job = cluster.calls.get(timeout=SECONDS)
    assert isinstance(job, PrefillJob)
    assert (job.name, job.receivers) == (TransferName("decode-1", "request", 1), 1)
    assert (job.token_ids, job.lacking, job.cache_salt) == (tuple(range(9)), LACKING, "salt")
    assert (job.caller, job.priority) == ("me", -3)
    assert job.timeout == SECONDS
    assert (transfer.request_id, transfer.epoch, transfer.sender) == ("request", 1, 0)


@pytest.mark.parametrize(
    ("deadline", "expected"), [(1e6, 100.0 + SECONDS), (103.0, 103.0), (99.0, pytest.approx(100.0, abs=0.01))]
)
def test_a_transfer_ends_with_its_own_time_or_with_its_request(
    cluster: Cluster, deadline: float, expected: float
) -> None:
    cluster.connector.update(cluster.start("p1"))
    opened = cluster.open(now=100.0, deadline=deadline)
    assert opened is not None
    assert opened.deadline == expected
    assert opened.deadline > 100.0


def test_the_selector_sees_what_each_replica_still_has_to_do(cluster: Cluster) -> None:
    cluster.connector.update(cluster.start("p1", "p2"))
    first = cluster.opened()
    cluster.opened()
    cluster.connector.closed(first, Outcome.COMPLETE, 0.0)
    cluster.opened()
    assert cluster.selector.asked == [
        [PrefillCandidate("p1", 0), PrefillCandidate("p2", 0)],
        [PrefillCandidate("p1", 9), PrefillCandidate("p2", 0)],
        [PrefillCandidate("p1", 0), PrefillCandidate("p2", 9)],
    ]


def test_a_replica_that_fails_is_left_alone_longer_each_time(cluster: Cluster) -> None:
    cluster.connector.update(cluster.start("p1"))
    now, pauses = 100.0, []
    for _ in range(8):
        cluster.connector.closed(cluster.opened(now), Outcome.FAILED, now)
        assert cluster.connector.credit(now) == PrefillCredit(False, 0), "nobody waits for a replica that failed"
        assert cluster.open(now) is None
        pause = FIRST_BACKOFF
        while not cluster.connector.credit(now + pause).reachable:
            pause += FIRST_BACKOFF
        pauses.append(pause)
        now += pause
    assert pauses == [0.25, 0.5, 1.0, 2.0, 4.0, 8.0, LONGEST_BACKOFF, LONGEST_BACKOFF]
    cluster.connector.closed(cluster.opened(now), Outcome.COMPLETE, now)
    cluster.connector.closed(cluster.opened(now), Outcome.FAILED, now)
    assert cluster.connector.credit(now + FIRST_BACKOFF) == PrefillCredit(True, STREAMS)


def test_a_busy_replica_is_waited_for(cluster: Cluster) -> None:
    cluster.connector.update(cluster.start("p1"))
    cluster.connector.closed(cluster.opened(), Outcome.BUSY, 0.0)
    assert cluster.connector.credit(0.0) == PrefillCredit(reachable=True, streams=0)
    assert cluster.open() is None
    assert cluster.connector.credit(BUSY_BACKOFF) == PrefillCredit(reachable=True, streams=STREAMS)


def test_a_replica_that_stays_busy_counts_as_failed(cluster: Cluster) -> None:
    cluster.connector.update(cluster.start("p1"))
    for now in (0.0, BUSY_PATIENCE / 2, BUSY_PATIENCE):
        assert cluster.connector.credit(now).reachable
        cluster.connector.closed(cluster.opened(now), Outcome.BUSY, now)
    assert not cluster.connector.credit(BUSY_PATIENCE).reachable


@pytest.mark.parametrize("since", [Outcome.FAILED, Outcome.COMPLETE, Outcome.CANCELLED])
def test_a_replica_that_was_busy_long_ago_is_waited_for_again(cluster: Cluster, since: Outcome) -> None:
    cluster.connector.update(cluster.start("p1"))
    cluster.connector.closed(cluster.opened(), Outcome.BUSY, 0.0)
    cluster.connector.closed(cluster.opened(1.0), since, 1.0)
    cluster.connector.closed(cluster.opened(100.0), Outcome.BUSY, 100.0)
    assert cluster.connector.credit(100.0 + BUSY_BACKOFF) == PrefillCredit(True, STREAMS)


def test_a_failure_ends_the_time_in_which_a_replica_was_busy(cluster: Cluster) -> None:
    cluster.connector.update(cluster.start("p1"))
    for now, outcome in ((0.0, Outcome.BUSY), (BUSY_PATIENCE - 2.0, Outcome.FAILED), (BUSY_PATIENCE, Outcome.BUSY)):
        cluster.connector.closed(cluster.opened(now), outcome, now)
    assert cluster.connector.credit(BUSY_PATIENCE + BUSY_BACKOFF) == PrefillCredit(True, STREAMS)


def test_replicas_come_and_go_with_the_directory(cluster: Cluster) -> None:
    replicas = cluster.start("p1", "p2")
    cluster.connector.update(replicas)
    cluster.call(cluster.opened())
    cluster.connector.update({"p2": replicas["p2"]})
    assert cluster.connector.credit(0.0) == PrefillCredit(True, STREAMS)
    ended = cluster.events.get(timeout=SECONDS)
    assert isinstance(ended, TransferEnded)
    assert ended.end is None
    assert cluster.opened().incarnation == "p2"


def test_a_directory_that_blinks_does_not_change_what_is_granted(cluster: Cluster) -> None:
    replicas = cluster.start("p1")
    cluster.connector.update(replicas)
    opened = cluster.opened()
    cluster.connector.update({})
    cluster.connector.update(replicas)
    # The end of the old connection's transfer is heard only now.
    cluster.connector.closed(opened, Outcome.FAILED, 0.0)
    assert cluster.connector.credit(0.0) == PrefillCredit(True, STREAMS)
    assert [cluster.open() is not None for _ in range(STREAMS + 1)] == [True] * STREAMS + [False]


def test_a_replica_that_vanishes_while_it_is_asked_costs_only_that_transfer(cluster: Cluster) -> None:
    cluster.connector.update(cluster.start("p1"))
    vanished = threading.Thread(target=cluster.connector.update, args=[{}])

    def meanwhile() -> None:
        vanished.start()
        vanished.join(0.2)

    cluster.selector.meanwhile = meanwhile
    opened = cluster.opened()
    vanished.join(SECONDS)
    assert cluster.call(opened) == ()  # on the engine's thread, where an exception would end the replica
    cluster.connector.closed(opened, Outcome.FAILED, 0.0)
    assert cluster.connector.credit(0.0) == NO_PREFILL


def test_a_replica_of_another_model_is_named_and_not_asked_again(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    replicas = cluster.start("p1", layout=replace(LAYOUT, fingerprint="another"))
    handshakes = []
    connect = prefill_peer.PrefillPeer.connect

    def counted(peer: prefill_peer.PrefillPeer) -> None:
        handshakes.append(peer.address)
        connect(peer)

    monkeypatch.setattr(prefill_peer.PrefillPeer, "connect", counted)
    for _ in range(3):
        cluster.connector.update(replicas)
    assert "fingerprint" in cluster.connector.last_error
    assert cluster.connector.credit(0.0) == NO_PREFILL
    assert len(handshakes) == 1
    # Only a new incarnation can be different.
    cluster.connector.update(cluster.start("p2"))
    assert cluster.connector.last_error == ""
    assert cluster.connector.peers == 1


def test_an_address_that_belongs_to_somebody_else_by_now_is_not_used(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill_peer, "HANDSHAKE_SECONDS", 0.2)
    cluster.start("p2")
    (address,) = cluster.address("p2")
    cluster.connector.update({"p1": (address,), "p3": ("127.0.0.1:1",)})
    assert cluster.connector.peers == 0
    assert cluster.connector.last_error in (f"{address} is p2 by now", "127.0.0.1:1: DEADLINE_EXCEEDED")
    cluster.connector.update({"p2": cluster.address("p2")})
    assert cluster.connector.peers == 1
    assert cluster.connector.last_error == ""


def test_what_came_from_whom_is_counted_as_long_as_it_is_connected(cluster: Cluster) -> None:
    cluster.connector.update(cluster.start("p1", "p2"))
    cluster.connector.count("p1", 100, 150)
    cluster.connector.count("p1", 7, 7)
    cluster.connector.count("gone", 1, 1)
    assert cluster.connector.received() == {"p1": Received(2, 107, 157), "p2": Received()}
    cluster.connector.update({"p2": cluster.address("p2")})
    assert cluster.connector.received() == {"p2": Received()}
