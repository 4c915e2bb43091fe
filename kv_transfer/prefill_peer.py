"""The decode side of the connector: one connection to one rank of one incarnation of a prefill replica.

Made by the decode engine's connector when a replica is discovered, before any request needs it; closed when the replica
is gone. Each transfer is read on a thread of its own, which only checks frames and hands them over: pages are written
by the engine's thread.
"""

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from kv_transfer.authentication import open_channel
from kv_transfer.channel_options import HANDSHAKE_METHOD, PREFILL_METHOD
from kv_transfer.cluster_token import ClusterToken
from kv_transfer.frame import EndFrame, FrameError, decode_frame, max_frame_bytes
from kv_transfer.group_receiver import GroupReceiver
from kv_transfer.handshake import (
    HandshakeMismatch,
    layout_message,
    parse_layout,
    require_match,
    require_size,
    require_transport,
)
from kv_transfer.layout import WIRE_VERSION, CacheLayout
from kv_transfer.pair_group import GroupLost, GroupSettings
from kv_transfer.piece_receiver import PieceReceiver, StreamReceiver
from kv_transfer.pulse import Pulse
from kv_transfer.rank_pair import ONLY_PAIR, RankPair, pair_layout
from kv_transfer.staging import StagingBudget
from kv_transfer.transfer import PieceArrived, Transfer, TransferEnded, TransferEvent, rank_incarnation
from kv_transfer.wire import kv_transfer_pb2 as wire

log = logging.getLogger(__name__)

__all__ = ["PieceArrived", "PrefillPeer", "Transfer", "TransferEnded", "TransferEvent"]

HANDSHAKE_SECONDS = 5.0

_ENDING_STREAMS = 1000
"""Cancelled streams are read to their ends beside those that count. No stream that is open may lack its reader: it may
name the send whose turn it is. Threads are made when they are needed."""

_SAID_BY_THE_SERVER = frozenset(
    {
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
    }
)
"""gRPC itself never ends a call so that has had messages: these come behind the last of them."""


class PrefillPeer:
    """See the module. With ``group`` payloads travel over a process group, else in the streams.

    ``layout`` is the replicas', ``pair`` says which of their ranks the two ends are.
    """

    def __init__(
        self,
        address: str,
        layout: CacheLayout,
        incarnation: str,
        staging: StagingBudget,
        group: GroupSettings | None = None,
        pair: RankPair = ONLY_PAIR,
        token: ClusterToken | None = None,
    ) -> None:
        self.address = address
        self._layout = layout
        self._own_incarnation = incarnation
        self.pair = pair
        self.passing = pair_layout(layout, pair)
        self._token = token
        self._channel = open_channel(address, token, max_frame_bytes(self.passing.layout))
        self._receiver: PieceReceiver = (
            StreamReceiver(staging)
            if group is None
            else GroupReceiver(
                group, self._channel, self.passing.layout, rank_incarnation(incarnation, pair.receiver), staging
            )
        )
        self._prefill: grpc.UnaryStreamMultiCallable[Any, bytes] = self._channel.unary_stream(PREFILL_METHOD)
        self.incarnation = ""
        self.max_streams = 0
        self._threads = ThreadPoolExecutor(1)
        self._running: set[Transfer] = set()
        self._pulse: Pulse | None = None

    @property
    def silent(self) -> bool:
        """Whether the replica has stopped answering. Known of its leading rank, which knows of the others."""
        return self._pulse is not None and self._pulse.silent

    def connect(self) -> None:
        """Shake hands, and make what payloads need.

        Raises ``HandshakeMismatch``, or ``grpc.RpcError`` or ``GroupLost`` when the peer cannot be reached.
        """
        request = wire.HandshakeRequest(
            wire_version=WIRE_VERSION,
            incarnation=self._own_incarnation,
            layout=layout_message(self._layout),
            transport=self._receiver.name,
            rank=self.pair.receiver,
            ranks=self.pair.receivers,
        )
        call: grpc.UnaryUnaryMultiCallable[Any, bytes] = self._channel.unary_unary(HANDSHAKE_METHOD)
        try:
            answer = call(request.SerializeToString(), timeout=HANDSHAKE_SECONDS, wait_for_ready=True)
            require_size(len(answer))
            reply = wire.HandshakeReply.FromString(answer)
        except DecodeError as error:
            raise HandshakeMismatch(f"{self.address} does not answer with a HandshakeReply") from error
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
                raise HandshakeMismatch(error.details()) from error
            if error.code() is grpc.StatusCode.UNAUTHENTICATED:
                raise HandshakeMismatch(f"{self.address}: {error.details()}") from error
            raise
        require_match(self._layout, parse_layout(reply.layout), reply.wire_version, self.address)
        require_transport(self._receiver.name, reply.transport, self.address)
        if (reply.rank, max(1, reply.ranks)) != (self.pair.sender, self.pair.senders):
            raise HandshakeMismatch(
                f"{self.address} is rank {reply.rank} of {max(1, reply.ranks)}, the directory says {self.pair.sender} "
                f"of {self.pair.senders}: another replica has its address by now"
            )
        if reply.max_streams < 1:
            raise HandshakeMismatch(
                f"{self.address} grants no stream; start it with --max-prefill-streams of at least 1"
            )
        self.incarnation = reply.incarnation
        self.max_streams = reply.max_streams
        self._threads = ThreadPoolExecutor(reply.max_streams + _ENDING_STREAMS, thread_name_prefix="kv-in")
        self._receiver.connect()
        if (self.pair.sender, self.pair.receiver) == (0, 0):
            self._pulse = Pulse(self.address, self._token, self._own_incarnation, self._give_up)

    def open(
        self,
        request: wire.PrefillRequest,
        deliver: Callable[[TransferEvent], None],
        timeout: float,
    ) -> Transfer:
        """Start a transfer. Events come in order; the last is a ``TransferEnded``, whatever happens.

        ``request`` need not name the rank that asks.
        """
        request.receiver, request.receivers = self.pair.receiver, self.pair.receivers
        self._receiver.prepare()
        call = self._prefill(request.SerializeToString(), timeout=timeout)
        transfer = Transfer(request.request_id, request.epoch, self.pair.sender, call, deliver, self._receiver.cancel)
        self._running.add(transfer)
        self._threads.submit(self._read, transfer)
        return transfer

    def close(self) -> None:
        """Drop the connection; running transfers end with an error."""
        if self._pulse is not None:
            self._pulse.close()
        self._receiver.close()
        self._channel.close()
        self._threads.shutdown(wait=False)

    def _give_up(self) -> None:
        """Nobody is there who could be asked to stop."""
        for transfer in list(self._running):
            transfer.call.cancel()

    def _read(self, transfer: Transfer) -> None:
        end: EndFrame | None = None
        error, busy, every_header = "the stream ended without an end frame", False, False
        try:
            self._receiver.begin(transfer)
            for message in transfer.call:
                frame = decode_frame(message)
                if isinstance(frame, EndFrame):
                    end = frame
                elif not self._receiver.take(transfer, frame):
                    break
            else:
                every_header = end is not None
        except grpc.RpcError as failure:
            said = "it does not answer" if self.silent else f"{failure.code().name}: {failure.details()}"
            error = f"{self.address}: {said}"
            busy = failure.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            every_header = failure.code() in _SAID_BY_THE_SERVER
        except FrameError as failure:
            transfer.call.cancel()
            error = f"{self.address} sent something else than frames: {failure}"
        except GroupLost as failure:
            transfer.call.cancel()
            error = f"{self.address}: {failure}"
        except Exception as failure:
            # A bug of ours must not leave the request waiting for an end that nobody sends.
            log.exception("reading a stream of %s failed", self.address)
            transfer.call.cancel()
            error = f"{self.address}: {failure}"
        self._running.discard(transfer)
        ended = TransferEnded(transfer.request_id, transfer.epoch, end, error, busy, transfer.sender)
        self._receiver.end(transfer, ended, every_header=every_header)
