"""The leading rank's view of those that follow, which are clients that the test speaks for."""

import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import grpc
import pytest

from kv_transfer.frame import EndFrame
from kv_transfer.prefill_server import TransferName
from tests.kv_transfer.connection import eventually
from tests.worker.ranks.raw_follower import SECONDS, RawFollower
from worker.incoming_transfers import RankReceived
from worker.kv_cache.block_pool import BlockId
from worker.prefill_peers import PeerRefused
from worker.ranks import followers as module
from worker.ranks.command_wire import name_message
from worker.ranks.commands import ClearBlocks, ConnectPeer, ForgetPeer
from worker.ranks.followers import Followers, Totals
from worker.ranks.process_group import RankLost
from worker.wire import ranks_pb2 as wire

RANKS = 3
PEER = ConnectPeer("prefill-1", ("10.0.0.1:1", "10.0.0.2:1"), attempt=3)


class Replica:
    """A leading rank, and the ranks that a test has made join it."""

    def __init__(self, ranks: int = RANKS) -> None:
        self.ranks = ranks
        self.followers = Followers("decode-1", ranks, "127.0.0.1")
        self.received: queue.Queue[RankReceived] = queue.Queue()
        self.clients: list[RawFollower] = []

    def join(self, rank: int, *, ranks: int | None = None, **hello: object) -> RawFollower:
        self.clients.append(
            RawFollower.joined(self.followers.address, rank, ranks or self.ranks, **hello)  # type: ignore[arg-type]
        )
        return self.clients[-1]

    def join_all(self) -> list[RawFollower]:
        """Every rank, in any order."""
        joined = {rank: self.join(rank, kv_address=f"10.0.0.{rank}:1") for rank in reversed(range(1, self.ranks))}
        self.wait()
        return [joined[rank] for rank in range(1, self.ranks)]

    def wait(self, num_blocks: int = 100) -> None:
        self.followers.wait(num_blocks, self.received.put)

    def stop(self) -> None:
        self.followers.stop()
        for client in self.clients:
            client.leave()


@pytest.fixture
def new_replica() -> Iterator[Callable[..., Replica]]:
    made: list[Replica] = []

    def make(ranks: int = RANKS) -> Replica:
        made.append(Replica(ranks))
        return made[-1]

    yield make
    for replica in made:
        replica.stop()


@pytest.fixture
def replica(new_replica: Callable[..., Replica]) -> Replica:
    return new_replica()


# Joining


def test_everybody_is_waited_for_and_known_by_rank(replica: Replica) -> None:
    assert replica.followers.count == 2
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(replica.wait)
        replica.join(2, kv_address="10.0.0.2:1")
        assert not waiting.done()
        replica.join(1, kv_address="10.0.0.1:1")
        waiting.result(SECONDS)
    assert replica.followers.kv_addresses == ("10.0.0.1:1", "10.0.0.2:1")
    assert replica.followers.lost is None


@pytest.mark.parametrize(
    ("rank", "ranks", "named"),
    [
        (1, 3, r"rank 1 of 3 cannot join a replica of 3, of which \[1\] follow already"),
        (1, 2, r"rank 1 of 2 cannot join a replica of 3"),
        (2, 4, r"rank 2 of 4 cannot join a replica of 3"),
        (0, 3, r"rank 0 of 3 cannot join"),
        (3, 3, r"rank 3 of 3 cannot join"),
    ],
)
def test_a_rank_that_does_not_belong_is_refused_by_name_and_nobody_else_notices(
    replica: Replica, rank: int, ranks: int, named: str
) -> None:
    first = replica.join(1)
    assert eventually(lambda: 1 in replica.followers._joined)
    with pytest.raises(grpc.RpcError, match=named) as refusal:
        replica.join(rank, ranks=ranks).command()
    assert refusal.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    second = replica.join(2)
    replica.wait()
    assert replica.followers.lost is None
    replica.followers.send(ForgetPeer("prefill-1"))
    assert first.command() == second.command() == ForgetPeer("prefill-1")


def test_a_rank_that_was_told_to_follow_another_replica_is_refused(replica: Replica) -> None:
    with pytest.raises(grpc.RpcError, match="rank 1 of decode-0 has come to decode-1"):
        replica.join(1, incarnation="decode-0").command()
    replica.join_all()


@pytest.mark.parametrize("message", [b"\xff\xff", b"", wire.Report(totals=wire.Totals()).SerializeToString()])
def test_what_begins_with_something_else_than_its_name_is_refused(replica: Replica, message: bytes) -> None:
    stranger = RawFollower(replica.followers.address)
    replica.clients.append(stranger)
    stranger.say(message)
    with pytest.raises(grpc.RpcError) as refusal:
        stranger.command()
    assert refusal.value.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION)
    replica.join_all()
    assert replica.followers.lost is None


def test_a_rank_with_room_for_another_number_of_blocks_is_named(replica: Replica) -> None:
    replica.join(1)
    replica.join(2, num_blocks=99)
    with pytest.raises(RankLost, match="rank 2 has room for 99 blocks, the leading rank for 100"):
        replica.wait()


def test_ranks_that_do_not_come_are_named(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "JOIN_SECONDS", 0.3)
    replica.join(2)
    with pytest.raises(RankLost, match=r"ranks \[1\] have not joined"):
        replica.wait()


def test_a_rank_that_is_lost_before_the_others_have_come_is_not_waited_for(replica: Replica) -> None:
    first = replica.join(1)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(replica.wait)
        assert eventually(lambda: 1 in replica.followers._joined)
        first.leave()
        with pytest.raises(RankLost, match="rank 1 of 3 is lost"):
            waiting.result(SECONDS)


# Commands


def test_everybody_gets_every_command_in_the_order_in_which_they_were_given(replica: Replica) -> None:
    joined = replica.join_all()
    commands = [ClearBlocks((BlockId(number),)) for number in range(200)]
    for command in commands:
        replica.followers.send(command)
    for client in joined:
        assert [client.command() for _ in commands] == commands


def test_a_slow_rank_does_not_hold_up_the_leader_or_another(replica: Replica) -> None:
    _, second = replica.join_all()
    large = ClearBlocks(tuple(BlockId(block) for block in range(30_000)))
    for _ in range(20):
        replica.followers.send(large)
    # The first takes nothing at all.
    for _ in range(20):
        assert second.command() == large


def test_a_leader_that_stops_ends_the_calls_of_all_and_loses_nobody(new_replica: Callable[..., Replica]) -> None:
    replica = new_replica()
    joined = replica.join_all()
    replica.followers.send(ForgetPeer("prefill-1"))
    replica.followers.stop()
    for client in joined:
        assert client.command() == ForgetPeer("prefill-1")
        with pytest.raises(StopIteration):
            client.command()
    assert replica.followers.lost is None


# Losing


def leaves(client: RawFollower) -> None:
    client.leave()


def finishes(client: RawFollower) -> None:
    client.finish()


def speaks_nonsense(client: RawFollower) -> None:
    client.say(b"\xff\xff")


@pytest.mark.parametrize("ends", [leaves, finishes, speaks_nonsense])
def test_a_rank_that_goes_away_is_noticed_at_once_and_named(
    replica: Replica, ends: Callable[[RawFollower], None]
) -> None:
    _, second = replica.join_all()
    ends(second)
    assert eventually(lambda: replica.followers.lost is not None, seconds=1.0)
    assert replica.followers.lost is not None
    assert replica.followers.lost.startswith("rank 2 of 3 is lost: ")


def test_the_first_that_is_lost_is_the_one_that_is_named(replica: Replica) -> None:
    first, second = replica.join_all()
    readers = {thread.name: thread for thread in threading.enumerate()}
    second.leave()
    assert eventually(lambda: replica.followers.lost is not None)
    first.leave()
    readers["reports-of-rank-1"].join(SECONDS)
    assert not readers["reports-of-rank-1"].is_alive()
    assert replica.followers.lost is not None
    assert replica.followers.lost.startswith("rank 2 ")
    # What is sent to nobody is lost with them.
    replica.followers.send(ForgetPeer("prefill-1"))


def test_a_rank_that_was_lost_cannot_come_back(replica: Replica) -> None:
    _, second = replica.join_all()
    second.leave()
    assert eventually(lambda: replica.followers.lost is not None)
    with pytest.raises(grpc.RpcError, match="rank 2 of 3 cannot join"):
        replica.join(2).command()


# Connecting to prefill replicas


def answer(client: RawFollower, attempt: int = PEER.attempt, **fields: object) -> None:
    connected = wire.Connected(incarnation="prefill-1", attempt=attempt, **fields)  # type: ignore[arg-type]
    client.report(wire.Report(connected=connected))


def test_the_fewest_streams_that_any_rank_was_granted_count(replica: Replica) -> None:
    first, second = replica.join_all()
    with replica.followers.connecting(PEER) as connected, ThreadPoolExecutor(1) as pool:
        assert first.command() == second.command() == PEER
        waiting = pool.submit(connected)
        answer(first, max_streams=5)
        # To an earlier attempt, which nobody waits for any more.
        answer(second, PEER.attempt - 1, max_streams=1)
        assert not waiting.done()
        answer(second, max_streams=3)
        assert waiting.result(SECONDS) == 3


def test_replicas_that_are_connected_at_the_same_time_are_told_apart(replica: Replica) -> None:
    joined = replica.join_all()
    one, other = (ConnectPeer(f"prefill-{attempt}", ("10.0.0.1:1",), attempt) for attempt in (1, 2))
    with replica.followers.connecting(one) as first, replica.followers.connecting(other) as second:
        for client in joined:
            answer(client, 2, max_streams=7)
            answer(client, 1, max_streams=4)
        assert first() == 4
        assert second() == 7


@pytest.mark.parametrize("final", [True, False])
def test_a_refusal_names_the_rank_and_says_why(replica: Replica, final: bool) -> None:
    first, second = replica.join_all()
    with replica.followers.connecting(PEER) as connected:
        answer(first, max_streams=5)
        answer(second, error="10.0.0.2:1: another --dtype", final=final)
        with pytest.raises(PeerRefused, match=r"rank 2: 10\.0\.0\.2:1: another --dtype") as refusal:
            connected()
    assert refusal.value.final is final
    # It can be tried again, and what was said before counts no more.
    again = replace(PEER, attempt=PEER.attempt + 1)
    with replica.followers.connecting(again) as connected:
        answer(first, max_streams=9)
        for client in (first, second):
            answer(client, again.attempt, max_streams=2)
        assert connected() == 2


def test_an_answer_that_does_not_come_is_not_waited_for_for_ever(
    replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CONNECT_SECONDS", 0.2)
    first, _ = replica.join_all()
    with replica.followers.connecting(PEER) as connected:
        answer(first, max_streams=5)
        with pytest.raises(PeerRefused, match="not every rank has connected to prefill-1") as refusal:
            connected()
    assert not refusal.value.final
    assert replica.followers.lost is None


def test_nobody_waits_for_the_answer_of_a_rank_that_is_lost(replica: Replica) -> None:
    first, second = replica.join_all()
    with replica.followers.connecting(PEER) as connected, ThreadPoolExecutor(1) as pool:
        answer(first, max_streams=5)
        waiting = pool.submit(connected)
        second.leave()
        with pytest.raises(PeerRefused) as refusal:
            waiting.result(5.0)
    assert not refusal.value.final


# Reports


def test_how_transfers_ended_is_told_with_the_rank(replica: Replica) -> None:
    first, second = replica.join_all()
    good = wire.Received(request_id="a", epoch=3, received_bytes=1000)
    first.report(wire.Report(received=good))
    assert replica.received.get(timeout=SECONDS) == RankReceived(1, "a", 3, 1000, EndFrame(3, 1000, 0, 0, 0.0, 0.0))
    bad = wire.Received(request_id="b", epoch=4, received_bytes=10, error="no stream to spare", busy=True)
    second.report(wire.Report(received=bad))
    assert replica.received.get(timeout=SECONDS) == RankReceived(2, "b", 4, 10, None, "no stream to spare", True)


def test_a_rank_that_was_told_to_end_says_so_and_is_not_lost(replica: Replica) -> None:
    first, _ = replica.join_all()
    assert not replica.followers.leaving
    first.report(wire.Report(leaving=wire.Leaving()))
    assert eventually(lambda: replica.followers.leaving)
    assert replica.followers.lost is None


def test_totals_are_the_sum_of_what_each_rank_said_last(replica: Replica) -> None:
    assert replica.followers.totals() == Totals()
    joined = replica.join_all()
    slow, slower = TransferName("decode-1", "a", 1), TransferName("decode-1", "b", 2)
    for factor, client in enumerate(joined, start=1):
        for said in (100, 10):
            totals = wire.Totals(
                sent_bytes=said * factor,
                received_bytes=said * 2 * factor,
                stale_pieces=said * 3 * factor,
                wire_bytes=said * 4 * factor,
                backlogged=[name_message(name) for name in (slow, slower)[:factor]],
            )
            client.report(wire.Report(totals=totals))
    assert eventually(lambda: replica.followers.totals() == Totals(30, 60, 90, 120, frozenset({slow, slower})))
    joined[1].report(wire.Report(totals=wire.Totals(sent_bytes=50)))
    assert eventually(lambda: replica.followers.totals() == Totals(60, 20, 30, 40, frozenset({slow})))
