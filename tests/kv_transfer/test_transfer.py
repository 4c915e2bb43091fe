"""Server and peer over real connections; only the engines on both sides are scripted."""

import queue
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from kv_transfer import prefill_peer
from kv_transfer.channel_options import HANDSHAKE_METHOD, PREFILL_METHOD
from kv_transfer.frame import EndFrame, PieceFrame, encode_frame
from kv_transfer.handshake import HandshakeMismatch, layout_message
from kv_transfer.layout import WIRE_VERSION, CacheLayout, Piece
from kv_transfer.ledger import Ledger
from kv_transfer.manifest import Manifest
from kv_transfer.plan import plan_pieces
from kv_transfer.prefill_peer import PieceArrived, PrefillPeer, TransferEnded, TransferEvent
from kv_transfer.prefill_server import GRANTED_PEERS, PrefillJob, PrefillServer
from kv_transfer.staging import StagingBudget
from kv_transfer.wire import kv_transfer_pb2 as wire
from tests.kv_transfer.layouts import LAYOUT, make_layout

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
    """A server whose engine is the test."""

    def __init__(self, layout: CacheLayout = LAYOUT, max_streams: int = 4) -> None:
        self._jobs: queue.Queue[PrefillJob] = queue.Queue()
        self.server = PrefillServer(layout, "prefill-1", max_streams, self._jobs.put, host="127.0.0.1")
        self.server.start()
        self.address = f"127.0.0.1:{self.server.port}"

    def job(self) -> PrefillJob:
        return self._jobs.get(timeout=SECONDS)

    @property
    def untouched(self) -> bool:
        """Whether no call has reached the engine."""
        return self._jobs.empty()


class Decode:
    """A peer whose engine is the test."""

    def __init__(self, address: str, *, layout: CacheLayout = LAYOUT, staged: int = 64 * MIB) -> None:
        self.staging = StagingBudget(staged)
        self.peer = PrefillPeer(address, layout, "decode-1", self.staging)
        self._events: queue.Queue[TransferEvent] = queue.Queue()
        self._transfers: list[prefill_peer.Transfer] = []

    def ask(
        self, *, name: str = "r", epoch: int = 1, timeout: float = SECONDS, **fields: object
    ) -> prefill_peer.Transfer:
        request = wire.PrefillRequest(request_id=name, epoch=epoch, token_ids=TOKENS, prefill_incarnation="prefill-1")
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


@pytest.fixture
def prefill() -> Iterator[Prefill]:
    prefill = Prefill()
    yield prefill
    prefill.server.stop(0.0)


NewDecode = Callable[..., Decode]


@pytest.fixture
def new_decode() -> Iterator[NewDecode]:
    """Makes peers and closes them, so that no thread waits for a stream or for room after a test."""
    made: list[Decode] = []

    def make(address: str, **options: Any) -> Decode:
        made.append(Decode(address, **options))
        return made[-1]

    yield make
    for decode in made:
        decode.close()


@pytest.fixture
def decode(prefill: Prefill, new_decode: NewDecode) -> Decode:
    decode = new_decode(prefill.address)
    decode.peer.connect()
    return decode


def frame(piece: Piece, epoch: int = 1, layout: CacheLayout = LAYOUT) -> PieceFrame:
    """A piece whose payload tells it from others."""
    seed = hash((epoch, piece)) % 251
    payload = bytes((seed + i) % 256 for i in range(piece.payload_bytes(layout)))
    return PieceFrame(epoch, piece, memoryview(payload))


END = EndFrame(epoch=1, payload_bytes=216, pieces=3, cached_tokens=4, queue_seconds=0.25, compute_seconds=1.5)


# A transfer that goes well


def test_a_complete_transfer(prefill: Prefill, decode: Decode) -> None:
    assert decode.peer.incarnation == "prefill-1"
    assert decode.peer.max_streams == 4

    decode.ask(name="request", epoch=7, held_tokens=3, cache_salt="salt", timeout_ms=1500)
    job = prefill.job()
    assert (job.request_id, job.epoch, job.token_ids, job.held) == ("request", 7, TOKENS, 3)
    assert (job.cache_salt, job.timeout) == ("salt", 1.5)

    ledger = Ledger(Manifest("request", 7, 3, 12, (), 0.0, LAYOUT))
    pieces = list(plan_pieces(LAYOUT, 3, 12, max_piece_bytes=72))
    for piece in pieces:
        job.stream.put(frame(piece, epoch=7))
    end = replace(END, epoch=7)
    job.stream.put(end)
    for piece in pieces:
        arrived = decode.piece()
        assert arrived == PieceArrived("request", frame(piece, epoch=7))
        ledger.check(arrived.frame.piece, arrived.frame.payload.nbytes)
        ledger.record(piece)
    assert decode.ended() == TransferEnded("request", 7, end, "the stream ended without an end frame")
    assert ledger.complete
    assert decode.staging.used == 0


def test_many_transfers_share_a_connection_without_mixing(prefill: Prefill, decode: Decode) -> None:
    # Three at a time, over and over: a stream that has ended makes room for another.
    for epoch in range(0, 12, 3):
        for number in range(3):
            decode.ask(name=f"r{epoch + number}", epoch=epoch + number)
        jobs = [prefill.job() for _ in range(3)]
        for layer in range(3):
            for job in jobs:
                job.stream.put(frame(Piece(layer, layer + 1, 0, 12), job.epoch))
        for job in jobs:
            job.stream.put(replace(END, epoch=job.epoch))
        seen: dict[str, list[PieceFrame]] = {}
        ended: dict[tuple[str, int], EndFrame | None] = {}
        while len(ended) < 3:
            event = decode.event()
            if isinstance(event, PieceArrived):
                seen.setdefault(event.request_id, []).append(event.frame)
            else:
                ended[event.request_id, event.epoch] = event.end
        assert ended == {(job.request_id, job.epoch): replace(END, epoch=job.epoch) for job in jobs}
        for job in jobs:
            assert seen[job.request_id] == [frame(Piece(i, i + 1, 0, 12), job.epoch) for i in range(3)]


def test_the_kernel_counts_little_more_than_the_payload(prefill: Prefill, decode: Decode) -> None:
    assert prefill.server.socket_bytes.read() < 2000  # the handshake
    payload = memoryview(bytes(256 << 10))
    decode.ask()
    job = prefill.job()
    for layer in range(16):
        job.stream.put(PieceFrame(1, Piece(layer, layer + 1, 0, 12), payload))
    job.stream.put(END)
    for _ in range(16):
        decode.piece()
    assert decode.ended().end == END
    assert 4 * MIB < prefill.server.socket_bytes.read() < 1.01 * 4 * MIB


# Back-pressure


def test_a_receiver_that_does_not_take_stops_the_sender(prefill: Prefill, new_decode: NewDecode) -> None:
    decode = new_decode(prefill.address, staged=3 * MIB)
    decode.peer.connect()
    payload = memoryview(bytes(MIB))
    for name in ("a", "b"):
        decode.ask(name=name)
    jobs = [prefill.job() for _ in range(2)]
    for job in jobs:
        for layer in range(60):
            job.stream.put(PieceFrame(1, Piece(layer, layer + 1, 0, 12), payload))
        job.stream.put(END)

    def queued() -> int:
        return sum(job.stream.queued_bytes for job in jobs)

    # Buffers on the way fill up; then nothing moves any more, and most has not left the sender.
    def stands_still() -> bool:
        before = queued()
        time.sleep(0.2)
        return queued() == before < 120 * MIB and decode.waiting_events == 3

    assert eventually(stands_still)
    assert queued() > 40 * MIB
    assert decode.staging.used == 3 * MIB
    # Everything arrives once the receiver takes it, never more than the budget at a time.
    arrived = {"a": 0, "b": 0}
    ended = 0
    while ended < 2:
        event = decode.event()
        assert decode.staging.used <= 3 * MIB
        if isinstance(event, PieceArrived):
            assert event.frame.piece.layer_begin == arrived[event.request_id]
            arrived[event.request_id] += 1
            decode.staging.give_back(event.frame.payload.nbytes)
        else:
            assert event.end == END
            ended += 1
    assert arrived == {"a": 60, "b": 60}
    assert queued() == 0


def test_cancelling_frees_a_reader_that_waits_for_room(prefill: Prefill, new_decode: NewDecode) -> None:
    decode = new_decode(prefill.address, staged=100)
    decode.peer.connect()
    transfer = decode.ask()
    job = prefill.job()
    for token in range(8):
        job.stream.put(frame(Piece(0, 3, token, token + 4)))
    assert isinstance(decode.event(), PieceArrived)
    assert decode.staging.used == 96
    assert eventually(lambda: decode.readers_waiting == 1)
    transfer.cancel()
    assert decode.ended(seconds=1.0).end is None
    assert eventually(lambda: job.stream.cancelled, seconds=1.0)
    assert decode.staging.used == 96  # the piece that was handed over


# Ends that are not good


def test_the_receivers_cancel_reaches_the_sender_within_a_second(prefill: Prefill, decode: Decode) -> None:
    transfer = decode.ask()
    job = prefill.job()
    job.stream.put(frame(Piece(0, 1, 0, 12)))
    decode.piece()
    assert not job.stream.cancelled
    transfer.cancel()
    assert eventually(lambda: job.stream.cancelled, seconds=1.0)
    ended = decode.ended(seconds=1.0)
    assert ended.end is None
    assert not ended.busy
    # The connection serves the next request.
    decode.ask(name="next")
    assert prefill.job().request_id == "next"


@pytest.mark.parametrize(
    ("code", "busy"), [(grpc.StatusCode.INTERNAL, False), (grpc.StatusCode.RESOURCE_EXHAUSTED, True)]
)
def test_the_senders_failure_reaches_the_receiver(
    prefill: Prefill, decode: Decode, code: grpc.StatusCode, busy: bool
) -> None:
    decode.ask(epoch=5)
    job = prefill.job()
    job.stream.put(frame(Piece(0, 1, 0, 12)))
    job.stream.fail(code, "out of luck")
    decode.piece()
    assert decode.ended() == TransferEnded("r", 5, None, f"{prefill.address}: {code.name}: out of luck", busy)
    assert eventually(lambda: job.stream.cancelled)


def test_a_transfer_that_takes_too_long_ends_on_both_sides(prefill: Prefill, decode: Decode) -> None:
    decode.ask(timeout=0.2)
    job = prefill.job()
    ended = decode.ended(seconds=2.0)
    assert ended.end is None
    assert "DEADLINE_EXCEEDED" in ended.error
    assert eventually(lambda: job.stream.cancelled, seconds=1.0)


def test_closing_the_peer_ends_its_transfers_on_both_sides(prefill: Prefill, decode: Decode) -> None:
    decode.ask()
    job = prefill.job()
    decode.peer.close()
    assert decode.ended(seconds=2.0).end is None
    assert eventually(lambda: job.stream.cancelled, seconds=1.0)


def test_a_server_that_stops_ends_its_transfers(prefill: Prefill, decode: Decode) -> None:
    decode.ask()
    prefill.job()
    prefill.server.stop(0.0)
    ended = decode.ended(seconds=2.0)
    assert ended.end is None
    assert prefill.address in ended.error


DOOMED = """
import signal, sys
from kv_transfer.frame import PieceFrame
from kv_transfer.layout import Piece
from kv_transfer.prefill_server import PrefillServer
from tests.kv_transfer.layouts import LAYOUT

def accept(job):
    job.stream.put(PieceFrame(job.epoch, Piece(0, 1, 0, 12), memoryview(bytes(96))))

server = PrefillServer(LAYOUT, "prefill-1", 4, accept, host="127.0.0.1")
server.start()
print(server.port, flush=True)
signal.pause()
"""


def test_a_server_that_is_killed_in_the_middle_is_noticed_within_two_seconds(new_decode: NewDecode) -> None:
    root = Path(__file__).parents[2]
    with subprocess.Popen([sys.executable, "-c", DOOMED], cwd=root, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        decode = new_decode(f"127.0.0.1:{int(process.stdout.readline())}")
        try:
            decode.peer.connect()
            decode.ask()
            assert decode.piece().frame.piece == Piece(0, 1, 0, 12)
            process.send_signal(signal.SIGKILL)
            ended = decode.ended(seconds=2.0)
            assert ended.end is None
            assert "UNAVAILABLE" in ended.error
            assert not ended.busy
        finally:
            process.kill()


# What a server refuses


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


def test_a_stale_incarnation_is_refused(prefill: Prefill, decode: Decode) -> None:
    decode.ask(prefill_incarnation="prefill-0")
    ended = decode.ended()
    assert ended.end is None
    assert "FAILED_PRECONDITION" in ended.error
    assert "prefill-1, not prefill-0" in ended.error
    assert prefill.untouched


@pytest.mark.parametrize("held", [12, 13, 2**32 - 1])
def test_a_request_that_lacks_nothing_is_refused(prefill: Prefill, decode: Decode, held: int) -> None:
    decode.ask(held_tokens=held)
    assert "INVALID_ARGUMENT" in decode.ended().error
    assert prefill.untouched


@pytest.mark.parametrize("method", [PREFILL_METHOD, HANDSHAKE_METHOD])
@pytest.mark.parametrize("message", [b"\xff", b"\x0a\x05abc", b"\x0a\x02\xff\xff", bytes(range(256))])
def test_garbage_is_refused_and_harms_nobody(prefill: Prefill, decode: Decode, method: str, message: bytes) -> None:
    with raw_calls(prefill.address) as call, pytest.raises(grpc.RpcError) as error:
        list(call(method, message))
    assert error.value.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION)
    assert prefill.untouched
    decode.ask()
    assert prefill.job().request_id == "r"


def test_more_calls_than_there_are_threads_are_busy_not_stuck() -> None:
    prefill = Prefill(max_streams=1)
    request = wire.PrefillRequest(request_id="r", token_ids=TOKENS, prefill_incarnation="prefill-1")
    with raw_calls(prefill.address) as call:
        for _ in range(GRANTED_PEERS + 4):
            call(PREFILL_METHOD, request.SerializeToString())
        jobs = [prefill.job() for _ in range(GRANTED_PEERS + 4)]
        with pytest.raises(grpc.RpcError) as error:
            next(call(PREFILL_METHOD, request.SerializeToString()))
        assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED

        def accepted() -> bool:
            answer = call(PREFILL_METHOD, request.SerializeToString())
            return eventually(lambda: not prefill.untouched or not answer.is_active()) and not prefill.untouched

        # As soon as one ends, another is taken.
        jobs[0].stream.put(END)
        assert eventually(accepted)
    prefill.server.stop(0.0)


# The handshake


def test_a_layout_that_differs_is_refused_by_name(prefill: Prefill, new_decode: NewDecode) -> None:
    decode = new_decode(prefill.address, layout=replace(LAYOUT, kv_dtype="float16"))
    with pytest.raises(
        HandshakeMismatch, match=r"decode-1 differs in kv_dtype: float16 there, bfloat16 here; .*--dtype"
    ):
        decode.peer.connect()


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


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (reply(version=WIRE_VERSION + 2), "speaks wire version"),
        (reply(layout=make_layout(8, 8)), "differs in owner layers"),
        (lambda request, context: b"\xff\xff", "does not answer with a HandshakeReply"),
        (lambda request, context: b"", "speaks wire version 0"),
    ],
)
def test_an_answer_that_does_not_match_is_refused(
    answer: Callable[[bytes, grpc.ServicerContext], bytes], message: str, new_decode: NewDecode
) -> None:
    with impostor(answer) as address:
        decode = new_decode(address)
        with pytest.raises(HandshakeMismatch, match=f"{address} {message}"):
            decode.peer.connect()


def test_nobody_at_the_address_is_an_error_after_a_while(
    monkeypatch: pytest.MonkeyPatch, new_decode: NewDecode
) -> None:
    monkeypatch.setattr(prefill_peer, "HANDSHAKE_SECONDS", 0.2)
    decode = new_decode("127.0.0.1:1")
    with pytest.raises(grpc.RpcError):
        decode.peer.connect()


# What a peer must not believe


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([b"nonsense"], "sent something else than frames"),
        ([b""], "sent something else than frames"),
        ([encode_frame(END)[:-1]], "sent something else than frames"),
        ([], "ended without an end frame"),
    ],
)
def test_a_stream_that_is_none_ends_with_a_reason(messages: list[bytes], reason: str, new_decode: NewDecode) -> None:
    good = frame(Piece(0, 1, 0, 12))
    with impostor(reply(), lambda request, context: iter([encode_frame(good), *messages])) as address:
        decode = new_decode(address)
        decode.peer.connect()
        decode.ask()
        assert decode.piece().frame == good
        ended = decode.ended()
        assert ended.end is None
        assert reason in ended.error
        assert decode.staging.used == 0
