"""A stream to nobody: what a prefill engine puts into it is kept, and compared with what a receiver lacks."""

from collections.abc import Sequence
from itertools import product

import grpc

from kv_transfer.frame import EndFrame, Frame, PieceFrame
from kv_transfer.layout import CacheLayout, Lifetime, Piece, SlotRange
from kv_transfer.outgoing_stream import OutgoingStream, StreamFailure
from tests.worker.scripted_runner import stored_byte


class KeptStream(OutgoingStream):
    """A receiver that is ``slow`` takes nothing, any other takes all at once."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[PieceFrame] = []
        self.end: EndFrame | None = None
        self.failure: StreamFailure | None = None
        self.slow = False

    @property
    def queued_bytes(self) -> int:
        return sum(frame.payload.nbytes for frame in self.pieces) if self.slow else 0

    def put(self, frame: Frame) -> None:
        assert self.end is None
        assert self.failure is None
        if isinstance(frame, PieceFrame):
            self.pieces.append(frame)
        else:
            assert isinstance(frame, EndFrame)
            self.end = frame

    def fail(self, code: grpc.StatusCode, message: str) -> None:
        self.failure = StreamFailure(code, message)

    @property
    def untouched(self) -> bool:
        """Whether nothing at all has been put."""
        return not self.pieces and self.end is None and self.failure is None

    def require_everything(
        self, layout: CacheLayout, slots: Sequence[SlotRange], tokens: Sequence[int], epoch: int
    ) -> int:
        """These slots of a prompt, each once and with the right content, then the end; returns their bytes."""
        missing = {
            slot
            for index, (section, wanted) in enumerate(zip(layout.sections, slots, strict=True))
            for slot in product([index], range(len(section.owners)), range(wanted.begin, wanted.end))
        }
        sent: set[tuple[int, int, int]] = set()
        size = 0
        for frame in self.pieces:
            piece = frame.piece
            assert frame.epoch == epoch
            assert frame.payload == stored_bytes(layout, piece, tokens)
            layers = range(piece.layer_begin, piece.layer_end)
            new = set(product([piece.section], layers, range(piece.slot_begin, piece.slot_end)))
            assert new
            assert not new & sent
            assert new <= missing
            sent |= new
            size += frame.payload.nbytes
        assert sent == missing
        assert self.end is not None
        assert (self.end.epoch, self.end.payload_bytes, self.end.pieces) == (epoch, size, len(self.pieces))
        assert self.failure is None
        return size


def stored_bytes(layout: CacheLayout, piece: Piece, tokens: Sequence[int]) -> bytes:
    """What a scripted runner stores of a prompt, as a piece of it is sent."""
    section = layout.sections[piece.section]
    values = [len(tokens)] if section.lifetime is Lifetime.STATE else tokens
    owners = section.owners[piece.layer_begin : piece.layer_end]
    slots = values[piece.slot_begin : piece.slot_end]
    return b"".join(stored_byte(value) * owner.bytes_per_slot for owner in owners for value in slots)
