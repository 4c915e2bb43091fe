from typing import Any, ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tests.worker.kv_cache.plans import full, owners, small_plans, state, window
from tests.worker.scheduler_simulation import ANY_NUMBER, EOS, SchedulerSimulation, next_token
from tests.worker.shadow_pages import lacking_slots
from worker.config import Role
from worker.kv_cache.block_table import NO_BLOCK
from worker.kv_cache.groups import plan_cache
from worker.kv_cache.specs import KVCacheSpec
from worker.sampling_params import SamplingParams
from worker.scheduler import MAX_TRANSFER_ATTEMPTS, NO_PREFILL, PrefillCredit
from worker.sequence import RequestId, SequenceState

ENDLESS = SamplingParams(max_tokens=100, ignore_eos=True)
CREDITS = st.sampled_from([ANY_NUMBER, *(PrefillCredit(True, streams) for streams in range(3)), NO_PREFILL])


class SchedulerMachine(RuleBasedStateMachine):
    """Anything may happen to an engine at any time; the simulation checks every step, and in the end every answer."""

    role: ClassVar[Role]

    @initialize(data=st.data())
    def start(self, data: st.DataObject) -> None:
        seats = data.draw(st.integers(1, 5), "seats")
        budget = data.draw(st.integers(1, 9), "token budget")
        plan = data.draw(small_plans())
        # Room for three tokens, and for a checkpoint beside every state.
        least = plan.blocks_held(3, budget) + len(plan.groups)
        self.engine = SchedulerSimulation(
            self.role,
            plan=plan,
            num_blocks=least + data.draw(st.integers(0, 8), "blocks"),
            max_batched_tokens=budget,
            max_running_requests=seats,
            local_prefill_threshold=data.draw(st.sampled_from([0, 0, 2]), "threshold"),
            prefix_caching=data.draw(st.booleans(), "prefix caching"),
            checkpoint_blocks=data.draw(st.integers(1, 2), "checkpoint blocks"),
        )
        self.seats = seats

    @rule(
        data=st.data(),
        salt=st.sampled_from(["", "", "", "tenant"]),
        caller=st.sampled_from(["", "", "other"]),
        priority=st.sampled_from([0, 0, -1, 1]),
    )
    def ask(self, data: st.DataObject, salt: str, caller: str, priority: int) -> None:
        longest = min(12, self.engine.max_model_len - 1)
        prompt = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=longest), "prompt")
        choices = 1 if self.role is Role.PREFILL else data.draw(st.integers(1, min(3, self.seats)), "choices")
        logprobs = None if self.role is Role.PREFILL else data.draw(st.sampled_from([None, None, None, 0]), "logprobs")
        max_tokens = data.draw(st.integers(1 if logprobs is None else 0, 9), "max_tokens")
        sampling = SamplingParams(
            max_tokens=max_tokens,
            min_tokens=data.draw(st.integers(0, max_tokens), "min_tokens"),
            ignore_eos=data.draw(st.booleans(), "ignore_eos"),
            prompt_logprobs=logprobs,
        )
        self.engine.ask(prompt, sampling, choices=choices, salt=salt, caller=caller, priority=priority)

    @rule(data=st.data(), credits=st.lists(CREDITS, min_size=1, max_size=4))
    def run(self, data: st.DataObject, credits: list[PrefillCredit]) -> None:
        for credit in credits:
            names = [sequence.request_id for sequence in self.engine.scheduler.live()]
            nobody: st.SearchStrategy[set[RequestId]] = st.just(set())
            some = nobody | st.sets(st.sampled_from(names)) if names else nobody
            paused = data.draw(some, "paused") if self.role is Role.PREFILL else set()
            refuse = data.draw(some, "refused") if self.role is Role.DECODE else set()
            self.engine.step(credit, paused, refuse)

    @precondition(lambda self: len(list(self.engine.scheduler.live())) > 1)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        live = list(self.engine.scheduler.live())
        self.engine.abort(live[data.draw(st.integers(0, len(live) - 1), "which")].request_id)
        self.engine.check()

    @precondition(lambda self: self.engine.scheduler.receiving)
    @rule(data=st.data())
    def end_transfers(self, data: st.DataObject) -> None:
        for sequence in list(self.engine.scheduler.receiving):
            end = data.draw(st.sampled_from(["complete", "fail", "busy", "later"]), "end")
            if end == "complete":
                self.engine.complete_transfer(sequence)
            elif end != "later":
                received = data.draw(st.integers(0, 6), "received")
                self.engine.fail_transfer(sequence, received=received, busy=end == "busy")
            self.engine.check()

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            self.engine.settle()


class _Colocated(SchedulerMachine):
    role = Role.COLOCATED


class _Decode(SchedulerMachine):
    role = Role.DECODE


class _Prefill(SchedulerMachine):
    role = Role.PREFILL


TestColocated = _Colocated.TestCase
TestDecode = _Decode.TestCase
TestPrefill = _Prefill.TestCase
TestColocated.settings = settings(max_examples=70, stateful_step_count=25, deadline=None)
TestDecode.settings = settings(max_examples=150, stateful_step_count=25, deadline=None)
TestPrefill.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)


def test_a_prompt_is_computed_in_chunks_that_leave_room_for_decodes() -> None:
    engine = SchedulerSimulation(Role.COLOCATED, num_blocks=32, block_size=4, max_batched_tokens=8)
    engine.ask([1, 2], ENDLESS)
    engine.step()
    engine.ask(list(range(20)), ENDLESS)
    chunks = [[(row.first, row.rows) for row in engine.step().rows] for _ in range(4)]
    assert chunks == [[(2, 1), (0, 7)], [(3, 1), (7, 7)], [(4, 1), (14, 6)], [(5, 1), (20, 1)]]


def test_the_last_to_be_admitted_is_preempted_and_comes_back_first() -> None:
    engine = SchedulerSimulation(Role.COLOCATED, num_blocks=4, block_size=2, prefix_caching=False)
    first, second = (engine.ask([token] * 3, SamplingParams(max_tokens=5, ignore_eos=True)) for token in (0, 1))
    third = engine.ask([2] * 3, SamplingParams(max_tokens=5, ignore_eos=True))
    engine.step()
    assert [s.request_id for s in engine.scheduler.running] == [first, second]
    while not engine.scheduler.preemptions:
        engine.step()
    assert [s.request_id for s in engine.scheduler.running] == [first]
    assert {s.request_id for s in engine.scheduler.waiting} == {second, third}
    assert engine.scheduler.waiting.head.request_id == second
    assert engine.scheduler.waiting.head.generated > 0
    engine.settle()


def test_the_lowest_priority_is_preempted() -> None:
    engine = SchedulerSimulation(Role.COLOCATED, num_blocks=6, block_size=2, prefix_caching=False)
    answer = SamplingParams(max_tokens=6, ignore_eos=True)
    least, *others = (engine.ask([token] * 3, answer, priority=p) for token, p in ((0, 5), (1, -5), (2, 0)))
    while not engine.scheduler.preemptions:
        engine.step()
    assert [s.request_id for s in engine.scheduler.waiting] == [least]
    assert {s.request_id for s in engine.scheduler.running} == set(others)
    engine.settle()


def test_nobodys_priority_has_others_preempted() -> None:
    engine = SchedulerSimulation(Role.COLOCATED, num_blocks=4, block_size=2, prefix_caching=False)
    answer = SamplingParams(max_tokens=5, ignore_eos=True)
    first = engine.ask([0] * 3, answer, caller="modest", priority=100)
    later = engine.ask([1] * 3, answer, caller="loud", priority=-100)
    while not engine.scheduler.preemptions:
        engine.step()
    assert [s.request_id for s in engine.scheduler.waiting] == [later]
    assert [s.request_id for s in engine.scheduler.running] == [first]
    engine.settle()


def test_a_preempted_sequence_finds_its_own_blocks_again() -> None:
    # Room for the two answers one after the other, not side by side; blocks of the preempted one survive in the cache.
    engine = SchedulerSimulation(Role.COLOCATED, num_blocks=8, block_size=2)
    engine.ask([0] * 3, SamplingParams(max_tokens=6, ignore_eos=True))
    engine.ask([1] * 5, SamplingParams(max_tokens=7, ignore_eos=True))
    engine.settle()
    assert engine.scheduler.preemptions > 0
    assert engine.scheduler.prefix_hits > 0


@pytest.mark.parametrize("prompt_len", [4, 5])
def test_choices_share_their_prompts_full_blocks(prompt_len: int) -> None:
    engine = SchedulerSimulation(Role.COLOCATED, num_blocks=16, block_size=4)
    engine.ask([1] * prompt_len, SamplingParams(max_tokens=3, ignore_eos=True), choices=3)
    engine.step()
    assert engine.cache.counts().held == 1 + 3
    first = engine.step()
    assert [(row.first, row.rows) for row in first.rows] == [(prompt_len, 1)] * 3
    engine.settle()


def test_choices_without_room_are_computed_later() -> None:
    engine = SchedulerSimulation(Role.COLOCATED, num_blocks=3, block_size=2, prefix_caching=False)
    engine.ask([1, 1, 1], SamplingParams(max_tokens=3, ignore_eos=True), choices=3)
    engine.step()
    assert [s.choice for s in engine.scheduler.waiting] == [2]
    engine.settle()


def test_a_failed_transfer_leaves_nothing_in_the_prefix_cache() -> None:
    engine = SchedulerSimulation(Role.DECODE, num_blocks=8, block_size=2)
    engine.ask([1] * 7)
    engine.step(ANY_NUMBER)
    (sequence,) = engine.scheduler.receiving
    engine.fail_transfer(sequence, received=5)
    assert engine.cache.counts().cached == 0
    engine.settle()


def test_after_too_many_failures_the_prompt_is_computed_here() -> None:
    engine = SchedulerSimulation(Role.DECODE, num_blocks=8, block_size=2)
    name = engine.ask([1] * 5, SamplingParams(max_tokens=2, ignore_eos=True))
    for attempt in range(MAX_TRANSFER_ATTEMPTS):
        # A peer that is only busy does not use up an attempt.
        for busy in (True, True, False):
            engine.step(ANY_NUMBER)
            (sequence,) = engine.scheduler.receiving
            assert sequence.transfer_attempts == attempt
            engine.fail_transfer(sequence, received=2, busy=busy)
    plan = engine.step(ANY_NUMBER)
    assert not plan.transfers
    assert [row.rows for row in plan.rows] == [5]
    engine.settle()
    assert engine.requests[name].answers == {0: [next_token(name, 0, 5), next_token(name, 0, 6)]}


def test_without_credit_a_prompt_waits_and_holds_nothing() -> None:
    engine = SchedulerSimulation(Role.DECODE, num_blocks=8, block_size=2)
    engine.ask([1] * 5)
    engine.ask([0] * 5)
    assert not engine.step(PrefillCredit(reachable=True, streams=0)).admitted
    assert engine.cache.counts().held == 0
    assert len(engine.step(PrefillCredit(reachable=True, streams=1)).transfers) == 1
    # No replica at all: better slow than never.
    assert [row.rows for row in engine.step(NO_PREFILL).rows] == [5]
    engine.settle()


def test_a_queue_knows_what_it_waits_for() -> None:
    engine = SchedulerSimulation(Role.DECODE, num_blocks=8, block_size=2, max_running_requests=3)
    for _ in range(4):
        engine.ask([1] * 5)
    scheduler = engine.scheduler
    engine.step(PrefillCredit(reachable=True, streams=1))
    assert (len(scheduler.receiving), scheduler.awaits_prefill) == (1, True)
    # The second gets the last blocks: now it is those that the others wait for.
    engine.step(ANY_NUMBER)
    assert (len(scheduler.receiving), scheduler.awaits_prefill) == (2, False)
    engine.settle()
    assert not scheduler.awaits_prefill


@pytest.mark.parametrize(("prompt_len", "transferred"), [(1, False), (2, False), (4, False), (5, True)])
def test_short_suffixes_are_computed_here(prompt_len: int, transferred: bool) -> None:
    engine = SchedulerSimulation(Role.DECODE, num_blocks=8, block_size=2, local_prefill_threshold=3)
    engine.ask([1] * prompt_len)
    assert bool(engine.step(ANY_NUMBER).transfers) == transferred
    engine.settle()


def test_a_prefix_that_is_held_is_not_transferred_again() -> None:
    engine = SchedulerSimulation(Role.DECODE, num_blocks=16, block_size=2)
    engine.ask([1] * 7)
    engine.settle()
    engine.ask([1] * 7)
    plan = engine.step(ANY_NUMBER)
    assert not plan.transfers  # six of seven are held, the seventh is a decode step
    engine.ask([1] * 9)
    (sequence,) = engine.step(ANY_NUMBER).transfers
    assert (sequence.computed, len(sequence.tokens) - 1) == (6, 8)
    engine.settle()


def test_a_prefill_replica_computes_every_token_that_it_was_given_and_no_logits() -> None:
    engine = SchedulerSimulation(Role.PREFILL, num_blocks=8, block_size=2, max_batched_tokens=3)
    engine.ask([1] * 5)
    assert [[(row.rows, row.logit_rows) for row in engine.step().rows] for _ in range(2)] == [[(3, 0)], [(2, 0)]]
    engine.ask([1] * 4)
    plan = engine.step()
    # The whole prompt is cached: it is admitted only to be sent.
    assert not plan.rows
    assert [sequence.cached_tokens for sequence in plan.admitted] == [4]
    engine.settle()


def test_a_paused_prompt_lets_others_pass() -> None:
    engine = SchedulerSimulation(Role.PREFILL, num_blocks=16, block_size=2, max_batched_tokens=4)
    slow, other = engine.ask([0] * 9), engine.ask([1] * 9)
    engine.step()
    assert [row.sequence.request_id for row in engine.step(paused={slow}).rows] == [other]
    engine.settle()


def test_min_tokens_only_delays_the_end() -> None:
    engine = SchedulerSimulation(Role.COLOCATED, num_blocks=32, block_size=4)
    names = [engine.ask([1], SamplingParams(max_tokens=40, min_tokens=minimum)) for minimum in (0, 10)]
    engine.settle()
    short, long = (engine.requests[name].answers[0] for name in names)
    assert short[-1] == long[-1] == EOS
    assert EOS not in short[:-1]
    assert EOS not in long[9:-1]
    assert len(long) >= 10


def test_an_answer_ends_where_the_model_does() -> None:
    engine = SchedulerSimulation(Role.COLOCATED, num_blocks=3, block_size=4)
    name = engine.ask([1] * 4, ENDLESS)
    engine.settle()
    assert len(engine.requests[name].answers[0]) == 12 - 4


def test_expired_and_aborted_sequences_hold_nothing_at_once() -> None:
    engine = SchedulerSimulation(Role.DECODE, num_blocks=12, block_size=2, max_running_requests=2)
    running = engine.ask([1], ENDLESS)
    engine.step(ANY_NUMBER)
    receiving = engine.ask([0] * 5)
    engine.step(ANY_NUMBER)
    waiting = engine.ask([1] * 5)
    engine.step(ANY_NUMBER)
    by_name = {sequence.request_id: sequence for sequence in engine.scheduler.live()}
    assert [by_name[name].state for name in (running, receiving, waiting)] == [
        SequenceState.RUNNING,
        SequenceState.RECEIVING,
        SequenceState.WAITING,
    ]
    assert engine.scheduler.expired(999.0) == []
    assert {s.request_id for s in engine.scheduler.expired(1000.0)} == {running}
    assert {s.request_id for s in engine.scheduler.expired(1002.0)} == set(by_name)
    for name in by_name:
        engine.abort(name)
    assert engine.scheduler.idle
    assert engine.cache.counts().held == 0
    assert {sequence.state for sequence in by_name.values()} == {SequenceState.FINISHED}


def test_the_queue_says_when_it_is_full() -> None:
    engine = SchedulerSimulation(Role.COLOCATED, num_blocks=4, block_size=2, max_running_requests=2)
    scheduler, limit = engine.scheduler, engine.config.max_waiting_requests

    def fill() -> int:
        before = len(engine.requests)
        while not scheduler.full:
            engine.ask([1] * 3, ENDLESS)
        return len(engine.requests) - before

    # Those who find a free seat in the next step do not count.
    assert fill() == limit + 2
    engine.step()
    assert fill() == 0
    engine.abort(scheduler.running[0].request_id)
    assert fill() == 1


def test_seats_without_memory_do_not_make_the_queue_longer() -> None:
    engine = SchedulerSimulation(Role.COLOCATED, num_blocks=3, block_size=2, max_running_requests=8)
    for _ in range(3):
        engine.ask([1] * 3, ENDLESS)
    engine.step()
    assert len(engine.scheduler.running) == 1
    assert engine.scheduler.queue_limit == engine.config.max_waiting_requests
    for name in list(engine.requests):
        engine.abort(name)


# Models whose layers keep different things


def hybrid(*kinds: KVCacheSpec, **settings: Any) -> SchedulerSimulation:
    return SchedulerSimulation(plan=plan_cache(owners(*kinds), 2), **settings)


def test_a_prompt_may_be_longer_than_the_memory_of_its_windows() -> None:
    engine = hybrid(window(2, 4), role=Role.COLOCATED, num_blocks=5, max_batched_tokens=4)
    name = engine.ask([1] * 40, SamplingParams(max_tokens=9, ignore_eos=True))
    engine.settle()
    assert len(engine.requests[name].answers[0]) == 9
    assert engine.scheduler.preemptions == 0


def test_no_layer_of_a_step_misses_what_the_next_step_no_longer_sees() -> None:
    engine = hybrid(full(2), window(2, 4), role=Role.COLOCATED, num_blocks=32, max_batched_tokens=6)
    engine.ask([1] * 16, ENDLESS)
    engine.step()
    plan = engine.scheduler.schedule(engine.now)
    (row,) = plan.rows
    assert (row.first, row.rows) == (6, 6)
    # The first of these rows, at 6, sees 3 to 5 whenever in the step a layer looks.
    _, sliding = row.sequence.tables
    assert NO_BLOCK not in sliding.blocks[3 // 2 :]
    engine.pages.write(row.sequence, row.first, row.first + row.rows)
    engine.scheduler.commit(plan, [], engine.now)
    # The row at 12 sees 9 to 11.
    assert [block == NO_BLOCK for block in sliding.blocks] == [True] * 4 + [False] * 2


def test_steps_end_where_a_state_is_kept() -> None:
    engine = hybrid(full(2), state(1), role=Role.COLOCATED, num_blocks=32, checkpoint_blocks=3)
    engine.ask([1] * 15, ENDLESS)
    assert [engine.step().rows[0].rows for _ in range(3)] == [6, 6, 3]
    engine.ask([1] * 15)
    (_, again) = engine.step().rows
    assert again.first == again.sequence.cached_tokens == 12


def test_without_a_prefix_cache_no_state_is_kept() -> None:
    engine = hybrid(full(2), state(1), role=Role.COLOCATED, num_blocks=32, prefix_caching=False)
    engine.ask([1] * 15, ENDLESS)
    assert engine.step().rows[0].rows == 15
    assert engine.cache.counts().cached == 0


def test_a_state_is_received_even_if_every_token_is_held() -> None:
    engine = hybrid(full(2), state(1), role=Role.DECODE, num_blocks=32, checkpoint_blocks=4)
    engine.ask([1] * 5, SamplingParams(max_tokens=1))
    engine.settle()
    engine.ask([1] * 5, SamplingParams(max_tokens=1))
    (sequence,) = engine.step(ANY_NUMBER).transfers
    assert lacking_slots(engine.plan, sequence) == [[], [0]]
    assert sequence.cached_tokens == 4
    engine.settle()


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_a_transfer_of_nothing_is_complete_at_once(prefix_caching: bool) -> None:
    """The last token of a window of one sees no other, and nobody is asked for what nobody sees."""
    engine = hybrid(window(2, 1), role=Role.DECODE, num_blocks=16, prefix_caching=prefix_caching)
    name = engine.ask([1] * 8, SamplingParams(max_tokens=3, ignore_eos=True))
    plan = engine.step(PrefillCredit(reachable=True, streams=0))
    assert not plan.transfers
    assert [(row.first, row.rows) for row in plan.rows] == [(7, 1)]
    assert plan.admitted[0].cached_tokens == 0
    assert engine.scheduler.local_prefills == 0
    engine.settle()
    assert len(engine.requests[name].answers[0]) == 3


def test_what_is_held_in_smaller_blocks_than_a_prefix_ends_in_is_not_asked_for_again() -> None:
    engine = hybrid(full(2, width=2), window(2, 1), role=Role.DECODE, num_blocks=32)
    assert [group.block_size for group in engine.plan.groups] == [2, 4]
    engine.ask([1] * 7, SamplingParams(max_tokens=1))
    engine.settle()
    engine.ask([1] * 7, SamplingParams(max_tokens=1))
    plan = engine.step(ANY_NUMBER)
    assert not plan.transfers
    assert [(row.first, row.rows) for row in plan.rows] == [(6, 1)]
    engine.settle()


def test_choices_go_on_from_one_state() -> None:
    engine = hybrid(full(2), window(2, 3), state(1), role=Role.COLOCATED, num_blocks=32)
    engine.ask([1] * 5, SamplingParams(max_tokens=6, ignore_eos=True), choices=3)
    engine.settle()
