"""Server and peer over real connections; only the engines on both sides are scripted."""

import queue
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc

from kv_transfer import prefill_peer
from kv_transfer.channel_options import HANDSHAKE_METHOD, PREFILL_METHOD
from kv_transfer.cluster_token import ClusterToken
from kv_transfer.frame import EndFrame, PieceFrame
from kv_transfer.handshake import layout_message
from kv_transfer.layout import WIRE_VERSION, CacheLayout, Piece
from kv_transfer.prefill_peer import PieceArrived, PrefillPeer, TransferEnded, TransferEvent
from kv_transfer.prefill_server import PrefillJob, PrefillServer, RankStream
from kv_transfer.rank_pair import ONLY_PAIR, RankPair
from kv_transfer.staging import StagingBudget
from kv_transfer.wire import kv_transfer_pb2 as wire
from tests.kv_transfer.layouts import LAYOUT

SECONDS = 20.0
MIB = 1 << 20
TOKENS = tuple(range(100, 112))


def eventually(condition: Callable[[], bool], seconds: float = SECONDS) -> bool:
    """Look again and again; False if it has not become true in time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.002)
    return True


class Prefill:
    """A server whose engine is the test: of rank ``rank`` of ``ranks``."""

    def __init__(
        self,
        layout: CacheLayout = LAYOUT,
        max_streams: int = 4,
        rank: int = 0,
        ranks: int = 1,
        token: ClusterToken | None = None,
        max_prompt_tokens: int = 1 << 20,
    ) -> None:
        self._calls: queue.Queue[PrefillJob | RankStream] = queue.Queue()
        self.server = PrefillServer(
            layout,
            "prefill-1",
            max_streams,
            self._calls.put,
            host="127.0.0.1",
            rank=rank,
            ranks=ranks,
            token=token,
            max_prompt_tokens=max_prompt_tokens,
        )
        self.server.start()
        self.address = f"127.0.0.1:{self.server.port}"

    def job(self) -> PrefillJob:
        call = self._calls.get(timeout=SECONDS)
        assert isinstance(call, PrefillJob)
        return call

    def attached(self) -> RankStream:
        """A call that brings no prompt."""
        call = self._calls.get(timeout=SECONDS)
        assert isinstance(call, RankStream)
        return call

    @property
    def untouched(self) -> bool:
        """Whether no call has reached the engine."""
        return self._calls.empty()


def prefill_request(
    *, name: str = "r", epoch: int = 1, lacking: Sequence[tuple[int, int]] = ((0, len(TOKENS)),)
) -> wire.PrefillRequest:
    """What a decode replica says that lacks the given slots, one range per section."""
    return wire.PrefillRequest(
        request_id=name,
        epoch=epoch,
        token_ids=TOKENS,
        prefill_incarnation="prefill-1",
        decode_incarnation="decode-1",
        lacking=[wire.SlotRange(begin=begin, end=end) for begin, end in lacking],
    )


class Decode:
    """A peer whose engine is the test."""

    def __init__(
        self,
        address: str,
        *,
        layout: CacheLayout = LAYOUT,
        staged: int = 64 * MIB,
        pair: RankPair = ONLY_PAIR,
        token: ClusterToken | None = None,
    ) -> None:
        self.staging = StagingBudget(staged)
        self.peer = PrefillPeer(address, layout, "decode-1", self.staging, pair=pair, token=token)
        self._events: queue.Queue[TransferEvent] = queue.Queue()
        self._transfers: list[prefill_peer.Transfer] = []

    def ask(
        self,
        *,
        name: str = "r",
        epoch: int = 1,
        timeout: float = SECONDS,
        lacking: Sequence[tuple[int, int]] = ((0, len(TOKENS)),),
        **fields: object,
    ) -> prefill_peer.Transfer:
        """Ask for the KV of a prompt of one token more than ``TOKENS``."""
        request = prefill_request(name=name, epoch=epoch, lacking=lacking)
        request.MergeFrom(wire.PrefillRequest(**fields))  # type: ignore[arg-type]
        self._transfers.append(self.peer.open(request, self._events.put, timeout))
        return self._transfers[-1]

    def event(self, seconds: float = SECONDS) -> TransferEvent:
        """The next event; its bytes stay staged."""
        return self._events.get(timeout=seconds)

    def piece(self) -> PieceArrived:
        """The next piece, taken out of staging."""
        event = self.event()
        assert isinstance(event, PieceArrived), event
        self.staging.give_back(event.frame.payload.nbytes)
        return event

    def ended(self, seconds: float = SECONDS) -> TransferEnded:
        event = self.event(seconds)
        assert isinstance(event, TransferEnded), event
        return event

    @property
    def readers_waiting(self) -> int:
        """Threads that wait for room in staging."""
        return len(self.staging._changed._waiters)  # type: ignore[attr-defined]

    @property
    def waiting_events(self) -> int:
        return self._events.qsize()

    def close(self) -> None:
        for transfer in self._transfers:
            transfer.cancel()
        self.peer.close()


NewPrefill = Callable[..., Prefill]
NewDecode = Callable[..., Decode]


def frame(piece: Piece, epoch: int = 1, layout: CacheLayout = LAYOUT) -> PieceFrame:
    """A piece whose payload tells it from others."""
    seed = hash((epoch, piece)) % 251
    payload = bytes((seed + i) % 256 for i in range(piece.payload_bytes(layout)))
    return PieceFrame(epoch, piece, memoryview(payload))


END = EndFrame(epoch=1, payload_bytes=216, pieces=3, cached_tokens=4, queue_seconds=0.25, compute_seconds=1.5)


@contextmanager
def raw_calls(address: str) -> Iterator[Callable[[str, bytes], Any]]:
    """A client that sends what it likes: gives a function from method and message to the running call."""
    calls = []  # one that nobody refers to is cancelled
    with grpc.insecure_channel(address) as channel:

        def call(method: str, message: bytes) -> Any:
            start: grpc.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(method)
            calls.append(start(message, timeout=SECONDS))
            return calls[-1]

        yield call


@contextmanager
def impostor(
    handshake: Callable[[bytes, grpc.ServicerContext], bytes],
    stream: Callable[[bytes, grpc.ServicerContext], Iterator[bytes]] = lambda request, context: iter(()),
) -> Iterator[str]:
    """A gRPC server that says something else than a PrefillServer would; yields its address."""
    server = grpc.server(ThreadPoolExecutor(4))
    service, name = HANDSHAKE_METHOD.strip("/").split("/")
    handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
        name: grpc.unary_unary_rpc_method_handler(handshake),
        PREFILL_METHOD.rsplit("/", 1)[1]: grpc.unary_stream_rpc_method_handler(stream),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(0.0).wait()


def reply(version: int = WIRE_VERSION, layout: CacheLayout = LAYOUT) -> Callable[[bytes, grpc.ServicerContext], bytes]:
    message = wire.HandshakeReply(
        wire_version=version, incarnation="prefill-1", layout=layout_message(layout), max_streams=2
    ).SerializeToString()
    return lambda request, context: message
