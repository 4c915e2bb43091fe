import threading
from collections.abc import Sequence as Sequences
from dataclasses import dataclass, field

import numpy as np
import pytest

from kernels.pages import IntArray
from kv_transfer.frame import EndFrame, PieceFrame
from kv_transfer.layout import CacheLayout, Lifetime, OwnerLayer, Piece, Section, SlotRange
from kv_transfer.rank_pair import PairLayout, RankPair, pair_layout
from kv_transfer.staging import StagingBudget
from kv_transfer.transfer import PieceArrived, TransferEnded
from worker.incoming_transfers import IncomingTransfers, RankReceived
from worker.ranks.commands import CloseIncoming, OpenIncoming

TWO_OWNERS = Section(Lifetime.EVERY_TOKEN, 0, 0, (OwnerLayer("a", 1, 4, 0), OwnerLayer("b", 1, 4, 0)))
LAYOUT = CacheLayout("model", "float32", (TWO_OWNERS,), "digest", 0)
LACKING = (SlotRange(2, 8),)

SINKING = (OwnerLayer("c", 1, 4, 0),)
HYBRID = CacheLayout(
    "model",
    "float32",
    (
        TWO_OWNERS,
        Section(Lifetime.FIRST_TOKENS, 0, 1, SINKING),
        Section(Lifetime.LAST_TOKENS, 3, 1, SINKING),
        Section(Lifetime.STATE, 0, 0, (OwnerLayer("d", 0, 12, 0),)),
    ),
    "digest",
    0,
)

FOUR_HEADS = CacheLayout(
    "model",
    "float32",
    (Section(Lifetime.EVERY_TOKEN, 0, 0, (OwnerLayer("a", 4, 16, 0), OwnerLayer("b", 1, 4, 0))),),
    "digest",
    0,
)
"""A layer of four heads, and a latent that every rank holds."""

NAME = "request"


@dataclass
class Runner:
    """Notes what is written where, and between which ranks it passed."""

    written: list[tuple[Piece, tuple[tuple[int, ...], ...]]] = field(default_factory=list)
    passing: list[PairLayout] = field(default_factory=list)

    def write_piece(self, passing: PairLayout, piece: Piece, tables: Sequences[IntArray], payload: memoryview) -> None:
        assert payload.nbytes == piece.payload_bytes(passing.layout)
        self.written.append((piece, tuple(tuple(table.tolist()) for table in tables)))
        self.passing.append(passing)


@dataclass
class Transfer:
    cancelled: bool = False

    def cancel(self) -> None:
        self.cancelled = True


class Peer:
    """A connection to one rank of the prefill replica."""

    def __init__(self, layout: CacheLayout, pair: RankPair) -> None:
        self.pair = pair
        self.passing = pair_layout(layout, pair)
        self.address = f"10.0.0.{pair.sender}:1"


class Peers:
    """Connections to the ranks of one prefill replica, unless it is ``gone``; notes every transfer."""

    def __init__(self, layout: CacheLayout, pairs: Sequences[RankPair]) -> None:
        self._peers = [Peer(layout, pair) for pair in pairs]
        self.gone = False
        self.commands: list[OpenIncoming] = []
        self.opened: list[Transfer] = []

    def open(self, command: OpenIncoming) -> tuple[tuple[Peer, Transfer], ...]:
        self.commands.append(command)
        started = () if self.gone else tuple((peer, Transfer()) for peer in self._peers)
        self.opened += [transfer for _, transfer in started]
        return started


class Receiver:
    """One decode rank's transfers between scripted neighbours; ``senders`` are the prefill ranks that it hears from."""

    def __init__(
        self,
        layout: CacheLayout = LAYOUT,
        *,
        senders: Sequences[int] = (0,),
        of: int = 1,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        self.runner = Runner()
        pairs = [RankPair(sender, of, rank, ranks) for sender in senders]
        self.peers = Peers(layout, pairs)
        self.passing = {pair.sender: pair_layout(layout, pair) for pair in pairs}
        self.staging = StagingBudget(1 << 20)
        self._reports: list[RankReceived] = []
        self.transfers = IncomingTransfers(self.runner, self.peers, self.staging, rank)  # type: ignore[arg-type]

    @property
    def reports(self) -> list[RankReceived]:
        """How everything has ended so far."""
        self._reports += self.transfers.take_ended()
        return self._reports

    def start(
        self, epoch: int, *tables: Sequences[int], lacking: tuple[SlotRange, ...] = LACKING
    ) -> tuple[tuple[int, ...], ...]:
        """Returns what its blocks look like when something is written to them."""
        arrays = tuple(np.array(table, dtype=np.int64) for table in tables)
        command = OpenIncoming(NAME, epoch, "prefill-1", lacking, arrays, seconds=20.0)
        self.transfers.open(command)
        assert self.peers.commands[-1] is command
        return tuple(tuple(table) for table in tables)

    def piece(self, epoch: int, piece: Piece, *, sender: int = 0, excess: int = 0, name: str = NAME) -> None:
        size = piece.payload_bytes(self.passing[sender].layout)
        payload = memoryview(bytes(max(0, size + excess)))
        assert self.staging.reserve(payload.nbytes, threading.Event())
        self.transfers.take(PieceArrived(name, PieceFrame(epoch, piece, payload), sender))
        assert self.staging.used == 0, "what was taken or dropped is given back"

    def end(
        self, epoch: int, *, sender: int = 0, good: bool = True, busy: bool = False, error: str = "broken"
    ) -> RankReceived | None:
        """What is reported of a transfer when a stream has ended, if anything is."""
        before = len(self.reports)
        frame = end_frame(epoch, sender) if good else None
        self.transfers.end(TransferEnded(NAME, epoch, frame, "" if good else error, busy, sender))
        assert len(self.reports) <= before + 1
        return self.reports[before] if len(self.reports) > before else None


def end_frame(epoch: int, sender: int = 0) -> EndFrame:
    """What a prefill rank says last, each something else."""
    return EndFrame(epoch, 0, 0, cached_tokens=sender, queue_seconds=0.0, compute_seconds=0.0)


def test_a_transfer_from_its_opening_to_its_end() -> None:
    receiver = Receiver()
    tables = receiver.start(1, [5, 3, 8])
    pieces = [Piece(0, 1, 2, 2, 8), Piece(0, 0, 1, 4, 8), Piece(0, 0, 1, 2, 4)]
    for piece in pieces:
        receiver.piece(1, piece)
    assert receiver.runner.written == [(piece, tables) for piece in pieces]
    assert receiver.transfers.payload_bytes == 2 * 4 * 6
    assert receiver.reports == []
    assert receiver.end(1) == RankReceived(0, NAME, 1, 2 * 4 * 6, end_frame(1))
    assert not receiver.peers.opened[0].cancelled


def test_of_a_hybrid_model_every_section_must_be_complete() -> None:
    lacking = (SlotRange(6, 8), SlotRange(0, 1), SlotRange(6, 8), SlotRange(0, 1))
    pieces = [Piece(3, 0, 1, 0, 1), Piece(2, 0, 1, 6, 8), Piece(0, 0, 2, 6, 8), Piece(1, 0, 1, 0, 1)]
    for missing in range(len(pieces) + 1):
        receiver = Receiver(HYBRID)
        tables = receiver.start(1, [-1, 4], [1, 2, 3], [7, -1, 9], lacking=lacking)
        arrived = [piece for index, piece in enumerate(pieces) if index != missing]
        for piece in arrived:
            receiver.piece(1, piece)
        assert receiver.runner.written == [(piece, tables) for piece in arrived]
        report = receiver.end(1)
        assert report is not None
        assert (report.end is not None) == (missing == len(pieces))
        assert report.received_bytes == receiver.transfers.payload_bytes
    assert receiver.transfers.payload_bytes == 2 * 8 + 4 + 2 * 4 + 12


def test_choices_of_one_request_can_be_received_at_once() -> None:
    # Two choices that were preempted come back together; each has a reservation, a stream and an end of its own.
    receiver = Receiver()
    first, second = receiver.start(1, [0, 1]), receiver.start(2, [7, 9])
    for epoch in (2, 1):
        receiver.piece(epoch, Piece(0, 0, 2, 2, 8))
    assert receiver.runner.written == [(Piece(0, 0, 2, 2, 8), second), (Piece(0, 0, 2, 2, 8), first)]
    for epoch in (1, 2):
        assert receiver.end(epoch) == RankReceived(0, NAME, epoch, 2 * 4 * 6, end_frame(epoch))


def test_what_is_closed_is_cancelled_and_whatever_still_comes_is_dropped() -> None:
    receiver = Receiver()
    for epoch in (1, 2):
        receiver.start(epoch, [epoch])
    receiver.piece(1, Piece(0, 0, 1, 2, 4))
    receiver.transfers.close(CloseIncoming(3))
    receiver.transfers.close(CloseIncoming(1))
    assert [transfer.cancelled for transfer in receiver.peers.opened] == [True, False]
    assert receiver.reports == [RankReceived(0, NAME, 1, 4 * 2, None, "it was closed")]
    for epoch in (1, 2):
        receiver.piece(epoch, Piece(0, 0, 2, 2, 8))
    assert receiver.end(1) is None
    assert receiver.runner.written[1:] == [(Piece(0, 0, 2, 2, 8), ((2,),))]
    assert receiver.transfers.stale_pieces == 1
    # Once more, and after its end.
    receiver.transfers.close(CloseIncoming(1))
    assert receiver.end(2) is not None
    receiver.transfers.close(CloseIncoming(2))
    assert not receiver.peers.opened[1].cancelled
    assert receiver.end(2) is None


def test_pieces_that_no_manifest_covers_are_dropped() -> None:
    receiver = Receiver()
    receiver.start(3, [0])
    receiver.piece(2, Piece(0, 0, 2, 2, 8))
    receiver.piece(3, Piece(0, 0, 2, 2, 8), name="another")
    assert receiver.runner.written == []
    assert receiver.transfers.stale_pieces == 2
    assert receiver.transfers.payload_bytes == 0
    assert not receiver.peers.opened[0].cancelled


def test_a_piece_that_was_not_asked_for_ends_the_transfer_unwritten() -> None:
    for piece, excess in (
        (Piece(0, 0, 2, 1, 8), 0),
        (Piece(0, 0, 2, 2, 9), 0),
        (Piece(0, 0, 3, 2, 8), 0),
        (Piece(0, 0, 2, 2, 8), 4),
    ):
        receiver = Receiver()
        receiver.start(1, [0])
        receiver.piece(1, piece, excess=excess)
        assert receiver.runner.written == []
        assert receiver.peers.opened[0].cancelled
        report = receiver.end(1, good=False)
        assert report is not None
        assert (report.end, report.received_bytes, report.busy) == (None, 0, False)


def test_a_repeated_piece_is_not_written_again() -> None:
    receiver = Receiver()
    tables = receiver.start(1, [0])
    receiver.piece(1, Piece(0, 0, 2, 2, 6))
    receiver.piece(1, Piece(0, 0, 2, 5, 8))
    assert receiver.runner.written == [(Piece(0, 0, 2, 2, 6), tables)]
    assert receiver.peers.opened[0].cancelled


def test_an_end_before_everything_has_arrived_is_a_failure() -> None:
    receiver = Receiver()
    receiver.start(1, [0])
    receiver.piece(1, Piece(0, 0, 1, 2, 8))
    assert receiver.end(1) == RankReceived(
        0, NAME, 1, 4 * 6, None, "10.0.0.0:1: the stream ended before everything had arrived"
    )


@pytest.mark.parametrize("error", ["UNAVAILABLE: gone", "10.0.0.0:1: UNAVAILABLE: gone"])
def test_a_failure_says_once_where_it_happened(error: str) -> None:
    receiver = Receiver()
    receiver.start(1, [0])
    assert receiver.end(1, good=False, error=error) == RankReceived(
        0, NAME, 1, 0, None, "10.0.0.0:1: UNAVAILABLE: gone"
    )


def test_a_busy_peer_has_not_failed() -> None:
    receiver = Receiver()
    receiver.start(1, [0])
    report = receiver.end(1, good=False, busy=True)
    assert report is not None
    assert (report.end, report.busy) == (None, True)


def test_a_replica_that_is_gone_by_now_is_reported_at_once() -> None:
    receiver = Receiver(rank=1, ranks=2)
    receiver.peers.gone = True
    receiver.start(1, [0])
    assert receiver.reports == [RankReceived(1, NAME, 1, 0, None, "prefill-1 is gone or does not answer")]
    receiver.piece(1, Piece(0, 0, 2, 2, 8))
    assert receiver.transfers.stale_pieces == 1
    assert receiver.runner.written == []


# From several ranks


def two_of_four(epoch: int = 1) -> Receiver:
    """The second of two decode ranks, which hears from the last two of four prefill ranks, and of the latent from all.

    What it lacks are eight slots: 16 bytes of either of two heads, and two slots of the latent, from each who sends it.
    """
    receiver = Receiver(FOUR_HEADS, senders=(0, 1, 2, 3), of=4, rank=1, ranks=2)
    receiver.start(epoch, [4, 2], lacking=(SlotRange(2, 10),))
    return receiver


def pieces_of(receiver: Receiver, sender: int) -> list[Piece]:
    """Everything that a prefill rank has for this one."""
    passing = receiver.passing[sender]
    return [
        Piece(index, 0, len(section.owners), slots.begin, slots.end)
        for index, (section, slots) in enumerate(
            zip(passing.layout.sections, passing.slots((SlotRange(2, 10),)), strict=True)
        )
    ]


def test_a_transfer_is_complete_when_every_rank_that_sends_has_sent_its_part() -> None:
    receiver = two_of_four()
    assert [len(pieces_of(receiver, sender)) for sender in range(4)] == [1, 1, 2, 2]
    order = (2, 0, 3, 1)
    for sender in order:
        for piece in pieces_of(receiver, sender):
            receiver.piece(1, piece, sender=sender)
    assert [passing.layout for passing in receiver.runner.passing] == [
        receiver.passing[sender].layout for sender in order for _ in pieces_of(receiver, sender)
    ]
    assert [receiver.end(1, sender=sender) for sender in order[:-1]] == [None] * 3
    # The lowest rank's end is the request's own, wherever there is one.
    assert receiver.end(1, sender=1) == RankReceived(1, NAME, 1, 2 * 4 * 8 + 4 * 8, end_frame(1, 0))
    assert receiver.transfers.payload_bytes == 2 * 4 * 8 + 4 * 8
    assert not any(transfer.cancelled for transfer in receiver.peers.opened)


def test_what_one_rank_sends_does_not_count_for_another() -> None:
    receiver = two_of_four()
    for sender in (0, 1, 2, 3):
        # Of every rank's part one piece, and of the last rank's twice.
        receiver.piece(1, pieces_of(receiver, sender)[0], sender=sender)
    receiver.piece(1, pieces_of(receiver, 3)[0], sender=3)
    assert [transfer.cancelled for transfer in receiver.peers.opened] == [False, False, False, True]
    assert len(receiver.runner.written) == 4
    assert receiver.end(1, sender=0) is None
    report = receiver.end(1, sender=2)
    assert report is not None
    assert "10.0.0.2:1: the stream ended before everything had arrived" in report.error


def test_the_first_rank_that_fails_ends_all_that_have_not_ended() -> None:
    receiver = two_of_four()
    for sender in (0, 2):
        for piece in pieces_of(receiver, sender):
            receiver.piece(1, piece, sender=sender)
    received = receiver.transfers.payload_bytes
    assert receiver.end(1, sender=0) is None
    assert receiver.end(1, sender=3, good=False) == RankReceived(1, NAME, 1, received, None, "10.0.0.3:1: broken")
    # What has ended needs no cancelling, and what has failed may be.
    assert [transfer.cancelled for transfer in receiver.peers.opened][:3] == [False, True, True]
    written = len(receiver.runner.written)
    receiver.piece(1, pieces_of(receiver, 1)[0], sender=1)
    assert (len(receiver.runner.written), receiver.transfers.stale_pieces) == (written, 1)
    for sender in (1, 2):
        assert receiver.end(1, sender=sender, good=False) is None


def test_a_rank_that_was_not_asked_has_nothing_to_say() -> None:
    receiver = Receiver(FOUR_HEADS, senders=(2, 3), of=4, rank=1, ranks=2)
    receiver.start(1, [0], lacking=(SlotRange(2, 10),))
    receiver.passing[0] = receiver.passing[2]
    receiver.piece(1, Piece(0, 0, 1, 2, 10), sender=0)
    assert receiver.transfers.stale_pieces == 1
    assert receiver.end(1, sender=0, good=False) is None
    assert not any(transfer.cancelled for transfer in receiver.peers.opened)


def test_closing_cancels_every_ranks_stream() -> None:
    receiver = two_of_four()
    receiver.transfers.close(CloseIncoming(1))
    assert all(transfer.cancelled for transfer in receiver.peers.opened)
    assert len(receiver.peers.opened) == 4
