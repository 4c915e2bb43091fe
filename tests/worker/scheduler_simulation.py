"""An engine without a model: drives a scheduler the way the engines do and checks every step from outside.

The simulated model's next token is a function of request, choice and position, so what a request must produce is known
from the start, however often it is preempted, transferred or forked on the way.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

from tests.worker.kv_cache.plans import full, owners
from tests.worker.shadow_pages import ShadowPages, lacking_slots, seen
from worker.config import EngineConfig, Role
from worker.kv_cache.block_table import NO_BLOCK
from worker.kv_cache.groups import CachePlan, longest_sequence, plan_cache
from worker.kv_cache.manager import KVCacheManager
from worker.kv_cache.specs import EveryToken, LastState
from worker.sampling_params import SamplingParams
from worker.scheduler import NO_PREFILL, FinishReason, PrefillCredit, Sampled, ScheduledRows, Scheduler, StepPlan
from worker.sequence import RequestId, Sequence, SequenceState

EOS = 3
ANY_NUMBER = PrefillCredit(reachable=True, streams=1 << 20)
LONGEST = 64
"""Tokens of the simulated model: where only a window is kept, memory sets no limit."""


def next_token(request_id: str, choice: int, position: int) -> int:
    """0 to 3, by hash."""
    return hashlib.sha256(f"{request_id} {choice} {position}".encode()).digest()[0] % 4


def expected_answer(prompt: list[int], sampling: SamplingParams, limit: int, name: str, choice: int) -> list[int]:
    """What one choice must generate under ``limit`` tokens in all."""
    answer: list[int] = []
    while len(answer) < sampling.max_tokens:
        answer.append(next_token(name, choice, len(prompt) + len(answer)))
        ends = len(answer) >= sampling.min_tokens and answer[-1] == EOS and not sampling.ignore_eos
        if ends or len(prompt) + len(answer) == limit:
            break
    return answer


@dataclass(slots=True)
class Asked:
    """A request and what has come of it."""

    prompt: list[int]
    sampling: SamplingParams
    choices: int
    answers: dict[int, list[int]] = field(default_factory=dict)
    prompt_rows: set[int] = field(default_factory=set)
    sent: dict[int, set[int]] = field(default_factory=dict)
    aborted: bool = False


class SchedulerSimulation:
    """One engine. ``settle`` runs it until everything is answered.

    ``plan`` says what its layers store: every token in blocks of ``block_size``, unless it says otherwise.
    """

    def __init__(
        self,
        role: Role,
        *,
        num_blocks: int,
        block_size: int = 1,
        plan: CachePlan | None = None,
        max_batched_tokens: int = 16,
        max_running_requests: int = 8,
        local_prefill_threshold: int = 0,
        prefix_caching: bool = True,
        checkpoint_blocks: int = 1,
    ) -> None:
        self.plan = plan if plan is not None else plan_cache(owners(full(block_size)), block_size)
        self.config = EngineConfig(
            model="",
            role=role,
            block_size=self.plan.base_block_size,
            max_batched_tokens=max_batched_tokens,
            max_running_requests=max_running_requests,
            local_prefill_threshold=local_prefill_threshold,
            prefix_caching=prefix_caching,
            token_timeout=math.inf,
        )
        self.cache = KVCacheManager(
            self.plan,
            num_blocks,
            prefix_caching=prefix_caching,
            max_chunk=max_batched_tokens,
            checkpoint_blocks=checkpoint_blocks,
        )
        self.num_blocks = num_blocks
        self.max_model_len = longest_sequence(self.plan, num_blocks, LONGEST, max_batched_tokens)
        self.scheduler = Scheduler(self.config, self.cache, self.max_model_len)
        self.pages = ShadowPages(self.plan)
        self.requests: dict[RequestId, Asked] = {}
        self.now = 0.0
        self._epoch = 0

    # What happens to the engine

    def ask(
        self,
        prompt: list[int],
        sampling: SamplingParams | None = None,
        *,
        choices: int = 1,
        salt: str = "",
        caller: str = "",
        priority: int = 0,
    ) -> RequestId:
        name = RequestId(f"request-{len(self.requests)}")
        sampling = sampling or SamplingParams()
        assert len(prompt) < self.max_model_len
        self.requests[name] = Asked(prompt, sampling, choices)
        self.scheduler.add(
            Sequence(
                request_id=name,
                choice=0,
                tokens=list(prompt),
                prompt_len=len(prompt),
                sampling=sampling,
                salt=salt,
                arrival=self.now,
                deadline=self.now + 1000.0,
                eos_token_ids=frozenset({EOS}),
                branches=choices,
                caller=caller,
                priority=priority,
            )
        )
        return name

    def abort(self, name: RequestId) -> None:
        self.requests[name].aborted = True
        self.scheduler.finish(self.scheduler.of_request(name))

    def complete_transfer(self, sequence: Sequence) -> None:
        self.pages.receive(sequence, lacking_slots(self.plan, sequence))
        self.scheduler.transfer_completed(sequence)

    def fail_transfer(self, sequence: Sequence, *, received: int, busy: bool = False) -> None:
        """End a transfer after some slots of each group have been written."""
        self.pages.receive(sequence, [slots[:received] for slots in lacking_slots(self.plan, sequence)])
        if busy:
            self.scheduler.transfer_refused(sequence)
        else:
            self.scheduler.transfer_failed(sequence)

    def step(
        self,
        credit: PrefillCredit = NO_PREFILL,
        paused: Collection[RequestId] = (),
        refuse: Collection[RequestId] = (),
    ) -> StepPlan:
        """One step of the engine; transfers of ``refuse`` find no peer after all."""
        self.now += 1.0
        running = [(sequence, sequence.pending) for sequence in self.scheduler.running]
        new = [sequence for sequence in self.scheduler.waiting if not sequence.admitted]
        plan = self.scheduler.schedule(self.now, credit, frozenset(paused))
        self._check_plan(plan, running, credit, paused)
        self._check_order(plan, new)
        self.pages.clear(plan.to_clear)
        for sequence in plan.transfers:
            if sequence.request_id in refuse:
                self.scheduler.transfer_refused(sequence)
        self._compute(plan)
        self.check()
        return plan

    def settle(self, limit: int = 3000) -> None:
        """Everything that was asked and not aborted is answered, in full and exactly."""
        for _ in range(limit):
            if self.scheduler.idle:
                break
            self.step(ANY_NUMBER)
            for sequence in list(self.scheduler.receiving):
                self.complete_transfer(sequence)
        assert self.scheduler.idle, f"not finished after {limit} steps"
        for name, request in self.requests.items():
            if not request.aborted:
                assert self.expected(name) == request.answers
        assert self.cache.counts().held == 0
        assert self.cache.pool.available == self.num_blocks, "something is still promised"

    def expected(self, name: RequestId) -> dict[int, list[int]]:
        request = self.requests[name]
        if self.config.role is Role.PREFILL:
            return {0: []}
        return {
            choice: expected_answer(request.prompt, request.sampling, self.max_model_len, name, choice)
            for choice in range(request.choices)
        }

    # What must hold

    def check(self) -> None:
        scheduler = self.scheduler
        live = list(scheduler.live())
        assert len({id(sequence) for sequence in live}) == len(live), "a sequence is in two queues"
        for queue, state in (
            (scheduler.waiting, SequenceState.WAITING),
            (scheduler.receiving, SequenceState.RECEIVING),
            (scheduler.running, SequenceState.RUNNING),
        ):
            for sequence in queue:
                assert sequence.state is state
                assert (state is SequenceState.WAITING) == (not sequence.tables)
        for sequence in live:
            request = self.requests[sequence.request_id]
            assert not request.aborted
            assert sequence.choice not in request.answers
            assert sequence.tokens == request.prompt + [
                next_token(sequence.request_id, sequence.choice, position)
                for position in range(len(request.prompt), len(sequence.tokens))
            ], "a token was lost"
            if sequence.state is SequenceState.RUNNING:
                self.pages.require(sequence, sequence.computed)
            elif sequence.state is SequenceState.RECEIVING:
                self.pages.require_held(sequence)
        self.cache.pool.check()
        assert self.cache.counts().held == len(self._holders())

    def _holders(self) -> Counter[int]:
        return Counter(b for sequence in self.scheduler.live() for table in sequence.tables for b in table.held())

    def _check_plan(
        self,
        plan: StepPlan,
        running: list[tuple[Sequence, int]],
        credit: PrefillCredit,
        paused: Collection[RequestId],
    ) -> None:
        scheduler = self.scheduler
        budget = self.config.max_batched_tokens
        decodes = [
            s
            for s, pending in running
            if pending == 1 and s.state is SequenceState.RUNNING and s.request_id not in paused
        ]
        assert [row.sequence for row in plan.rows[: len(decodes)]] == decodes, "decodes come first, all of them"
        chunk_rows = sum(row.rows for row in plan.rows[len(decodes) :])
        assert chunk_rows <= max(0, budget - len(decodes))
        scheduled = [row.sequence for row in plan.rows]
        assert len(set(scheduled)) == len(scheduled)
        left_out = [s for s in scheduler.running if s.pending and s not in scheduled and s.request_id not in paused]
        assert not left_out or chunk_rows + len(decodes) >= budget, "there was room for more"

        held = self._holders()
        logit_rows = 0
        draws = []
        for row in plan.rows:
            sequence = row.sequence
            assert sequence.state is SequenceState.RUNNING
            assert row.first == sequence.computed
            assert 1 <= row.rows <= sequence.pending
            for block in self._written(sequence, row.first, row.first + row.rows):
                assert block != NO_BLOCK
                assert held[block] == 1, "a block that others use is written to"
            last = row.rows == sequence.pending
            if self.config.role is Role.PREFILL:
                assert row.logit_rows == 0
            elif sequence.wants_prompt_logprobs:
                assert row.logit_rows == row.rows
            else:
                assert row.logit_rows == last
            self._check_contents(row)
            logit_rows += row.logit_rows
            if last and self.config.role is not Role.PREFILL and sequence.sampling.max_tokens:
                choices = range(sequence.choice, sequence.choice + sequence.branches)
                draws += [(logit_rows - 1, sequence, choice) for choice in choices]
        assert [(draw.row, draw.sequence, draw.choice) for draw in plan.draws] == draws
        assert [(told.first, told.rows) for told in plan.compute.rows] == [(row.first, row.rows) for row in plan.rows]

        if plan.admitted:
            assert len(scheduler.running) + len(scheduler.receiving) <= self.config.max_running_requests
        assert len(plan.transfers) <= credit.streams
        for sequence in plan.transfers:
            assert credit.reachable
            assert self.config.role is Role.DECODE
            assert sequence in scheduler.receiving
            last = len(sequence.tokens) - 1
            if all(isinstance(group.retention, EveryToken) for group in self.plan.groups):
                assert last - sequence.computed > self.config.local_prefill_threshold
            assert last > self.config.local_prefill_threshold
            assert any(lacking_slots(self.plan, sequence)), "a transfer of nothing"
            for group, table in zip(self.plan.groups, sequence.tables, strict=True):
                if group.block_size:
                    assert len(table.blocks) * group.block_size > len(sequence.tokens), "no room for the first token"
            assert sequence.epoch > self._epoch
            self._epoch = sequence.epoch

    def _check_order(self, plan: StepPlan, new: list[Sequence]) -> None:
        """A caller's new requests are admitted by priority, equal ones as they came; ``new`` waited before the step."""
        admitted = [sequence for sequence in plan.admitted if sequence in new]
        for index, sequence in enumerate(admitted):
            later = [*admitted[index + 1 :], *(other for other in new if other not in admitted)]
            arrivals = list(self.requests)
            for other in later:
                if other.caller == sequence.caller:
                    mine, others = ((s.priority, arrivals.index(s.request_id)) for s in (sequence, other))
                    assert mine < others, "out of turn"

    def _check_contents(self, row: ScheduledRows) -> None:
        """Ranks, which know nothing of sequences, are told all that a step needs of one."""
        told, sequence = row.contents, row.sequence
        end = row.first + row.rows
        assert (told.first, told.rows, told.context, told.logit_rows) == (row.first, row.rows, end, row.logit_rows)
        assert told.token_ids.tolist() == sequence.tokens[row.first : end]
        assert [table.tolist() for table in told.tables] == [table.blocks for table in sequence.tables]

    def _written(self, sequence: Sequence, begin: int, end: int) -> set[int]:
        """The blocks that computing tokens ``[begin, end)`` writes to."""
        written = set()
        for group, table in zip(self.plan.groups, sequence.tables, strict=True):
            if isinstance(group.retention, LastState):
                written.add(table.blocks[1])
            else:
                written |= {table.blocks[token // group.block_size] for token in range(begin, end)}
        return written

    def _compute(self, plan: StepPlan) -> None:
        for row in plan.rows:
            self.pages.write(row.sequence, row.first, row.first + row.rows)
            if row.sequence.wants_prompt_logprobs:
                self._take_prompt_logprobs(row.sequence, range(row.first, row.first + row.rows))
        tokens = [next_token(d.sequence.request_id, d.choice, len(d.sequence.tokens)) for d in plan.draws]
        committed = self.scheduler.commit(plan, tokens, self.now)
        for copy in committed.copies:
            self.pages.copy(copy)
        assert [s.token for s in committed.sampled] == tokens
        for sampled in committed.sampled:
            self._finished(sampled)
        for sequence in {*plan.admitted, *(row.sequence for row in plan.rows)}:
            if self.config.role is Role.PREFILL and sequence.state is SequenceState.RUNNING:
                self._send(sequence)
            wants_no_token = self.config.role is Role.PREFILL or not sequence.sampling.max_tokens
            if wants_no_token and sequence.state is SequenceState.RUNNING and not sequence.pending:
                self.scheduler.finish([sequence])
                for choice in range(sequence.branches):
                    self.requests[sequence.request_id].answers[choice] = []

    def _send(self, sequence: Sequence) -> None:
        """What a decode replica that holds nothing needs leaves as soon as it is computed, if it is still there."""
        sent = self.requests[sequence.request_id].sent
        prompt = len(sequence.tokens)
        for index, group in enumerate(self.plan.groups):
            before = sent.setdefault(index, set())
            if isinstance(group.retention, LastState):
                if not sequence.pending:
                    self.pages.require_state(sequence, index, prompt)
                continue
            ready = {token for token in seen(group, prompt) if token < sequence.computed} - before
            self.pages.require_tokens(sequence, index, sorted(ready))
            before |= ready
            assert sequence.pending or before == set(seen(group, prompt))

    def _take_prompt_logprobs(self, sequence: Sequence, rows: range) -> None:
        request = self.requests[sequence.request_id]
        if not rows.start:
            request.prompt_rows = set()
        request.prompt_rows |= set(rows)
        if rows.stop >= sequence.prompt_len:
            assert request.prompt_rows >= set(range(sequence.prompt_len)), "a prompt token's row had no logits"
            sequence.prompt_reported = True

    def _finished(self, sampled: Sampled) -> None:
        sequence = sampled.sequence
        answer = sequence.tokens[sequence.prompt_len :]
        if sampled.reason is FinishReason.MORE:
            assert sequence.state in (SequenceState.RUNNING, SequenceState.WAITING)
            return
        assert (sampled.reason is FinishReason.STOP) == (
            answer[-1] == EOS and len(answer) >= sequence.sampling.min_tokens and not sequence.sampling.ignore_eos
        )
        assert sequence.state is SequenceState.FINISHED
        assert not sequence.tables
        self.requests[sequence.request_id].answers[sequence.choice] = answer
