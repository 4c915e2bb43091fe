"""The prefill side of the torch transport: the current group of every decode replica, and the streams that use them.

Made with the server. A decode replica's Join call makes a group and lives as long as it; a stream takes the group that
is there when its first piece is, and keeps it, so that what was named on one generation is never continued on another.
"""

import threading
from collections.abc import Iterator, Mapping
from typing import TypeVar

import grpc
from google.protobuf.message import DecodeError
from torch._C._distributed_c10d import HashStore, Store

from kv_transfer.channel_options import JOIN_METHOD, STOP_METHOD, STORE_METHOD
from kv_transfer.frame import Frame, PieceFrame, SentFrame, encode_frame
from kv_transfer.group_store import answer
from kv_transfer.outgoing_group import OutgoingGroup
from kv_transfer.outgoing_stream import OutgoingStream, StreamFailure
from kv_transfer.pair_group import PREFILL_RANK, RENDEZVOUS_SECONDS, GroupLost, GroupSettings, PairGroup
from kv_transfer.socket_bytes import SocketBytes
from kv_transfer.transfer import rank_incarnation
from kv_transfer.wire import kv_transfer_pb2 as wire

_JOINED_PEERS = 64
"""Every group holds a thread. More decode replicas than this are refused."""

_Request = TypeVar("_Request", wire.JoinRequest, wire.StoreRequest, wire.StopRequest)
_StreamKey = tuple[str, str, int]


class GroupSender:
    """A ``PieceSender``."""

    def __init__(self, settings: GroupSettings) -> None:
        self.name = settings.name
        self.threads = _JOINED_PEERS
        self._settings = settings
        self._changed = threading.Condition()
        self._groups: dict[str, OutgoingGroup] = {}
        self._stores: dict[tuple[str, int], Store] = {}
        self._streams: dict[_StreamKey, OutgoingStream] = {}
        self._socket_bytes: SocketBytes | None = None

    def handlers(self, socket_bytes: SocketBytes) -> "Mapping[str, grpc.RpcMethodHandler[bytes, bytes]]":
        """Join, Store and Stop."""
        self._socket_bytes = socket_bytes
        return {
            JOIN_METHOD: grpc.unary_stream_rpc_method_handler(self._join),
            STORE_METHOD: grpc.unary_unary_rpc_method_handler(self._store),
            STOP_METHOD: grpc.unary_unary_rpc_method_handler(self._stop),
        }

    def messages(
        self, request: wire.PrefillRequest, stream: OutgoingStream, context: grpc.ServicerContext
    ) -> Iterator[bytes]:
        """The stream's frames without their payloads, each sent before it is named."""
        peer = rank_incarnation(request.decode_incarnation, request.receiver)
        key = (peer, request.request_id, request.epoch)
        with self._changed:
            self._streams[key] = stream
        # From now on the decode replica may stop this call.
        context.send_initial_metadata(())
        group: OutgoingGroup | None = None

        def encode(frame: Frame) -> bytes:
            nonlocal group
            if not isinstance(frame, PieceFrame):
                return encode_frame(frame)
            try:
                group = group or self._group_of(peer)
                group.wait_for_room()
                if stream.cancelled:
                    raise StreamFailure(grpc.StatusCode.ABORTED, "the receiver has cancelled")
                sequence = group.post(frame.payload)
            except GroupLost as error:
                raise StreamFailure(grpc.StatusCode.UNAVAILABLE, str(error)) from error
            return encode_frame(SentFrame(frame.epoch, frame.piece, frame.payload.nbytes, group.generation, sequence))

        try:
            yield from stream.messages(encode)
        finally:
            with self._changed:
                del self._streams[key]

    def _group_of(self, peer: str) -> OutgoingGroup:
        with self._changed:
            if not self._changed.wait_for(lambda: peer in self._groups, RENDEZVOUS_SECONDS):
                raise GroupLost(f"{peer} has not joined a process group")
            return self._groups[peer]

    def _join(self, message: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        request = _parse(wire.JoinRequest(), message, context)
        peer = request.decode_incarnation
        key = (peer, request.generation)
        with self._changed:
            if key in self._stores:
                context.abort(grpc.StatusCode.ALREADY_EXISTS, f"{peer} makes group {request.generation} already")
            self._stores[key] = store = HashStore()
            earlier = self._groups.pop(peer, None)
        if earlier is not None:
            earlier.discard(f"{peer} has joined another")
        try:
            yield b""
            try:
                pair = PairGroup(self._settings, store, PREFILL_RANK)
            except GroupLost as error:
                context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
            yield from self._serve(peer, OutgoingGroup(pair, request.generation), context)
        finally:
            with self._changed:
                del self._stores[key]

    def _serve(self, peer: str, group: OutgoingGroup, context: grpc.ServicerContext) -> Iterator[bytes]:
        assert self._socket_bytes is not None
        self._socket_bytes.watch(group.ports)
        try:
            if not context.add_callback(lambda: group.discard(f"{peer} has left")):
                return
            with self._changed:
                self._groups[peer] = group
                self._changed.notify_all()
            yield b""
            context.abort(grpc.StatusCode.UNAVAILABLE, group.wait_until_lost())
        finally:
            group.discard("its call has ended")
            self._socket_bytes.unwatch(group.ports)
            with self._changed:
                if self._groups.get(peer) is group:
                    del self._groups[peer]

    def _store(self, message: bytes, context: grpc.ServicerContext) -> bytes:
        request = _parse(wire.StoreRequest(), message, context)
        with self._changed:
            store = self._stores.get((request.decode_incarnation, request.generation))
        if store is None:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"no group {request.generation} is being made")
        try:
            return answer(store, request, context.is_active)
        except RuntimeError as error:
            context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, str(error))

    def _stop(self, message: bytes, context: grpc.ServicerContext) -> bytes:
        request = _parse(wire.StopRequest(), message, context)
        with self._changed:
            stream = self._streams.get((request.decode_incarnation, request.request_id, request.epoch))
        # One that is not there has ended by itself.
        if stream is not None:
            stream.cancel()
        return b""


def _parse(request: _Request, message: bytes, context: grpc.ServicerContext) -> _Request:
    try:
        request.ParseFromString(message)
    except DecodeError:
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"not a {type(request).__name__}")
    return request
