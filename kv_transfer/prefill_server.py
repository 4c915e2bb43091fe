"""The prefill side of the connector: answers handshakes, and turns every Prefill call into a job for the engine.

Started with a prefill rank on a port of its own, stopped with it. Its threads parse and send; they never touch pages.
"""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import grpc
from google.protobuf.message import DecodeError

from kv_transfer.authentication import token_checks
from kv_transfer.channel_options import HANDSHAKE_METHOD, PREFILL_METHOD, PULSE_METHOD, server_options
from kv_transfer.cluster_token import ClusterToken
from kv_transfer.handshake import (
    MAX_NAME,
    HandshakeMismatch,
    layout_message,
    parse_layout,
    require_match,
    require_ranks,
    require_size,
    require_transport,
)
from kv_transfer.layout import WIRE_VERSION, CacheLayout, SlotRange
from kv_transfer.outgoing_stream import OutgoingStream, StreamFailure
from kv_transfer.piece_sender import PieceSender, StreamSender
from kv_transfer.plan import check_request, lower_bound
from kv_transfer.rank_pair import RankPair, check_ranks, pair_layout
from kv_transfer.receivers import Receivers
from kv_transfer.socket_bytes import SocketBytes
from kv_transfer.strangers import Strangers
from kv_transfer.wire import kv_transfer_pb2 as wire

# Streams are granted per decode replica; this many ranks can use their grant at once before calls are refused. Threads
# are made when they are needed.
GRANTED_PEERS = 16
_SPARE_THREADS = 4
MAX_PROMPT_TOKENS = 1 << 24
"""What is believed of a call, unless its server knows better."""


@dataclass(frozen=True, slots=True)
class TransferName:
    """A request's transfer as every rank knows it. Decode replicas may use equal request ids."""

    decode_incarnation: str
    request_id: str
    epoch: int


@dataclass(frozen=True, slots=True)
class RankStream:
    """A decode replica's rank ``receiver`` has attached to a transfer and takes from ``stream`` what it needs."""

    name: TransferName
    receiver: int
    stream: OutgoingStream


@dataclass(frozen=True, slots=True)
class PrefillJob:
    """A prompt to compute for a decode replica of ``receivers`` ranks; ``stream`` is the first one's.

    ``token_ids`` lacks its last token; ``lacking`` is to be sent, section by section. ``arrived`` is when the call came
    in, in the engine's clock, seconds.
    """

    name: TransferName
    receivers: int
    token_ids: tuple[int, ...]
    lacking: tuple[SlotRange, ...]
    cache_salt: str
    timeout: float
    stream: OutgoingStream
    arrived: float
    caller: str = ""
    priority: int = 0


class CallRefused(Exception):
    """A Prefill call that cannot be served; ``code`` and ``message`` reach the decode replica."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


def parse_call(
    request: wire.PrefillRequest,
    stream: OutgoingStream,
    layout: CacheLayout,
    incarnation: str,
    rank: int,
    ranks: int,
    arrived: float,
    max_prompt_tokens: int = MAX_PROMPT_TOKENS,
) -> PrefillJob | RankStream:
    """What a call to rank ``rank`` of ``ranks`` is about; raises ``CallRefused`` for one that cannot be served."""
    if request.prefill_incarnation != incarnation:
        raise CallRefused(
            grpc.StatusCode.FAILED_PRECONDITION,
            f"this is {incarnation}, not {request.prefill_incarnation[:MAX_NAME]}: shake hands again",
        )
    name = TransferName(request.decode_incarnation, request.request_id, request.epoch)
    receivers = max(1, request.receivers)
    problem = None if request.receiver < receivers else f"rank {request.receiver} of {receivers}"
    problem = problem or check_ranks(layout, receivers)
    if problem is None and (rank, request.receiver) != (0, 0):
        if pair_layout(layout, RankPair(rank, ranks, request.receiver, receivers)).sections:
            return RankStream(name, request.receiver, stream)
        problem = f"rank {rank} of {ranks} has nothing for rank {request.receiver} of {receivers}"
    if len(request.token_ids) > max_prompt_tokens:
        problem = problem or f"{len(request.token_ids)} tokens are more than {max_prompt_tokens}"
    lacking = tuple(SlotRange(slots.begin, slots.end) for slots in request.lacking[: 1 + len(layout.sections)])
    problem = problem or check_request(layout, len(request.token_ids) + 1, lacking)
    if problem is not None or lower_bound(layout, lacking) == 0:
        raise CallRefused(grpc.StatusCode.INVALID_ARGUMENT, problem or "nothing is lacking: there is nothing to send")
    return PrefillJob(
        name=name,
        receivers=receivers,
        token_ids=tuple(request.token_ids),
        lacking=lacking,
        cache_salt=request.cache_salt,
        timeout=request.timeout_ms / 1e3,
        stream=stream,
        arrived=arrived,
        caller=request.caller,
        priority=request.priority,
    )


class PrefillServer:
    """A gRPC server with raw bytes in both directions, of rank ``rank`` of ``ranks``.

    ``sender`` says how payloads travel: else in its streams. ``token`` is what callers must have,
    ``strangers`` counts those who have not. Prompts have up to ``max_prompt_tokens``.
    """

    def __init__(
        self,
        layout: CacheLayout,
        incarnation: str,
        max_streams: int,
        accept: Callable[[PrefillJob | RankStream], None],
        *,
        host: str,
        port: int = 0,
        sender: PieceSender | None = None,
        rank: int = 0,
        ranks: int = 1,
        token: ClusterToken | None = None,
        strangers: Strangers | None = None,
        max_prompt_tokens: int = MAX_PROMPT_TOKENS,
    ) -> None:
        self._layout = layout
        self._rank = rank
        self._ranks = ranks
        self._incarnation = incarnation
        self._max_streams = max_streams
        self._max_prompt_tokens = max_prompt_tokens
        self._accept = accept
        self._receivers = Receivers()
        self._sender = sender if sender is not None else StreamSender()
        threads = max_streams * GRANTED_PEERS + _SPARE_THREADS + self._sender.threads
        self._server = grpc.server(
            ThreadPoolExecutor(threads, thread_name_prefix="kv-out"),
            options=server_options(),
            maximum_concurrent_rpcs=threads,
            interceptors=token_checks(token, Strangers() if strangers is None else strangers),
        )
        self.port = self._server.add_insecure_port(f"{host}:{port}")
        self.socket_bytes = SocketBytes(self.port)
        methods: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
            HANDSHAKE_METHOD: grpc.unary_unary_rpc_method_handler(self._handshake),
            PREFILL_METHOD: grpc.unary_stream_rpc_method_handler(self._prefill),
            PULSE_METHOD: grpc.unary_unary_rpc_method_handler(self._pulse),
            **self._sender.handlers(self.socket_bytes),
        }
        service = PREFILL_METHOD.strip("/").split("/")[0]
        handlers = {method.rsplit("/", 1)[1]: handler for method, handler in methods.items()}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))

    def start(self) -> None:
        """Begin to serve."""
        self._server.start()
        self._receivers.start()

    def stop(self, grace: float) -> None:
        """Refuse new calls, give the others ``grace`` seconds."""
        self._server.stop(grace).wait()
        self._receivers.close()

    def hang_up(self) -> None:
        """End every call at once, without waiting for any."""
        self._server.stop(None)

    def _pulse(self, message: bytes, context: grpc.ServicerContext) -> bytes:
        if message:
            self._receivers.heard(message[:MAX_NAME].decode(errors="replace"))
        # Beside a transfer these are next to nothing, beside an idle hour they are not.
        self.socket_bytes.leave_out(context.peer())
        return b""

    def _handshake(self, message: bytes, context: grpc.ServicerContext) -> bytes:
        request = wire.HandshakeRequest()
        try:
            require_size(len(message))
            request.ParseFromString(message)
            peer = request.incarnation[:MAX_NAME]
            require_match(self._layout, parse_layout(request.layout), request.wire_version, peer)
            require_transport(self._sender.name, request.transport, peer)
            require_ranks(self._layout, request.rank, max(1, request.ranks), peer)
        except DecodeError:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "not a HandshakeRequest")
        except HandshakeMismatch as mismatch:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(mismatch))
        return wire.HandshakeReply(
            wire_version=WIRE_VERSION,
            incarnation=self._incarnation,
            layout=layout_message(self._layout),
            max_streams=self._max_streams,
            transport=self._sender.name,
            rank=self._rank,
            ranks=self._ranks,
        ).SerializeToString()

    def _prefill(self, message: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        request = wire.PrefillRequest()
        try:
            request.ParseFromString(message)
        except DecodeError:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "not a PrefillRequest")
        stream = OutgoingStream()
        try:
            event = parse_call(
                request,
                stream,
                self._layout,
                self._incarnation,
                self._rank,
                self._ranks,
                arrived=time.monotonic(),
                max_prompt_tokens=self._max_prompt_tokens,
            )
        except CallRefused as refusal:
            context.abort(refusal.code, refusal.message)
        if not context.add_callback(stream.cancel):
            return
        self._accept(event)
        try:
            with self._receivers.taking(request.decode_incarnation, stream):
                yield from self._sender.messages(request, stream, context)
        except StreamFailure as failure:
            context.abort(failure.code, failure.message)
        finally:
            # Connections may close soon after; their bytes are counted while they are still there.
            self.socket_bytes.read()
