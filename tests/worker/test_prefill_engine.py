import random
from itertools import product
from typing import Any

import grpc
import pytest

from kv_transfer.frame import EndFrame, PieceFrame
from kv_transfer.outgoing_stream import OutgoingStream, StreamFailure
from kv_transfer.plan import lacking, lower_bound
from kv_transfer.prefill_server import PrefillJob
from tests.worker.scripted_runner import VOCAB_SIZE, ScriptedRunner, hybrid_layers, uniform_layers
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

    def __init__(
        self,
        *,
        num_blocks: int = 32,
        block_size: int = 4,
        hybrid: bool = False,
        prefix_tokens: tuple[int, ...] = (),
        **config: Any,
    ) -> None:
        settings = {"max_batched_tokens": 16, "max_piece_bytes": 60, "block_size": block_size, **config}
        self.config = EngineConfig(model="", role=Role.PREFILL, **settings)
        layers = hybrid_layers(block_size) if hybrid else uniform_layers(block_size)
        self.runner = ScriptedRunner(self.config, num_blocks, layers=layers, prefix_tokens=prefix_tokens)
        self.engine = PrefillEngine(self.config, self.runner, "prefill-1", lambda: 0)  # type: ignore[arg-type]
        self.now = 0.0
        self.jobs: list[tuple[PrefillJob, Stream]] = []

    def ask(self, tokens: list[int], held: int = 0, *, salt: str = "") -> Stream:
        """A prompt of one token more than ``tokens``, of which the receiver has the slots before ``held``."""
        stream = Stream()
        wanted = lacking(self.runner.layout, len(tokens) + 1, [held] * len(self.runner.layout.sections))
        job = PrefillJob("r", len(self.jobs) + 1, tuple(tokens), wanted, salt, 60.0, stream)
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
        layout = self.runner.layout
        for job, stream in self.jobs:
            missing = {
                slot
                for index, (section, slots) in enumerate(zip(layout.sections, job.lacking, strict=True))
                for slot in product([index], range(len(section.owners)), range(slots.begin, slots.end))
            }
            sent: set[tuple[int, int, int]] = set()
            size = 0
            for frame in stream.pieces:
                piece = frame.piece
                assert frame.epoch == job.epoch
                assert frame.payload.nbytes == piece.payload_bytes(layout)
                layers = range(piece.layer_begin, piece.layer_end)
                slots = set(product([piece.section], layers, range(piece.slot_begin, piece.slot_end)))
                assert not slots & sent
                assert slots <= missing
                sent |= slots
                size += frame.payload.nbytes
            assert sent == missing
            assert size == lower_bound(layout, job.lacking)
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
        reached.append([(frame.piece.slot_begin, frame.piece.slot_end) for frame in stream.pieces])
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


def test_a_window_is_sent_from_where_it_begins_and_a_state_once_at_the_end() -> None:
    engine = Engine(hybrid=True, max_batched_tokens=4, max_piece_bytes=1000, num_blocks=64)
    stream = engine.ask(list(range(10)))
    steps = []
    while stream.end is None:
        before = len(stream.pieces)
        engine.step()
        pieces = [frame.piece for frame in stream.pieces[before:]]
        steps.append([(piece.section, piece.slot_begin, piece.slot_end) for piece in pieces])
    # The last of 11 tokens sees, of the ten before, all, the last four, the first two with the last two; and a state.
    every, last_four, first_two, last_two, state = range(5)
    assert steps == [
        [(every, 0, 4), (first_two, 0, 2)],
        [(every, 4, 8), (last_four, 6, 8)],
        [(every, 8, 10), (last_four, 8, 10), (last_two, 8, 10), (state, 0, 1)],
    ]
    engine.run()
    engine.require_complete()


@pytest.mark.parametrize("hybrid", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_payload_is_the_lower_bound_whatever_is_cached_held_or_batched(seed: int, hybrid: bool) -> None:
    numbers = random.Random(seed)
    engine = Engine(
        num_blocks=90 if hybrid else 14,
        block_size=3,
        max_batched_tokens=numbers.randint(1, 20),
        max_running_requests=4,
        state_checkpoint_blocks=1,
        hybrid=hybrid,
    )
    for _ in range(30):
        tokens = [numbers.randint(0, 1) for _ in range(numbers.randint(1, 20))]
        engine.ask(tokens, numbers.randrange(len(tokens)), salt=numbers.choice(["", "tenant"]))
        for _ in range(numbers.randint(0, 3)):
            engine.step()
    engine.run()
    engine.require_complete()
    counters = engine.engine.status().counters
    assert counters.payload_bytes == sum(lower_bound(engine.runner.layout, job.lacking) for job, _ in engine.jobs)
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
    assert slow.queued_bytes <= 90 + 4 * (4 + 8)
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


@pytest.mark.parametrize("tokens", [[1, 2, 3], [31, 2, 3], [2, 31, 30]])
def test_a_prompt_without_the_models_own_first_tokens_is_refused(tokens: list[int]) -> None:
    engine = Engine(prefix_tokens=(31, 30))
    stream = engine.ask(tokens)
    assert stream.failure is not None
    assert stream.failure.code is grpc.StatusCode.INVALID_ARGUMENT
    good = engine.ask([31, 30, *tokens])
    engine.run()
    assert good.end is not None


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
