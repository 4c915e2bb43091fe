import threading

import grpc
import pytest

from kv_transfer.frame import EndFrame, PieceFrame, decode_frame
from kv_transfer.layout import Piece
from kv_transfer.outgoing_stream import OutgoingStream, StreamFailure

END = EndFrame(1, 0, 0, 0, 0.0, 0.0)


def piece(token: int, size: int = 10) -> PieceFrame:
    return PieceFrame(1, Piece(0, 0, 1, token, token + 1), memoryview(bytes([token]) * size))


def test_frames_leave_in_order_and_an_end_is_the_last() -> None:
    stream = OutgoingStream()
    for frame in (piece(0), piece(1), END, piece(2)):
        stream.put(frame)
    assert [decode_frame(message) for message in stream.messages()] == [piece(0), piece(1), END]


def test_queued_bytes_are_what_has_not_been_taken() -> None:
    stream = OutgoingStream()
    for token in range(3):
        stream.put(piece(token, size=100))
    assert stream.queued_bytes == 300
    messages = stream.messages()
    next(messages)
    assert stream.queued_bytes == 200
    stream.put(piece(3, size=7))
    assert stream.queued_bytes == 207


def test_a_failure_comes_after_what_was_queued_before_it() -> None:
    stream = OutgoingStream()
    stream.put(piece(0))
    stream.fail(grpc.StatusCode.INTERNAL, "out of luck")
    messages = stream.messages()
    assert decode_frame(next(messages)) == piece(0)
    with pytest.raises(StreamFailure, match="out of luck") as failure:
        next(messages)
    assert failure.value.code is grpc.StatusCode.INTERNAL


def test_cancel_wakes_the_thread_that_waits_for_frames() -> None:
    stream = OutgoingStream()
    ended = threading.Event()

    def send() -> None:
        with pytest.raises(StreamFailure):
            next(stream.messages())
        ended.set()

    threading.Thread(target=send, daemon=True).start()
    assert not stream.cancelled
    stream.cancel()
    assert stream.cancelled
    assert ended.wait(20.0)


def test_a_payload_that_is_not_there_yet_is_waited_for_by_whoever_sends_it() -> None:
    """As a copy off a GPU: the engine's thread goes on, and the bytes are read after the wait and not before."""
    stream = OutgoingStream()
    payload, is_there = bytearray(b"old"), threading.Event()
    stream.put(PieceFrame(1, Piece(0, 0, 1, 0, 1), memoryview(payload), lambda: assert_in_time(is_there)))
    stream.put(END)
    sent: list[bytes] = []
    sender = threading.Thread(target=lambda: sent.extend(stream.messages()))
    sender.start()
    payload[:] = b"new"
    is_there.set()
    sender.join(20)
    first, last = (decode_frame(message) for message in sent)
    assert isinstance(first, PieceFrame)
    assert bytes(first.payload) == b"new"
    assert last == END


def assert_in_time(event: threading.Event) -> None:
    assert event.wait(20)
