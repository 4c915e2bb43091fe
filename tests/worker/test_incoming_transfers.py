import threading
from collections.abc import Sequence as Sequences
from dataclasses import dataclass, field

from kernels.pages import IntArray
from kv_transfer.frame import EndFrame, PieceFrame
from kv_transfer.layout import CacheLayout, Lifetime, OwnerLayer, Piece, Section, SlotRange
from kv_transfer.manifest import Manifest
from kv_transfer.prefill_peer import PieceArrived, TransferEnded
from kv_transfer.staging import StagingBudget
from worker.incoming_transfers import IncomingTransfers
from worker.kv_cache.block_pool import BlockId
from worker.kv_cache.block_table import BlockTable
from worker.prefill_connector import Outcome
from worker.sampling_params import SamplingParams
from worker.sequence import Epoch, RequestId, Sequence
from worker.wire import engine_pb2 as wire

TWO_OWNERS = Section(Lifetime.EVERY_TOKEN, 0, 0, (OwnerLayer("a", 1, 4, 0), OwnerLayer("b", 1, 4, 0)))
LAYOUT = CacheLayout("model", "float32", (TWO_OWNERS,), "digest", 0)

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
NAME = RequestId("request")
NOW = 10.0


@dataclass
class Runner:
    """Notes what is written where."""

    layout: CacheLayout = LAYOUT
    groups: tuple[int, ...] = (0,)
    written: list[tuple[Piece, tuple[tuple[int, ...], ...]]] = field(default_factory=list)

    def write_piece(self, piece: Piece, tables: Sequences[IntArray], payload: memoryview) -> None:
        assert payload.nbytes == piece.payload_bytes(self.layout)
        self.written.append((piece, tuple(tuple(table.tolist()) for table in tables)))

    def group_of_section(self, section: int) -> int:
        return self.groups[section]


@dataclass
class Transfer:
    cancelled: bool = False

    def cancel(self) -> None:
        self.cancelled = True


@dataclass
class Opened:
    transfer: Transfer
    incarnation: str = "prefill-1"
    deadline: float = NOW + 30.0


@dataclass
class Connector:
    """Grants everything, unless ``refusing``; notes how transfers ended."""

    refusing: bool = False
    manifests: list[Manifest] = field(default_factory=list)
    opened: list[Opened] = field(default_factory=list)
    closings: list[tuple[Opened, Outcome]] = field(default_factory=list)

    def open(self, sequence: Sequence, manifest: Manifest, now: float) -> Opened | None:
        assert (sequence.request_id, now) == (NAME, NOW)
        if self.refusing:
            return None
        self.manifests.append(manifest)
        self.opened.append(Opened(Transfer()))
        return self.opened[-1]

    def closed(self, opened: Opened, outcome: Outcome, now: float) -> None:
        self.closings.append((opened, outcome))


def table(blocks: Sequences[int], lacking_from: int = 0) -> BlockTable:
    return BlockTable([BlockId(block) for block in blocks], lacking_from=lacking_from)


class Receiver:
    """Incoming transfers between scripted neighbours."""

    def __init__(self, runner: Runner | None = None) -> None:
        self.runner, self.connector = runner or Runner(), Connector()
        self.staging = StagingBudget(1 << 20)
        self.counters = wire.Counters()
        self.transfers = IncomingTransfers(
            self.runner,  # type: ignore[arg-type]
            self.connector,  # type: ignore[arg-type]
            self.staging,
            self.counters,
        )

    def start(self, epoch: int, blocks: Sequences[int]) -> Sequence:
        """Nine tokens, of which the first two are held."""
        return self.start_with(epoch, [table(blocks, lacking_from=2)])

    def start_with(self, epoch: int, tables: list[BlockTable]) -> Sequence:
        sequence = Sequence(
            request_id=NAME,
            choice=epoch,
            tokens=[0] * 9,
            prompt_len=9,
            sampling=SamplingParams(),
            salt="",
            arrival=0.0,
            deadline=99.0,
            computed=2,
            tables=tables,
            epoch=Epoch(epoch),
        )
        assert self.transfers.start(sequence, NOW) != self.connector.refusing
        return sequence

    def piece(self, epoch: int, piece: Piece, *, excess: int = 0, name: str = NAME) -> None:
        payload = memoryview(bytes(max(0, piece.payload_bytes(self.runner.layout) + excess)))
        assert self.staging.reserve(payload.nbytes, threading.Event())
        self.transfers.take(PieceArrived(name, PieceFrame(epoch, piece, payload)))
        assert self.staging.used == 0, "what was taken or dropped is given back"

    def end(self, epoch: int, *, good: bool = True, busy: bool = False) -> tuple[Sequence, bool] | None:
        """The sequence whose transfer ended, and whether it is complete."""
        frame = EndFrame(epoch, 0, 0, 0, 0.0, 0.0) if good else None
        incoming = self.transfers.end(TransferEnded(NAME, epoch, frame, "" if good else "broken", busy), NOW)
        return None if incoming is None else (incoming.sequence, incoming.ledger.complete)


def test_a_transfer_from_manifest_to_end() -> None:
    receiver = Receiver()
    sequence = receiver.start(1, [5, 3, 8])
    assert receiver.connector.manifests == [Manifest(NAME, 1, (SlotRange(2, 8),), ((5, 3, 8),), 99.0, LAYOUT)]
    pieces = [Piece(0, 1, 2, 2, 8), Piece(0, 0, 1, 4, 8), Piece(0, 0, 1, 2, 4)]
    for piece in pieces:
        receiver.piece(1, piece)
    assert receiver.runner.written == [(piece, ((5, 3, 8),)) for piece in pieces]
    assert receiver.counters.payload_bytes == 2 * 4 * 6
    assert receiver.end(1) == (sequence, True)
    assert receiver.connector.closings == [(receiver.connector.opened[0], Outcome.COMPLETE)]


def test_of_a_hybrid_model_every_section_has_what_its_group_lacks() -> None:
    runner = Runner(HYBRID, groups=(1, 2, 2, 0))
    receiver = Receiver(runner)
    # A state to be received in block 4, tokens held up to the sixth, and a window from the seventh on.
    tables = [table([-1, 4]), table([1, 2, 3], lacking_from=6), table([7, -1, 9], lacking_from=6)]
    sequence = receiver.start_with(1, tables)
    (manifest,) = receiver.connector.manifests
    # The last of nine tokens sees the sink and the last three, itself included.
    assert manifest.ranges == (SlotRange(6, 8), SlotRange(0, 1), SlotRange(6, 8), SlotRange(0, 1))
    assert manifest.tables == ((-1, 4), (1, 2, 3), (7, -1, 9))
    assert manifest.expected_bytes == 2 * 8 + 4 + 2 * 4 + 12
    pieces = [Piece(3, 0, 1, 0, 1), Piece(2, 0, 1, 6, 8), Piece(0, 0, 2, 6, 8), Piece(1, 0, 1, 0, 1)]
    for piece in pieces:
        assert not receiver.transfers._live[Epoch(1)].ledger.complete
        receiver.piece(1, piece)
    assert runner.written == [(piece, ((-1, 4), (1, 2, 3), (7, -1, 9))) for piece in pieces]
    assert receiver.counters.payload_bytes == manifest.expected_bytes
    assert receiver.end(1) == (sequence, True)


def test_a_transfer_without_its_state_has_failed() -> None:
    receiver = Receiver(Runner(HYBRID, groups=(1, 2, 2, 0)))
    sequence = receiver.start_with(1, [table([-1, 4]), table([1, 2, 3]), table([7, -1, 9], lacking_from=6)])
    for piece in (Piece(0, 0, 2, 0, 8), Piece(1, 0, 1, 0, 1), Piece(2, 0, 1, 6, 8)):
        receiver.piece(1, piece)
    assert receiver.end(1) == (sequence, False)
    assert [outcome for _, outcome in receiver.connector.closings] == [Outcome.FAILED]


def test_choices_of_one_request_can_be_received_at_once() -> None:
    # Two choices that were preempted come back together; each has a reservation, a stream and an end of its own.
    receiver = Receiver()
    first, second = receiver.start(1, [0, 1]), receiver.start(2, [7, 9])
    for epoch in (2, 1):
        receiver.piece(epoch, Piece(0, 0, 2, 2, 8))
    assert receiver.runner.written == [(Piece(0, 0, 2, 2, 8), ((7, 9),)), (Piece(0, 0, 2, 2, 8), ((0, 1),))]
    assert receiver.end(1) == (first, True)
    assert receiver.end(2) == (second, True)
    assert len(receiver.connector.closings) == 2


def test_cancelling_a_request_ends_all_its_transfers() -> None:
    receiver = Receiver()
    receiver.start(1, [0])
    receiver.start(2, [1])
    receiver.transfers.cancel(RequestId("another"), NOW)
    assert not any(opened.transfer.cancelled for opened in receiver.connector.opened)
    receiver.transfers.cancel(NAME, NOW)
    assert all(opened.transfer.cancelled for opened in receiver.connector.opened)
    assert len(receiver.connector.closings) == 2
    for epoch in (1, 2):
        receiver.piece(epoch, Piece(0, 0, 2, 2, 8))
        assert receiver.end(epoch) is None
    assert receiver.runner.written == []
    assert receiver.counters.stale_pieces == 2
    assert len(receiver.connector.closings) == 2


def test_pieces_that_no_manifest_covers_are_dropped() -> None:
    receiver = Receiver()
    receiver.start(3, [0])
    receiver.piece(2, Piece(0, 0, 2, 2, 8))
    receiver.piece(3, Piece(0, 0, 2, 2, 8), name="another")
    assert receiver.runner.written == []
    assert receiver.counters.stale_pieces == 2
    assert receiver.counters.payload_bytes == 0
    assert not receiver.connector.opened[0].transfer.cancelled


def test_a_piece_that_was_not_asked_for_ends_the_transfer_unwritten() -> None:
    for piece, excess in (
        (Piece(0, 0, 2, 1, 8), 0),
        (Piece(0, 0, 2, 2, 9), 0),
        (Piece(0, 0, 3, 2, 8), 0),
        (Piece(0, 0, 2, 2, 8), 4),
    ):
        receiver = Receiver()
        sequence = receiver.start(1, [0])
        receiver.piece(1, piece, excess=excess)
        assert receiver.runner.written == []
        assert receiver.connector.opened[0].transfer.cancelled
        assert receiver.end(1, good=False) == (sequence, False)
        assert [outcome for _, outcome in receiver.connector.closings] == [Outcome.FAILED]


def test_a_repeated_piece_is_not_written_again() -> None:
    receiver = Receiver()
    receiver.start(1, [0])
    receiver.piece(1, Piece(0, 0, 2, 2, 6))
    receiver.piece(1, Piece(0, 0, 2, 5, 8))
    assert receiver.runner.written == [(Piece(0, 0, 2, 2, 6), ((0,),))]
    assert receiver.connector.opened[0].transfer.cancelled


def test_an_end_before_everything_has_arrived_is_a_failure() -> None:
    receiver = Receiver()
    sequence = receiver.start(1, [0])
    receiver.piece(1, Piece(0, 0, 1, 2, 8))
    assert receiver.end(1) == (sequence, False)
    assert [outcome for _, outcome in receiver.connector.closings] == [Outcome.FAILED]


def test_a_busy_peer_has_not_failed() -> None:
    receiver = Receiver()
    sequence = receiver.start(1, [0])
    assert receiver.end(1, good=False, busy=True) == (sequence, False)
    assert [outcome for _, outcome in receiver.connector.closings] == [Outcome.BUSY]


def test_a_connector_that_refuses_leaves_nothing_behind() -> None:
    receiver = Receiver()
    receiver.connector.refusing = True
    receiver.start(1, [0])
    receiver.piece(1, Piece(0, 0, 2, 2, 8))
    assert receiver.counters.stale_pieces == 1
    assert receiver.end(1) is None
    assert receiver.runner.written == []


def test_a_stream_that_says_nothing_after_its_deadline_has_failed() -> None:
    """Whatever became of its reader: the request goes elsewhere, and what still comes is stale."""
    receiver = Receiver()
    sequence = receiver.start(1, [5, 3, 8])
    (opened,) = receiver.connector.opened
    assert receiver.transfers.overdue(opened.deadline + 1.0) == []
    (ended,) = receiver.transfers.overdue(opened.deadline + 6.0)
    assert opened.transfer.cancelled
    incoming = receiver.transfers.end(ended, NOW)
    assert incoming is not None
    assert (incoming.sequence, ended.end) == (sequence, None)
    assert receiver.connector.closings == [(opened, Outcome.FAILED)]
    assert receiver.transfers.overdue(opened.deadline + 7.0) == []
    receiver.piece(1, Piece(0, 0, 1, 2, 4))
    assert (receiver.counters.stale_pieces, receiver.end(1)) == (1, None)
