"""Transfers over a process group, between two processes: odd sizes, interruptions, deaths, and the group after them."""

import itertools
import queue
import signal
import threading
from collections.abc import Iterator, Sequence

import pytest

from kv_transfer import incoming_group, prefill_peer
from kv_transfer.frame import FrameError, SentFrame, decode_frame, encode_frame
from kv_transfer.group_receiver import GroupReceiver
from kv_transfer.handshake import HandshakeMismatch
from kv_transfer.layout import Piece, SlotRange
from kv_transfer.prefill_peer import PrefillPeer
from kv_transfer.staging import StagingBudget
from kv_transfer.transfer import PieceArrived, Transfer, TransferEnded, TransferEvent
from tests.kv_transfer.connection import MIB, SECONDS, TOKENS, NewPrefill, eventually, prefill_request
from tests.kv_transfer.sending_process import ODD, SETTINGS, SendingProcess, payload_of, pieces_of

EVERYTHING = [(0, len(TOKENS))]
_numbers = itertools.count()


class Receiving:
    """A decode replica without an engine."""

    def __init__(self, address: str, staged: int = 64 * MIB) -> None:
        self.staging = StagingBudget(staged)
        self._incarnation = f"decode-{next(_numbers)}"
        self.peer = PrefillPeer(address, ODD, self._incarnation, self.staging, SETTINGS)
        self.events: queue.Queue[TransferEvent] = queue.Queue()

    def ask(self, name: str, epoch: int = 1, timeout: float = SECONDS) -> Transfer:
        request = prefill_request(name=name, epoch=epoch, lacking=EVERYTHING)
        request.decode_incarnation = self._incarnation
        return self.peer.open(request, self.events.put, timeout)

    def event(self, seconds: float = SECONDS) -> TransferEvent:
        return self.events.get(timeout=seconds)

    def require_piece(self) -> PieceArrived:
        """The next event is a piece, and every byte of it is right."""
        event = self.event()
        assert isinstance(event, PieceArrived), event
        assert bytes(event.frame.payload) == payload_of(event.frame.piece, event.frame.epoch)
        self.staging.give_back(event.frame.payload.nbytes)
        return event

    def require_transfer(self, epoch: int) -> None:
        """All pieces, in order, then the end."""
        for piece in PIECES:
            event = self.require_piece()
            assert (event.frame.epoch, event.frame.piece) == (epoch, piece)
        ended = self.event()
        assert isinstance(ended, TransferEnded), ended
        assert ended.end is not None, ended.error
        assert self.staging.used == 0

    @property
    def generation(self) -> int:
        """Of the group that is there, 0 if none is."""
        receiver = self.peer._receiver
        assert isinstance(receiver, GroupReceiver)
        return receiver._group.generation if receiver._group is not None else 0

    def lose_group(self) -> None:
        receiver = self.peer._receiver
        assert isinstance(receiver, GroupReceiver)
        assert receiver._group is not None
        receiver._group.discard("the test wants it")


PIECES = pieces_of([SlotRange(0, len(TOKENS))])


@pytest.fixture(scope="module")
def sending() -> Iterator[SendingProcess]:
    with SendingProcess() as process:
        yield process


@pytest.fixture
def doomed() -> Iterator[SendingProcess]:
    """A process that the test may kill."""
    with SendingProcess() as process:
        yield process


@pytest.fixture
def receiving(sending: SendingProcess) -> Iterator[Receiving]:
    yield from connected(sending)


@pytest.fixture
def bereaved(doomed: SendingProcess) -> Iterator[Receiving]:
    """Receives from ``doomed``."""
    yield from connected(doomed)


def connected(process: SendingProcess) -> Iterator[Receiving]:
    receiving = Receiving(process.address)
    receiving.peer.connect()
    yield receiving
    receiving.peer.close()
    assert eventually(lambda: in_group_threads() == 0)


def in_group_threads() -> int:
    return sum(thread.name == "kv-group-in" for thread in threading.enumerate())


def test_pieces_of_odd_sizes_arrive_to_the_byte(sending: SendingProcess, receiving: Receiving) -> None:
    before, _ = sending.counts()
    assert {piece.payload_bytes(ODD) for piece in PIECES} == {12, 36, 1021, 65537}
    for epoch in range(1, 4):
        receiving.ask("all", epoch)
        receiving.require_transfer(epoch)
    payload = 3 * sum(piece.payload_bytes(ODD) for piece in PIECES)
    assert payload < sending.counts()[0] - before < 1.01 * payload + 30_000
    assert receiving.generation == 1


def test_two_transfers_share_a_group_in_turn(receiving: Receiving) -> None:
    for epoch in (1, 2):
        receiving.ask("pair", epoch)
    seen: dict[int, list[Piece]] = {1: [], 2: []}
    for _ in range(2 * len(PIECES)):
        event = receiving.event()
        while isinstance(event, TransferEnded):
            assert event.end is not None
            event = receiving.event()
        assert bytes(event.frame.payload) == payload_of(event.frame.piece, event.frame.epoch)
        seen[event.frame.epoch].append(event.frame.piece)
        receiving.staging.give_back(event.frame.payload.nbytes)
    assert seen == {1: PIECES, 2: PIECES}
    assert receiving.generation == 1


def test_a_cancelled_transfer_costs_no_other_the_group(receiving: Receiving) -> None:
    stalled = receiving.ask(f"stalls-{len(PIECES)}")
    receiving.require_piece()
    stalled.cancel()
    while isinstance(event := receiving.event(), PieceArrived):
        receiving.staging.give_back(event.frame.payload.nbytes)
    assert event.end is None
    assert eventually(lambda: receiving.staging.used == 0)
    receiving.ask("all", epoch=2)
    receiving.require_transfer(2)
    assert receiving.generation == 1


def test_sends_that_wait_for_room_are_received_after_a_cancellation(sending: SendingProcess) -> None:
    receiving = Receiving(sending.address, staged=65537 + 1)
    receiving.peer.connect()
    transfer = receiving.ask("all")
    first = receiving.event()
    assert isinstance(first, PieceArrived)
    transfer.cancel()
    # The other side has posted more, and nothing of it fits before this is given back.
    receiving.staging.give_back(first.frame.payload.nbytes)
    while isinstance(event := receiving.event(), PieceArrived):
        receiving.staging.give_back(event.frame.payload.nbytes)
    assert eventually(lambda: receiving.staging.used == 0)
    receiving.ask("all", epoch=2)
    receiving.require_transfer(2)
    assert receiving.generation == 1
    receiving.peer.close()


def test_cancelled_at_once_again_and_again(receiving: Receiving) -> None:
    for epoch in range(1, 31):
        receiving.ask("all", epoch).cancel()
    for _ in range(30):
        while isinstance(event := receiving.event(), PieceArrived):
            receiving.staging.give_back(event.frame.payload.nbytes)
    assert eventually(lambda: receiving.staging.used == 0)
    receiving.ask("all", epoch=99)
    receiving.require_transfer(99)
    assert receiving.generation == 1


@pytest.mark.parametrize("pieces", [0, 1, len(PIECES)])
def test_a_sender_that_is_killed_ends_the_transfer_at_once(
    doomed: SendingProcess, bereaved: Receiving, pieces: int
) -> None:
    bereaved.ask(f"stalls-{pieces}")
    for _ in range(min(pieces, 1)):
        bereaved.require_piece()
    doomed.signal(signal.SIGKILL)
    while isinstance(event := bereaved.event(seconds=5.0), PieceArrived):
        bereaved.staging.give_back(event.frame.payload.nbytes)
    assert event.end is None
    assert eventually(lambda: bereaved.staging.used == 0 and in_group_threads() == 0)


def test_a_sender_that_hangs_ends_with_the_deadline(
    doomed: SendingProcess, bereaved: Receiving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(incoming_group, "RECEIVE_SECONDS", 1.0)
    doomed.signal(signal.SIGSTOP)
    bereaved.ask("all", timeout=0.5)
    ended = bereaved.event(seconds=5.0)
    assert isinstance(ended, TransferEnded)
    assert "DEADLINE_EXCEEDED" in ended.error
    assert eventually(lambda: bereaved.staging.used == 0 and in_group_threads() == 0)
    # It goes on as if nothing had been, with another group.
    doomed.signal(signal.SIGCONT)
    succeed_eventually(bereaved)
    assert bereaved.generation > 1


def test_a_lost_group_is_made_anew(sending: SendingProcess, receiving: Receiving) -> None:
    for generation in (1, 2):
        receiving.ask("stalls-1", epoch=generation)
        receiving.require_piece()
        assert receiving.generation == generation
        receiving.lose_group()
        ended = receiving.event(seconds=5.0)
        assert isinstance(ended, TransferEnded)
        assert ended.end is None
        receiving.ask("all", epoch=10 + generation)
        receiving.require_transfer(10 + generation)
    assert receiving.generation == 3
    assert eventually(lambda: sending.counts()[1] == 1)
    assert eventually(lambda: in_group_threads() == 1)


def test_those_who_lose_a_group_do_not_take_the_next_one_from_others(receiving: Receiving) -> None:
    for epoch in (1, 2):
        receiving.ask("stalls-1", epoch)
        receiving.require_piece()
    receiving.lose_group()
    receiving.ask("all", epoch=3)
    ended: dict[int, bool] = {}
    while len(ended) < 3:
        event = receiving.event()
        if isinstance(event, TransferEnded):
            ended[event.epoch] = event.end is not None
        else:
            receiving.staging.give_back(event.frame.payload.nbytes)
    assert ended == {1: False, 2: False, 3: True}
    assert receiving.generation == 2


def test_a_receiver_that_leaves_takes_its_group_along(sending: SendingProcess) -> None:
    receiving = Receiving(sending.address)
    receiving.peer.connect()
    transfer = receiving.ask("stalls-1")
    receiving.require_piece()
    assert eventually(lambda: sending.counts()[1] == 1)
    receiving.peer.close()
    # The engine may not know yet.
    transfer.cancel()
    ended = receiving.event(seconds=5.0)
    assert isinstance(ended, TransferEnded)
    assert ended.end is None
    assert eventually(lambda: sending.counts()[1] == 0 and in_group_threads() == 0)


def succeed_eventually(receiving: Receiving) -> None:
    """Ask until a transfer is complete: the first attempts may meet what is being given up."""
    epochs: Sequence[int] = range(50, 60)
    for epoch in epochs:
        receiving.ask("all", epoch)
        while isinstance(event := receiving.event(), PieceArrived):
            receiving.staging.give_back(event.frame.payload.nbytes)
        if event.end is not None:
            return
    raise AssertionError(f"no transfer succeeded: {event.error}")


# What does not fit


def test_another_transport_is_refused_by_its_flag(prefill_grpc: str) -> None:
    receiving = Receiving(prefill_grpc)
    with pytest.raises(HandshakeMismatch, match=r"transport: .*grpc.*--transport"):
        receiving.peer.connect()
    receiving.peer.close()


def test_a_receiver_over_streams_is_refused_by_its_flag(sending: SendingProcess) -> None:
    peer = prefill_peer.PrefillPeer(sending.address, ODD, "decode-1", StagingBudget(MIB))
    with pytest.raises(HandshakeMismatch, match=r"transport: .*torch/gloo.*--transport"):
        peer.connect()
    peer.close()


@pytest.fixture
def prefill_grpc(new_prefill: NewPrefill) -> str:
    return new_prefill(layout=ODD).address


def test_a_frame_that_names_a_send_carries_no_payload() -> None:
    frame = SentFrame(epoch=3, piece=Piece(0, 1, 2, 4, 9), size=15, generation=7, sequence=1 << 40)
    assert decode_frame(encode_frame(frame)) == frame
    with pytest.raises(FrameError, match="announces 15 bytes and carries 15"):
        decode_frame(bytes(15) + encode_frame(frame))
