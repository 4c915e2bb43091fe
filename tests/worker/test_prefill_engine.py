import random
from itertools import product
from typing import Any

import grpc
import pytest

from kv_transfer.frame import EndFrame, PieceFrame
from kv_transfer.outgoing_stream import OutgoingStream, StreamFailure
from kv_transfer.plan import lower_bound
from kv_transfer.prefill_server import PrefillJob
from tests.worker.scripted_runner import LAYOUT, VOCAB_SIZE, ScriptedRunner
from worker.config import EngineConfig, Role
from worker.prefill_engine import PrefillEngine


class Stream(OutgoingStream):
    """Keeps what was put instead of sending it; ``taken`` says how much of that the receiver took."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[PieceFrame] = []
        self.end: EndFrame | None = None
        self.failure: StreamFailure | None = None
        self.slow = False

    @property
    def queued_bytes(self) -> int:
        return sum(frame.payload.nbytes for frame in self.pieces) if self.slow else 0

    def put(self, frame: PieceFrame | EndFrame) -> None:
        assert self.end is None
        assert self.failure is None
        if isinstance(frame, PieceFrame):
            self.pieces.append(frame)
        else:
            self.end = frame

    def fail(self, code: grpc.StatusCode, message: str) -> None:
        self.failure = StreamFailure(code, message)


class Engine:
    """A prefill engine over a scripted model, driven by hand."""

    def __init__(self, *, num_blocks: int = 32, block_size: int = 4, **config: Any) -> None:
        self.runner = ScriptedRunner(num_blocks, block_size)
        settings = {"max_batched_tokens": 16, "max_piece_bytes": 60, "block_size": block_size, **config}
        self.config = EngineConfig(model="", role=Role.PREFILL, **settings)
        self.engine = PrefillEngine(self.config, self.runner, "prefill-1", lambda: 0)  # type: ignore[arg-type]
        self.now = 0.0
        self.jobs: list[tuple[PrefillJob, Stream]] = []

    def ask(self, tokens: list[int], held: int = 0, *, salt: str = "") -> Stream:
        stream = Stream()
        job = PrefillJob("r", len(self.jobs) + 1, tuple(tokens), held, salt, 60.0, stream)
        self.jobs.append((job, stream))
        self.engine.handle(job, self.now)
        return stream

    def step(self) -> None:
        self.now += 1.0
        self.engine.step(self.now)

    def run(self) -> None:
        for _ in range(1000):
            if self.engine.idle:
                break
            self.step()
        assert self.engine.idle
        assert self.engine.status().held_blocks == 0

    def require_complete(self) -> None:
        """Every job was sent exactly what its receiver lacks, in order, and no byte more."""
        for job, stream in self.jobs:
            lacking = set(product(range(2), range(job.held, len(job.token_ids))))
            sent: set[tuple[int, int]] = set()
            size = 0
            for frame in stream.pieces:
                piece = frame.piece
                assert frame.epoch == job.epoch
                assert frame.payload.nbytes == piece.payload_bytes(LAYOUT)
                slots = set(
                    product(range(piece.layer_begin, piece.layer_end), range(piece.token_begin, piece.token_end))
                )
                assert not slots & sent
                assert slots <= lacking
                sent |= slots
                size += frame.payload.nbytes
            assert sent == lacking
            assert size == lower_bound(LAYOUT, len(job.token_ids) + 1, job.held)
            assert stream.end is not None
            assert (stream.end.epoch, stream.end.payload_bytes, stream.end.pieces) == (
                job.epoch,
                size,
                len(stream.pieces),
            )
            assert stream.failure is None


def test_a_prompt_is_sent_chunk_by_chunk_as_it_is_computed() -> None:
    engine = Engine(max_batched_tokens=4, max_piece_bytes=1000)
    stream = engine.ask(list(range(10)), held=3)
    reached = []
    while stream.end is None:
        engine.step()
        reached.append([(frame.piece.token_begin, frame.piece.token_end) for frame in stream.pieces])
    assert reached == [[(3, 4)], [(3, 4), (4, 8)], [(3, 4), (4, 8), (8, 10)]]
    engine.run()
    engine.require_complete()


def test_a_cached_prompt_is_sent_without_being_computed() -> None:
    engine = Engine()
    engine.ask([1] * 8)
    engine.run()
    engine.runner.broken = True
    stream = engine.ask([1] * 8, held=4)
    engine.step()
    assert stream.end is not None
    assert stream.end.cached_tokens == 8
    engine.require_complete()


@pytest.mark.parametrize("seed", range(6))
def test_payload_is_the_lower_bound_whatever_is_cached_held_or_batched(seed: int) -> None:
    numbers = random.Random(seed)
    engine = Engine(num_blocks=14, block_size=3, max_batched_tokens=numbers.randint(1, 20), max_running_requests=4)
    for _ in range(30):
        tokens = [numbers.randint(0, 1) for _ in range(numbers.randint(1, 20))]
        engine.ask(tokens, numbers.randrange(len(tokens)), salt=numbers.choice(["", "tenant"]))
        for _ in range(numbers.randint(0, 3)):
            engine.step()
    engine.run()
    engine.require_complete()
    counters = engine.engine.status().counters
    assert counters.payload_bytes == sum(lower_bound(LAYOUT, len(j.token_ids) + 1, j.held) for j, _ in engine.jobs)
    assert counters.prefix_hits > 0


def test_a_job_whose_call_is_gone_stops_at_once() -> None:
    engine = Engine(max_batched_tokens=4)
    gone, other = engine.ask([0] * 40), engine.ask([1] * 10)
    engine.step()
    gone.cancel()
    sent = len(gone.pieces)
    engine.run()
    assert len(gone.pieces) == sent
    assert other.end is not None
    assert engine.engine.status().counters.requests_aborted == 1


def test_a_receiver_that_does_not_take_does_not_hold_up_others() -> None:
    engine = Engine(max_batched_tokens=4, max_staged_bytes=90)
    slow, other = engine.ask([0] * 30), engine.ask([1] * 30)
    slow.slow = True
    for _ in range(40):
        engine.step()
    assert other.end is not None
    assert slow.end is None
    # One chunk may have been under way when the limit was passed.
    assert slow.queued_bytes <= 90 + 4 * LAYOUT.bytes_per_token
    slow.slow = False
    engine.run()
    engine.require_complete()


def test_a_failed_step_ends_the_jobs_in_it_and_no_other() -> None:
    engine = Engine(max_running_requests=1)
    doomed, other = engine.ask([0] * 20), engine.ask([1] * 5)
    engine.runner.broken = True
    engine.step()
    engine.runner.broken = False
    engine.run()
    assert doomed.failure is not None
    assert doomed.failure.code is grpc.StatusCode.INTERNAL
    assert doomed.end is None
    assert other.end is not None


@pytest.mark.parametrize("tokens", [[VOCAB_SIZE], [0] * 128, [2**32 - 1]])
def test_a_prompt_that_cannot_be_computed_is_refused(tokens: list[int]) -> None:
    engine = Engine()
    stream = engine.ask(tokens)
    assert stream.failure is not None
    assert stream.failure.code is grpc.StatusCode.INVALID_ARGUMENT
    assert engine.engine.idle


def test_a_full_queue_is_busy_and_a_stop_is_told() -> None:
    engine = Engine(max_waiting_requests=2, max_running_requests=1)
    waiting = [engine.ask([0] * 40) for _ in range(2)]
    refused = engine.ask([0])
    assert refused.failure is not None
    assert refused.failure.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    engine.step()
    engine.engine.stop(engine.now)
    for stream in waiting:
        assert stream.failure is not None
        assert stream.failure.code is grpc.StatusCode.UNAVAILABLE
    assert engine.engine.idle
    assert engine.engine.status().held_blocks == 0
