"""The decode side of the connector: one connection to one incarnation of a prefill replica.

Made by the decode engine's connector when a replica is discovered, before any request needs it; closed when the replica
is gone. Each transfer is read on a thread of its own, which only checks frames and hands them over: pages are written
by the engine's thread.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.message import DecodeError

from kv_transfer.channel_options import CHANNEL_OPTIONS, HANDSHAKE_METHOD, PREFILL_METHOD
from kv_transfer.frame import EndFrame, FrameError, PieceFrame, decode_frame
from kv_transfer.handshake import HandshakeMismatch, layout_message, parse_layout, require_match
from kv_transfer.layout import WIRE_VERSION, CacheLayout
from kv_transfer.staging import StagingBudget
from kv_transfer.wire import kv_transfer_pb2 as wire

if TYPE_CHECKING:
    from grpc import _CallIterator

HANDSHAKE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class PieceArrived:
    """A piece waits in staging; whoever takes it gives its bytes back to the budget."""

    request_id: str
    frame: PieceFrame


@dataclass(frozen=True, slots=True)
class TransferEnded:
    """The stream is over: ``end`` if the sender finished, else why not. ``busy``: the peer had no stream to spare."""

    request_id: str
    epoch: int
    end: EndFrame | None
    error: str
    busy: bool = False


TransferEvent = PieceArrived | TransferEnded


class Transfer:
    """A running transfer as its owner sees it: something to cancel."""

    def __init__(self, call: "_CallIterator[bytes]", staging: StagingBudget) -> None:
        self._call = call
        self._staging = staging
        self.cancelled = threading.Event()

    def cancel(self) -> None:
        """Abort on both sides; returns at once."""
        self.cancelled.set()
        self._call.cancel()
        self._staging.wake()


class PrefillPeer:
    """See the module."""

    def __init__(self, address: str, layout: CacheLayout, incarnation: str, staging: StagingBudget) -> None:
        self.address = address
        self._layout = layout
        self._own_incarnation = incarnation
        self._staging = staging
        self._channel = grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
        self._prefill: grpc.UnaryStreamMultiCallable[Any, bytes] = self._channel.unary_stream(PREFILL_METHOD)
        self.incarnation = ""
        self.max_streams = 0
        self._threads = ThreadPoolExecutor(1)

    def connect(self) -> None:
        """Shake hands. Raises ``HandshakeMismatch``, or ``grpc.RpcError`` when the peer cannot be reached."""
        request = wire.HandshakeRequest(
            wire_version=WIRE_VERSION, incarnation=self._own_incarnation, layout=layout_message(self._layout)
        )
        call: grpc.UnaryUnaryMultiCallable[Any, bytes] = self._channel.unary_unary(HANDSHAKE_METHOD)
        try:
            reply = wire.HandshakeReply.FromString(
                call(request.SerializeToString(), timeout=HANDSHAKE_SECONDS, wait_for_ready=True)
            )
        except DecodeError as error:
            raise HandshakeMismatch(f"{self.address} does not answer with a HandshakeReply") from error
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
                raise HandshakeMismatch(error.details()) from error
            raise
        require_match(self._layout, parse_layout(reply.layout), reply.wire_version, self.address)
        if reply.max_streams < 1:
            raise HandshakeMismatch(
                f"{self.address} grants no stream; start it with --max-prefill-streams of at least 1"
            )
        self.incarnation = reply.incarnation
        self.max_streams = reply.max_streams
        self._threads = ThreadPoolExecutor(reply.max_streams, thread_name_prefix="kv-in")

    def open(
        self,
        request: wire.PrefillRequest,
        deliver: Callable[[TransferEvent], None],
        timeout: float,
    ) -> Transfer:
        """Start a transfer. Events come in order; the last is a ``TransferEnded``, whatever happens."""
        call = self._prefill(request.SerializeToString(), timeout=timeout)
        transfer = Transfer(call, self._staging)
        self._threads.submit(self._read, call, transfer, request.request_id, request.epoch, deliver)
        return transfer

    def close(self) -> None:
        """Drop the connection; running transfers end with an error."""
        self._channel.close()
        self._threads.shutdown(wait=False)

    def _read(
        self,
        call: "_CallIterator[bytes]",
        transfer: Transfer,
        request_id: str,
        epoch: int,
        deliver: Callable[[TransferEvent], None],
    ) -> None:
        end: EndFrame | None = None
        error, busy = "the stream ended without an end frame", False
        try:
            for message in call:
                frame = decode_frame(message)
                if isinstance(frame, EndFrame):
                    end = frame
                elif self._staging.reserve(frame.payload.nbytes, transfer.cancelled):
                    deliver(PieceArrived(request_id, frame))
                else:
                    break
        except grpc.RpcError as failure:
            error = f"{self.address}: {failure.code().name}: {failure.details()}"
            busy = failure.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        except FrameError as failure:
            call.cancel()
            error = f"{self.address} sent something else than frames: {failure}"
        deliver(TransferEnded(request_id, epoch, end, error, busy))
