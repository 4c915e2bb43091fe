"""Frames on a Prefill stream: raw payload bytes and a small protobuf header behind them in one message.

A piece whose payload travels over a process group is a header alone that names the send.

Encoding joins header and payload once; decoding copies nothing. The payload comes first because a message's memory is
aligned: tokens are written from there into pages, and from odd addresses that takes twice as long. Decoders check every
size before they use it.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass, field

from google.protobuf.message import DecodeError

from kv_transfer.layout import CacheLayout, Piece
from kv_transfer.wire import kv_transfer_pb2 as wire

_LENGTH = struct.Struct("<I")
MAX_HEADER_BYTES = 1024
_MAX_PIECE_BYTES = 64 << 20
"""Of several slots; nobody sends pieces nearly as large."""


class FrameError(ValueError):
    """Bytes that are no frame."""


Wait = Callable[[], None]
"""Returns when something is there."""


def at_once() -> None:
    """A ``Wait`` for what is there."""


@dataclass(frozen=True, slots=True)
class PieceFrame:
    """A piece of KV and its packed bytes, which are complete once ``wait`` has returned."""

    epoch: int
    piece: Piece
    payload: memoryview
    wait: Wait = field(default=at_once, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class SentFrame:
    """A piece whose ``size`` packed bytes are send ``sequence`` on generation ``generation`` of the pair's group."""

    epoch: int
    piece: Piece
    size: int
    generation: int
    sequence: int


@dataclass(frozen=True, slots=True)
class EndFrame:
    """Everything has been sent. Times are seconds."""

    epoch: int
    payload_bytes: int
    pieces: int
    cached_tokens: int
    queue_seconds: float
    compute_seconds: float


Frame = PieceFrame | SentFrame | EndFrame


def encode_frame(frame: Frame) -> bytes:
    """One message for the stream."""
    payload = memoryview(b"")
    if isinstance(frame, PieceFrame):
        payload = frame.payload
        header = wire.FrameHeader(epoch=frame.epoch, piece=_piece_message(frame.piece, payload.nbytes))
    elif isinstance(frame, SentFrame):
        header = wire.FrameHeader(epoch=frame.epoch, piece=_piece_message(frame.piece, frame.size))
        header.piece.send.CopyFrom(wire.GroupSend(generation=frame.generation, sequence=frame.sequence))
    else:
        header = wire.FrameHeader(
            epoch=frame.epoch,
            end=wire.End(
                payload_bytes=frame.payload_bytes,
                pieces=frame.pieces,
                cached_tokens=frame.cached_tokens,
                queue_ms=frame.queue_seconds * 1e3,
                compute_ms=frame.compute_seconds * 1e3,
            ),
        )
    encoded = header.SerializeToString()
    return b"".join((payload, encoded, _LENGTH.pack(len(encoded))))


def max_piece_bytes(layout: CacheLayout) -> int:
    """The largest payload that is taken: more than a piece of several slots has, and room for any single slot."""
    return max(_MAX_PIECE_BYTES, *(owner.bytes_per_slot for owner in layout.owners), 0)


def max_frame_bytes(layout: CacheLayout) -> int:
    """The largest message of a stream."""
    return max_piece_bytes(layout) + MAX_HEADER_BYTES + _LENGTH.size


def decode_frame(message: bytes) -> Frame:
    """Parse a message; raises ``FrameError`` for anything that is not exactly one frame."""
    if len(message) < _LENGTH.size:
        raise FrameError(f"a frame of {len(message)} bytes has no header length")
    end = len(message) - _LENGTH.size
    (header_bytes,) = _LENGTH.unpack_from(message, end)
    begin = end - header_bytes
    if header_bytes > MAX_HEADER_BYTES or begin < 0:
        raise FrameError(f"a frame of {len(message)} bytes claims a header of {header_bytes}")
    header = wire.FrameHeader()
    try:
        header.ParseFromString(message[begin:end])
    except DecodeError as error:
        raise FrameError("a frame's header is not a FrameHeader") from error
    payload = memoryview(message)[:begin]
    match header.WhichOneof("frame"):
        case "piece":
            message_piece = header.piece
            piece = Piece(
                message_piece.section,
                message_piece.layer_begin,
                message_piece.layer_end,
                message_piece.slot_begin,
                message_piece.slot_end,
            )
            size = message_piece.payload_bytes
            sent = message_piece.HasField("send")
            if payload.nbytes != (0 if sent else size):
                raise FrameError(f"a piece announces {size} bytes and carries {payload.nbytes}")
            if sent:
                return SentFrame(header.epoch, piece, size, message_piece.send.generation, message_piece.send.sequence)
            return PieceFrame(header.epoch, piece, payload)
        case "end" if payload.nbytes == 0:
            last = header.end
            return EndFrame(
                header.epoch,
                last.payload_bytes,
                last.pieces,
                last.cached_tokens,
                last.queue_ms / 1e3,
                last.compute_ms / 1e3,
            )
    raise FrameError("a frame is neither a piece nor an end")


def _piece_message(piece: Piece, payload_bytes: int) -> wire.Piece:
    return wire.Piece(
        section=piece.section,
        layer_begin=piece.layer_begin,
        layer_end=piece.layer_end,
        slot_begin=piece.slot_begin,
        slot_end=piece.slot_end,
        payload_bytes=payload_bytes,
    )
