"""Transfers as a decode replica's leading rank sees them, with ranks and prefill replicas that the test speaks for."""

from collections.abc import Callable
from collections.abc import Sequence as Sequences
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kv_transfer.frame import EndFrame
from kv_transfer.layout import CacheLayout, Lifetime, OwnerLayer, Section, SlotRange
from worker.failure import TransferFailure
from worker.incoming_transfers import RankReceived
from worker.kv_cache.block_pool import BlockId
from worker.kv_cache.block_table import BlockTable
from worker.prefill_connector import BUSY_BACKOFF, FIRST_BACKOFF, LONGEST_BACKOFF, PrefillConnector
from worker.prefill_selector import PrefillCandidate
from worker.ranks.commands import CloseIncoming, Command, ConnectPeer, OpenIncoming
from worker.sampling_params import SamplingParams
from worker.scheduler import NO_PREFILL, PrefillCredit
from worker.sequence import Epoch, RequestId, Sequence
from worker.transfers import LATENESS, Ended, Transfers

SINKING = (OwnerLayer("c", 1, 4, 0),)
HYBRID = CacheLayout(
    "model",
    "float32",
    (
        Section(Lifetime.EVERY_TOKEN, 0, 0, (OwnerLayer("a", 1, 4, 0), OwnerLayer("b", 1, 4, 0))),
        Section(Lifetime.FIRST_TOKENS, 0, 1, SINKING),
        Section(Lifetime.LAST_TOKENS, 3, 1, SINKING),
        Section(Lifetime.STATE, 0, 0, (OwnerLayer("d", 0, 12, 0),)),
    ),
    "digest",
    0,
)
GROUPS = (1, 2, 2, 0)
"""Of every section, the group whose table says what is lacking."""

NAME = RequestId("request")
NOW = 10.0
TIMEOUT = 30.0
STREAMS = 3


class Runner:
    layout = HYBRID

    def group_of_section(self, section: int) -> int:
        return GROUPS[section]


@dataclass
class Team:
    """``size`` ranks that are told what to do; ``meanwhile`` is what happens at once."""

    size: int = 1
    commands: list[Command] = field(default_factory=list)
    meanwhile: Callable[[Command], None] = lambda command: None

    def apply(self, command: Command) -> None:
        self.commands.append(command)
        self.meanwhile(command)

    def connect(self, command: ConnectPeer) -> int:
        return STREAMS

    def forget(self, incarnation: str) -> None:
        pass


class ByName:
    """A selector that takes the first one by name."""

    def choose(self, candidates: Sequences[PrefillCandidate], token_ids: Sequences[int], salt: str) -> str:
        return min(candidate.incarnation for candidate in candidates)


class Leader:
    """A leading rank whose clock is the test's."""

    def __init__(self, ranks: int = 1, *incarnations: str) -> None:
        self.team = Team(ranks)
        self.connector = PrefillConnector(self.team, ByName(), TIMEOUT)  # type: ignore[arg-type]
        self.transfers = Transfers(Runner(), self.team, self.connector)  # type: ignore[arg-type]
        self.now = NOW
        self.exist(*(incarnations or ("prefill-1",)))

    def exist(self, *incarnations: str) -> None:
        self.connector.update(dict.fromkeys(incarnations, ("127.0.0.1:1",)))

    def start(self, epoch: int = 1, *, name: RequestId = NAME, deadline: float = 1e6) -> Sequence:
        sequence = receiving(epoch, name, deadline)
        assert self.transfers.start(sequence, self.now)
        return sequence

    def report(
        self, rank: int, epoch: int = 1, *, received: int = 100, error: str = "", busy: bool = False
    ) -> Ended | None:
        end = None if error or busy else end_frame(epoch, rank)
        return self.transfers.received(RankReceived(rank, NAME, epoch, received, end, error, busy), self.now)

    def closings(self) -> list[int]:
        return [command.epoch for command in self.team.commands if isinstance(command, CloseIncoming)]

    def streams(self) -> int:
        """How many more could be opened now."""
        return self.transfers.credit(self.now).streams


def end_frame(epoch: int, rank: int) -> EndFrame:
    """Only the leading rank's says anything of the prompt."""
    return EndFrame(epoch, 0, 0, cached_tokens=40 + rank, queue_seconds=0.0, compute_seconds=0.0)


def receiving(epoch: int, name: RequestId = NAME, deadline: float = 1e6) -> Sequence:
    """Nine tokens: a state is to be received in block 4, tokens are held up to the sixth, a window from the seventh."""
    tables = [
        BlockTable([BlockId(-1), BlockId(4)]),
        BlockTable([BlockId(block) for block in (1, 2, 3)], lacking_from=6),
        BlockTable([BlockId(block) for block in (7, -1, 9)], lacking_from=6),
    ]
    return Sequence(
        request_id=name,
        choice=epoch,
        tokens=list(range(9)),
        prompt_len=9,
        sampling=SamplingParams(),
        salt="salt",
        arrival=0.0,
        deadline=deadline,
        computed=2,
        tables=tables,
        epoch=Epoch(epoch),
    )


LACKING = (SlotRange(6, 8), SlotRange(0, 1), SlotRange(6, 8), SlotRange(0, 1))
"""The last of nine tokens sees the sink and the last three, itself included."""


# What ranks are told


def test_every_section_is_asked_for_from_where_its_group_lacks_it() -> None:
    leader = Leader(ranks=2)
    leader.start(5)
    (command,) = leader.team.commands
    assert isinstance(command, OpenIncoming)
    assert (command.request_id, command.epoch, command.incarnation) == (NAME, 5, "prefill-1")
    assert command.lacking == LACKING
    assert [table.tolist() for table in command.tables] == [[-1, 4], [1, 2, 3], [7, -1, 9]]
    assert (command.token_ids, command.cache_salt) == (tuple(range(8)), "salt")


@pytest.mark.parametrize(("deadline", "seconds"), [(1e6, TIMEOUT), (NOW + 7.0, 7.0), (NOW - 1.0, 0.001)])
def test_a_transfer_has_the_shorter_of_its_own_time_and_its_requests(deadline: float, seconds: float) -> None:
    leader = Leader()
    leader.start(deadline=deadline)
    (command,) = leader.team.commands
    assert isinstance(command, OpenIncoming)
    assert command.seconds == pytest.approx(seconds)


def test_where_nobody_can_send_nothing_is_started() -> None:
    leader = Leader()
    for epoch in range(1, 1 + STREAMS):
        leader.start(epoch)
    assert not leader.transfers.start(receiving(9), NOW)
    leader.exist()
    assert not leader.transfers.start(receiving(9), NOW)
    assert len(leader.team.commands) == STREAMS
    assert leader.report(0, 9) is None
    assert leader.transfers.credit(NOW) == NO_PREFILL


# Ends


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_a_transfer_is_complete_when_every_rank_says_so(order: tuple[int, int, int]) -> None:
    leader = Leader(ranks=3)
    sequence = leader.start()
    leader.now += 2.0
    assert [leader.report(rank, received=10**rank) for rank in order[:2]] == [None, None]
    assert leader.streams() == STREAMS - 1
    assert leader.report(order[2], received=10 ** order[2]) == Ended(
        sequence, "prefill-1", LACKING, NOW, 111, end_frame(1, 0), failure=None
    )
    assert leader.closings() == []
    assert leader.streams() == STREAMS


@pytest.mark.parametrize("busy", [False, True])
def test_a_rank_that_fails_ends_it_on_all(busy: bool) -> None:
    leader = Leader(ranks=3)
    sequence = leader.start()
    assert leader.report(2, received=5) is None
    assert leader.report(1, received=7, error="broken", busy=busy) is None
    assert leader.closings() == [1]
    # Its prefill replica is left alone from now on.
    assert leader.streams() == 0
    # Who has failed or is done has said all that it has to say.
    for rank in (1, 2):
        assert leader.report(rank, error="closed") is None
    # What the last one had got until it was closed will be sent again as well.
    ended = leader.report(0, received=20, error="closed")
    failure = TransferFailure.BUSY if busy else TransferFailure.BROKEN
    assert ended == Ended(sequence, "prefill-1", LACKING, NOW, 32, None, failure)
    assert leader.report(0) is None
    assert leader.closings() == [1]
    leader.now += BUSY_BACKOFF if busy else FIRST_BACKOFF
    assert leader.transfers.credit(leader.now) == PrefillCredit(True, STREAMS)
    if not busy:
        assert not leader.transfers.credit(leader.now - 0.01).reachable


def test_a_rank_that_completes_meanwhile_does_not_make_a_failed_transfer_good() -> None:
    leader = Leader(ranks=2)
    leader.start()
    assert leader.report(1, error="broken") is None
    ended = leader.report(0)
    assert ended is not None
    assert (ended.end, ended.received_bytes) == (None, 200)


def test_the_last_of_all_that_fails_still_fails_it() -> None:
    leader = Leader(ranks=2)
    leader.start()
    assert leader.report(0) is None
    ended = leader.report(1, error="broken")
    assert ended is not None
    assert ended.end is None
    # The rank that is done has to let go as well.
    assert leader.closings() == [1]


def test_a_rank_that_does_not_let_go_is_not_waited_for_for_ever() -> None:
    leader = Leader(ranks=2)
    sequence = leader.start()
    assert leader.report(1, error="broken") is None
    (ended,) = leader.transfers.overdue(NOW + TIMEOUT + LATENESS + 0.1)
    assert (ended.sequence, ended.end) == (sequence, None)
    assert leader.closings() == [1]


def test_a_rank_that_reports_twice_counts_once() -> None:
    leader = Leader(ranks=2)
    leader.start()
    assert leader.report(1) is None
    assert leader.report(1) is None
    assert leader.report(1, error="broken") is None
    ended = leader.report(0)
    assert ended is not None
    assert (ended.end, ended.received_bytes) == (end_frame(1, 0), 200)


def test_choices_of_one_request_are_told_apart_by_their_epochs() -> None:
    leader = Leader(ranks=2)
    first, second = leader.start(1), leader.start(2)
    assert [leader.report(0, 2), leader.report(1, 1)] == [None, None]
    ended = [leader.report(0, 1), leader.report(1, 2)]
    assert [each.sequence if each is not None else None for each in ended] == [first, second]


def test_cancelling_a_request_ends_all_its_transfers() -> None:
    leader = Leader(ranks=2)
    for epoch in (1, 2):
        leader.start(epoch)
    leader.start(3, name=RequestId("another"))
    leader.transfers.cancel(RequestId("unknown"), NOW)
    assert leader.closings() == []
    assert leader.report(0, 1) is None
    leader.transfers.cancel(NAME, NOW)
    assert sorted(leader.closings()) == [1, 2]
    for epoch in (1, 2):
        assert leader.report(1, epoch, error="closed") is None
    # It says nothing about the prefill replica.
    assert leader.transfers.credit(NOW) == PrefillCredit(True, STREAMS - 1)
    leader.transfers.cancel(NAME, NOW)
    assert len(leader.closings()) == 2


def test_a_rank_that_says_nothing_after_the_deadline_has_failed() -> None:
    """Whatever became of its streams: the request goes elsewhere, and what still comes is stale."""
    leader = Leader(ranks=2)
    sequence = leader.start(deadline=NOW + 4.0)
    leader.start(2)
    assert leader.report(0) is None
    assert leader.transfers.overdue(NOW + 4.0 + LATENESS) == []
    (ended,) = leader.transfers.overdue(NOW + 4.1 + LATENESS)
    assert (ended.sequence, ended.end, ended.busy, ended.received_bytes) == (sequence, None, False, 100)
    assert leader.closings() == [1]
    assert leader.transfers.overdue(NOW + 5.0 + LATENESS) == []
    assert leader.report(1) is None
    assert not leader.transfers.credit(NOW + 4.1 + LATENESS).reachable, "it counts as failed"


def test_a_replica_that_is_gone_when_the_ranks_ask_fails_at_once() -> None:
    """The leading rank says so while it is still being told."""
    leader = Leader(ranks=2)
    reports: list[Ended | None] = []

    def meanwhile(command: Command) -> None:
        if isinstance(command, OpenIncoming):
            reports.append(leader.report(0, command.epoch, received=0, error="prefill-1 is gone"))

    leader.team.meanwhile = meanwhile
    sequence = leader.start()
    assert reports == [None]
    assert [type(command) for command in leader.team.commands] == [OpenIncoming, CloseIncoming]
    ended = leader.report(1, received=0, error="prefill-1 is gone")
    assert ended is not None
    assert (ended.sequence, ended.end) == (sequence, None)


# Anything in any order


class TransfersMachine(RuleBasedStateMachine):
    """Requests, reports, cancellations and prefill replicas come and go; a simple count knows what must be left."""

    @initialize(ranks=st.integers(1, 4))
    def begin(self, ranks: int) -> None:
        self.leader = Leader(ranks, "prefill-1", "prefill-2")
        self.ranks = ranks
        # By epoch: who has not reported, and which life of which replica was asked.
        self.waiting: dict[int, set[int]] = {}
        self.asked: dict[int, tuple[str, int]] = {}
        self.lives = {"prefill-1": 0, "prefill-2": 0}
        self.gone: dict[str, int] = {}
        self.epochs = 0
        self.failed: dict[int, str] = {}
        self.closed: list[int] = []
        self.over: set[int] = set()

    def _ends(self, epoch: int) -> None:
        del self.waiting[epoch], self.asked[epoch]
        assert epoch not in self.over
        self.over.add(epoch)

    @rule(request=st.sampled_from(["a", "b"]))
    def start(self, request: str) -> None:
        self.epochs += 1
        sequence = receiving(self.epochs, RequestId(request))
        credit = self.leader.streams()
        started = self.leader.transfers.start(sequence, self.leader.now)
        assert started == (credit > 0)
        if started:
            command = self.leader.team.commands[-1]
            assert isinstance(command, OpenIncoming)
            assert command.epoch == self.epochs
            self.waiting[self.epochs] = set(range(self.ranks))
            self.asked[self.epochs] = (command.incarnation, self.lives[command.incarnation])

    @precondition(lambda self: self.epochs)
    @rule(data=st.data(), outcome=st.sampled_from(["good", "good", "good", "broken", "busy"]))
    def report(self, data: st.DataObject, outcome: str) -> None:
        """By any rank of any transfer, over or not."""
        epoch, rank = data.draw(st.integers(1, self.epochs)), data.draw(st.integers(0, self.ranks - 1))
        error = "broken" if outcome == "broken" else ""
        ended = self.leader.report(rank, epoch, error=error, busy=outcome == "busy")
        waiting = self.waiting.get(epoch, set())
        if rank not in waiting:
            assert ended is None
            return
        waiting.remove(rank)
        if outcome != "good" and epoch not in self.failed:
            self.failed[epoch] = outcome
            self.closed.append(epoch)
        if waiting:
            assert ended is None
            return
        assert ended is not None
        assert ended.sequence.epoch == epoch
        assert ended.incarnation == self.asked[epoch][0]
        assert ended.end == (None if epoch in self.failed else end_frame(epoch, 0))
        assert ended.busy == (self.failed.get(epoch) == "busy")
        assert ended.received_bytes == 100 * self.ranks
        self._ends(epoch)

    @rule(request=st.sampled_from(["a", "b"]))
    def cancel(self, request: str) -> None:
        mine = [c for c in self.leader.team.commands if isinstance(c, OpenIncoming) and c.request_id == request]
        self.leader.transfers.cancel(RequestId(request), self.leader.now)
        for command in mine:
            if command.epoch in self.waiting:
                if command.epoch not in self.failed:
                    self.closed.append(command.epoch)
                self._ends(command.epoch)

    @rule(seconds=st.sampled_from([0.01, 1.0, TIMEOUT, TIMEOUT + LATENESS + 1.0]))
    def time_passes(self, seconds: float) -> None:
        self.leader.now += seconds
        for ended in self.leader.transfers.overdue(self.leader.now):
            assert ended.end is None
            assert self.leader.now - ended.started > TIMEOUT + LATENESS
            if ended.sequence.epoch not in self.failed:
                self.closed.append(ended.sequence.epoch)
            self._ends(ended.sequence.epoch)

    @rule(names=st.sets(st.sampled_from(["prefill-1", "prefill-2"])))
    def directory_says(self, names: set[str]) -> None:
        """A replica that blinks is another life of it: what was asked of the first is nobody's any more."""
        for name in names - self.lives.keys():
            self.gone[name] = self.lives[name] = self.gone.get(name, 0) + 1
        for name in self.lives.keys() - names:
            self.gone[name] = self.lives.pop(name)
        self.leader.exist(*sorted(names))

    @invariant()
    def every_stream_is_accounted_for(self) -> None:
        if not hasattr(self, "leader"):
            return
        under_way = sum(
            self.lives.get(name) == life for epoch, (name, life) in self.asked.items() if epoch not in self.failed
        )
        later = self.leader.now + LONGEST_BACKOFF
        assert self.leader.transfers.credit(later).streams == STREAMS * len(self.lives) - under_way
        assert sorted(self.leader.closings()) == sorted(self.closed), "closed once, unless it was complete"

    def teardown(self) -> None:
        if hasattr(self, "leader"):
            for request in ("a", "b"):
                self.cancel(request)
            assert not self.asked
            assert self.over == {c.epoch for c in self.leader.team.commands if isinstance(c, OpenIncoming)}
            self.every_stream_is_accounted_for()


TestTransfers = TransfersMachine.TestCase
TestTransfers.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize(("deadline", "streams"), [(NOW + 400.0, 0), (NOW + 1.0, STREAMS)])
def test_a_stream_that_ends_with_its_requests_deadline_says_nothing_about_its_peer(
    deadline: float, streams: int
) -> None:
    leader = Leader()
    leader.start(deadline=deadline)
    leader.now = NOW + 1.0
    ended = leader.report(0, error="DEADLINE_EXCEEDED")
    assert ended is not None
    assert ended.end is None
    # A peer that failed is left alone for a while.
    assert leader.streams() == streams
