import struct
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_transfer.frame import MAX_HEADER_BYTES, EndFrame, Frame, FrameError, PieceFrame, decode_frame, encode_frame
from kv_transfer.layout import Piece
from tests.memory import little_memory

U32, U64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
seconds = st.floats(0, 1e6).map(lambda value: round(value, 6))

piece_frames = st.builds(
    PieceFrame,
    epoch=U64,
    piece=st.builds(Piece, section=U32, layer_begin=U32, layer_end=U32, slot_begin=U32, slot_end=U32),
    payload=st.binary(max_size=300).map(memoryview),
)
end_frames = st.builds(
    EndFrame,
    epoch=U64,
    payload_bytes=U64,
    pieces=U32,
    cached_tokens=U32,
    queue_seconds=seconds,
    compute_seconds=seconds,
)


@given(frame=piece_frames)
@settings(deadline=None)
def test_a_piece_survives_the_wire_and_is_not_copied(frame: PieceFrame) -> None:
    message = encode_frame(frame)
    decoded = decode_frame(message)
    assert decoded == frame
    assert isinstance(decoded, PieceFrame)
    assert decoded.payload.obj is message
    assert message.startswith(bytes(frame.payload))


@given(frame=end_frames)
@settings(deadline=None)
def test_an_end_survives_the_wire(frame: EndFrame) -> None:
    decoded = decode_frame(encode_frame(frame))
    assert isinstance(decoded, EndFrame)
    assert (decoded.epoch, decoded.payload_bytes, decoded.pieces) == (frame.epoch, frame.payload_bytes, frame.pieces)
    assert decoded.cached_tokens == frame.cached_tokens
    assert decoded.queue_seconds == pytest.approx(frame.queue_seconds)
    assert decoded.compute_seconds == pytest.approx(frame.compute_seconds)


def test_framing_costs_little() -> None:
    frame = PieceFrame(2**40, Piece(3, 0, 36, 0, 100_000), memoryview(bytes(1 << 20)))
    assert len(encode_frame(frame)) - (1 << 20) < 64


def decode_or_refuse(message: bytes) -> Frame | None:
    """The only two outcomes that are allowed, in a time that does not depend on what a message claims."""
    begin = time.thread_time()
    try:
        with little_memory(1 << 20):
            return decode_frame(message)
    except FrameError:
        return None
    finally:
        assert time.thread_time() - begin < 1.0


@given(message=st.binary(max_size=200))
@settings(max_examples=300, deadline=None)
def test_random_bytes_are_refused(message: bytes) -> None:
    decode_or_refuse(message)


@given(header=st.binary(max_size=60), payload=st.binary(max_size=20))
@settings(max_examples=300, deadline=None)
def test_random_headers_are_refused(header: bytes, payload: bytes) -> None:
    frame = decode_or_refuse(payload + header + struct.pack("<I", len(header)))
    if isinstance(frame, PieceFrame):
        assert frame.payload == payload


@given(frame=piece_frames | end_frames, where=st.integers(0, 400), value=st.integers(0, 255))
@settings(max_examples=300, deadline=None)
def test_a_damaged_frame_is_refused_or_still_says_how_much_it_carries(frame: Frame, where: int, value: int) -> None:
    message = bytearray(encode_frame(frame))
    message[where % len(message)] = value
    damaged = decode_or_refuse(bytes(message))
    if isinstance(damaged, PieceFrame):
        assert damaged.payload.nbytes == (frame.payload.nbytes if isinstance(frame, PieceFrame) else 0)


@given(frame=piece_frames | end_frames, cut=st.integers(1, 400), extra=st.binary(min_size=1, max_size=9))
@settings(deadline=None)
def test_a_frame_that_is_too_short_or_too_long_is_refused(frame: Frame, cut: int, extra: bytes) -> None:
    message = encode_frame(frame)
    with pytest.raises(FrameError):
        decode_frame(message[cut:])
    with pytest.raises(FrameError):
        decode_frame(extra + message)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (b"", "no header length"),
        (b"\x00\x00\x00", "no header length"),
        (b"\xff\xff\xff\xff", "claims a header of 4294967295"),
        (b"abcd\x05\x00\x00\x00", "claims a header of 5"),
        (bytes(2000) + struct.pack("<I", MAX_HEADER_BYTES + 1), "claims a header of 1025"),
        (b"\xff\x01\x00\x00\x00", "not a FrameHeader"),
        (b"\x00\x00\x00\x00", "neither a piece nor an end"),
        (b"\x08\x01\x02\x00\x00\x00", "neither a piece nor an end"),
    ],
)
def test_a_refusal_says_why(message: bytes, reason: str) -> None:
    with pytest.raises(FrameError, match=reason):
        decode_frame(message)
