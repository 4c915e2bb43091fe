"""One transfer on its way out of a prefill replica.

Made by the server for each Prefill call, filled by the engine's thread, emptied by the call's own thread. Payloads are
packed copies, so the engine's pages are free as soon as it has read them, however slow the receiver is.
"""

import queue
import threading
from collections.abc import Callable, Iterator

import grpc

from kv_transfer.frame import EndFrame, Frame, PieceFrame, encode_frame

_CANCELLED = (grpc.StatusCode.ABORTED, "the receiver has cancelled")


class StreamFailure(Exception):
    """The transfer cannot be completed; ``code`` and ``message`` reach the decode replica."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class OutgoingStream:
    """A queue of frames that ends with an end frame or a failure, or is cancelled by the receiver."""

    def __init__(self) -> None:
        self._frames: queue.SimpleQueue[Frame | StreamFailure] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._queued_bytes = 0
        self._cancelled = threading.Event()

    @property
    def queued_bytes(self) -> int:
        """Payload that the receiver has not taken yet."""
        return self._queued_bytes

    @property
    def cancelled(self) -> bool:
        """Whether the receiver is gone; what is put from now on is dropped."""
        return self._cancelled.is_set()

    def put(self, frame: Frame) -> None:
        """Queue a frame."""
        if isinstance(frame, PieceFrame):
            with self._lock:
                self._queued_bytes += frame.payload.nbytes
        self._frames.put(frame)

    def fail(self, code: grpc.StatusCode, message: str) -> None:
        """End with an error."""
        self._frames.put(StreamFailure(code, message))

    def cancel(self) -> None:
        """Nobody wants the rest, for whatever reason; wakes the call's thread."""
        self._cancelled.set()
        self.fail(*_CANCELLED)

    def messages(self, encode: Callable[[Frame], bytes] = encode_frame) -> Iterator[bytes]:
        """Encoded frames until the end; raises ``StreamFailure``. Runs on the call's thread."""
        while True:
            frame = self._frames.get()
            if self.cancelled:
                raise StreamFailure(*_CANCELLED)
            if isinstance(frame, StreamFailure):
                raise frame
            if isinstance(frame, PieceFrame):
                # Here and not on the engine's thread, which goes on computing.
                frame.wait()
            message = encode(frame)
            if isinstance(frame, PieceFrame):
                with self._lock:
                    self._queued_bytes -= frame.payload.nbytes
            yield message
            if isinstance(frame, EndFrame):
                return
