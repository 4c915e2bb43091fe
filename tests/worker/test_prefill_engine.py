import random
from typing import Any

import grpc
import pytest

from kv_transfer.layout import Piece
from kv_transfer.plan import lacking, lower_bound
from kv_transfer.prefill_server import PrefillJob, RankStream, TransferName
from tests.worker.kept_stream import KeptStream
from tests.worker.scripted_runner import VOCAB_SIZE, ScriptedRunner, hybrid_layers, uniform_layers
from worker.config import EngineConfig, Role
from worker.events import DrainStarted, LoadWanted
from worker.outgoing_transfers import OutgoingTransfers
from worker.prefill_engine import PrefillEngine
from worker.ranks.rank import Rank
from worker.ranks.team import RankTeam
from worker.replica_load import ReplicaLoad


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
        pieces = {"min_piece_bytes": self.config.min_piece_bytes, "max_piece_bytes": self.config.max_piece_bytes}
        outgoing = OutgoingTransfers(self.runner, 0, 1, **pieces)  # type: ignore[arg-type]
        team = RankTeam(Rank(self.runner, outgoing))  # type: ignore[arg-type]
        self.engine = PrefillEngine(
            self.config,
            self.runner,  # type: ignore[arg-type]
            team,
            "prefill-1",
            lambda: 0,
            clock=lambda: self.now,
        )
        self.now = 0.0
        self.jobs: list[tuple[PrefillJob, KeptStream]] = []

    def ask(
        self,
        tokens: list[int],
        held: int = 0,
        *,
        salt: str = "",
        receivers: int = 1,
        priority: int = 0,
        seconds: float = 1000.0,
        arrived: float | None = None,
    ) -> KeptStream:
        """A prompt of one token more than ``tokens``, of which the receiver has the slots before ``held``."""
        stream = KeptStream()
        wanted = lacking(self.runner.layout, len(tokens) + 1, [held] * len(self.runner.layout.sections))
        name = TransferName("decode-1", "r", len(self.jobs) + 1)
        arrived = self.now if arrived is None else arrived
        job = PrefillJob(name, receivers, tuple(tokens), wanted, salt, seconds, stream, arrived, priority=priority)
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
            size = stream.require_everything(layout, job.lacking, job.token_ids, job.name.epoch)
            assert size == lower_bound(layout, job.lacking)


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


def test_a_prompt_says_how_long_it_waited_and_was_computed() -> None:
    engine = Engine(max_batched_tokens=4, max_running_requests=1)
    compute = engine.runner.execute

    def slowly(*arguments: Any) -> Any:
        engine.now += 0.25
        return compute(*arguments)

    engine.runner.execute = slowly  # type: ignore[method-assign]
    # The call came half a second before the engine had time for it.
    first = engine.ask(list(range(10)), arrived=-0.5)
    second = engine.ask([1] * 4)
    engine.run()
    # Steps begin a second apart and take a quarter: at 1, 2.25 and 3.5.
    assert first.end is not None
    assert (first.end.queue_seconds, first.end.compute_seconds) == (1.5, 2.75)
    assert second.end is not None
    assert (second.end.queue_seconds, second.end.compute_seconds) == (4.75, 0.25)


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
        min_piece_bytes=numbers.choice([0, 30, 1000]),
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


def test_every_rank_of_a_decode_replica_is_sent_what_it_holds_and_the_slowest_sets_the_pace() -> None:
    engine = Engine(max_batched_tokens=4, max_staged_bytes=90)
    first = engine.ask([0] * 30, receivers=2)
    for _ in range(10):
        engine.step()
    # The second rank's part waits for it.
    assert first.end is None
    assert sum(frame.payload.nbytes for frame in first.pieces) <= 90 + 4 * (4 + 8)
    late = KeptStream()
    ((job, _),) = engine.jobs
    engine.engine.handle(RankStream(job.name, 1, late), engine.now)
    engine.run()
    # Layers of one head, which both ranks hold.
    engine.require_complete()
    size = late.require_everything(engine.runner.layout, job.lacking, job.token_ids, job.name.epoch)
    assert engine.engine.status().counters.payload_bytes == 2 * size


def test_layers_leave_while_later_ones_are_computed() -> None:
    engine = Engine(max_batched_tokens=4, min_piece_bytes=0, max_piece_bytes=1000)
    gone, stream = engine.ask([1] * 2), engine.ask(list(range(8)))
    gone.cancel()
    engine.runner.broken = True
    engine.step()
    # The step has failed behind its first layer.
    assert gone.pieces == []
    assert [frame.piece for frame in stream.pieces] == [Piece(0, 0, 1, 0, 4)]
    assert stream.failure is not None


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


def test_prompts_go_by_priority() -> None:
    engine = Engine(max_running_requests=1)
    begun = engine.ask([0] * 20)
    engine.step()
    late, early = (engine.ask([1] * 20, priority=priority) for priority in (5, -5))
    done = []
    while not engine.engine.idle:
        engine.step()
        done += [stream for stream in (begun, late, early) if stream.end is not None and stream not in done]
    assert done == [begun, early, late]
    engine.require_complete()


def test_draining_finishes_prompts_and_is_busy_for_others() -> None:
    engine = Engine(max_batched_tokens=4)
    begun = engine.ask([0] * 20)
    engine.step()
    drained: list[bool] = []
    engine.engine.handle(DrainStarted(lambda: drained.append(True)), engine.now)
    late = engine.ask([1] * 20)
    assert late.failure is not None
    assert late.failure.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    engine.jobs.pop()
    engine.step()
    assert not drained
    assert engine.engine.status().load.draining
    engine.run()
    engine.step()
    assert drained
    assert begun.end is not None
    engine.require_complete()


def test_its_load_is_the_prompt_tokens_that_are_not_computed() -> None:
    engine = Engine(max_batched_tokens=4, max_running_requests=1)
    loads: list[ReplicaLoad] = []
    for _ in range(2):
        engine.ask([0] * 20)
    engine.engine.handle(LoadWanted(loads.append), engine.now)
    engine.step()
    engine.engine.handle(LoadWanted(loads.append), engine.now)
    engine.run()
    engine.engine.handle(LoadWanted(loads.append), engine.now)
    assert [load.queued_prompt_tokens for load in loads] == [40, 36, 0]


def test_a_full_queue_is_busy_and_a_stop_is_told() -> None:
    engine = Engine(max_waiting_requests=1, max_running_requests=1)
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


def test_a_prompt_that_has_waited_for_too_long_is_given_back() -> None:
    engine = Engine(max_running_requests=1, max_batched_tokens=2)
    engine.ask([1] * 20)
    late = engine.ask([2] * 20, seconds=3.0)
    engine.run()
    assert late.failure is not None
    assert late.failure.code is grpc.StatusCode.ABORTED
    assert "deadline" in late.failure.message
    engine.jobs.pop()
    engine.require_complete()
