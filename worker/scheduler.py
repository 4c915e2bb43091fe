"""The scheduler: decides, step by step, which tokens of which sequences are computed and who holds blocks.

One per engine, used from the engine's thread only. It does no I/O and reads no clock: events and ``now`` come in, plans
and changed sequences go out, so that a simulation drives the same code.

A step serves sequences in three passes. Decodes first, one token each, so that a long prompt never delays them by more
than its chunk; then prompts that have begun, a chunk each within the token budget; then new admissions, in the order of
the waiting queue. A sequence that finds no block preempts another that is not yet part of the step: of the caller whose
sequence was admitted last, the one of the lowest priority.
"""

import math
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from enum import Enum, auto

import numpy as np

from worker.config import EngineConfig, Role
from worker.kv_cache.block_pool import BlockId
from worker.kv_cache.group_blocks import BlockCopy
from worker.kv_cache.manager import KVCacheManager
from worker.queue_pace import QueuePace
from worker.ranks.commands import Compute, SequenceRows
from worker.sequence import Epoch, RequestId, Sequence, SequenceState
from worker.waiting_queue import GENERATED_TOKEN_COST, WaitingQueue

MAX_TRANSFER_ATTEMPTS = 3
# Logits of every prompt token are wanted rarely and are large; their chunks are kept small.
MAX_PROMPT_LOGIT_ROWS = 256


class FinishReason(Enum):
    """Why a sequence ended. ``MORE`` means that it did not."""

    MORE = auto()
    STOP = auto()
    LENGTH = auto()


@dataclass(frozen=True, slots=True)
class ScheduledRows:
    """Tokens ``[first, first + rows)`` of a sequence; the last ``logit_rows`` of them need logits."""

    sequence: Sequence
    first: int
    rows: int
    logit_rows: int

    @property
    def contents(self) -> SequenceRows:
        """What ranks are told of it."""
        return SequenceRows(
            token_ids=np.array(self.sequence.tokens[self.first : self.first + self.rows], dtype=np.int64),
            first=self.first,
            logit_rows=self.logit_rows,
            tables=tuple(table.array() for table in self.sequence.tables),
        )


@dataclass(frozen=True, slots=True)
class Draw:
    """One token to sample: from logits row ``row``, for ``choice`` of the sequence's request."""

    row: int
    sequence: Sequence
    choice: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. ``transfers`` were admitted and wait for a prefill replica's KV; they are not computed.

    ``to_clear`` are blocks that must be cleared before anything is computed or received.
    """

    to_clear: tuple[BlockId, ...]
    rows: tuple[ScheduledRows, ...]
    draws: tuple[Draw, ...]
    transfers: tuple[Sequence, ...]
    admitted: tuple[Sequence, ...]

    @property
    def compute(self) -> Compute:
        """Its rows as ranks are told."""
        return Compute(tuple(rows.contents for rows in self.rows))


@dataclass(frozen=True, slots=True)
class Sampled:
    """A token that was appended to a sequence, and whether that ended it. ``draw`` is its index in the plan."""

    sequence: Sequence
    token: int
    reason: FinishReason
    draw: int


@dataclass(frozen=True, slots=True)
class Committed:
    """What a step changed."""

    sampled: tuple[Sampled, ...]
    copies: tuple[BlockCopy, ...]


@dataclass(frozen=True, slots=True)
class PrefillCredit:
    """What the prefill side offers now: whether any replica is usable, and how many more streams it grants."""

    reachable: bool
    streams: int


NO_PREFILL = PrefillCredit(reachable=False, streams=0)


class Scheduler:
    """Queues and states of every live sequence of one engine."""

    def __init__(self, config: EngineConfig, cache: KVCacheManager, max_model_len: int) -> None:
        self._config = config
        self._cache = cache
        self._max_model_len = max_model_len
        self.preparing: list[Sequence] = []
        self.waiting = WaitingQueue()
        self.pace = QueuePace()
        self.receiving: list[Sequence] = []
        self.running: list[Sequence] = []
        self._epochs = 0
        self._head_is_stuck = False
        self.awaits_prefill = False
        """Whether the queue stands because no prefill replica takes another prompt, and not for want of blocks."""
        self.preemptions = 0
        self.local_prefills = 0
        self.prefix_queries = 0
        self.prefix_hits = 0

    @property
    def queue_limit(self) -> int:
        """How many sequences may wait: what is configured, and those who find a free seat in the next step."""
        free = 0 if self._head_is_stuck else self._config.max_running_requests - len(self.running) - len(self.receiving)
        return self._config.max_waiting_requests + max(0, free)

    @property
    def full(self) -> bool:
        """Whether the queue takes no further request."""
        return len(self.preparing) + len(self.waiting) >= self.queue_limit

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do and nothing to wait for."""
        return not (self.preparing or self.waiting or self.receiving or self.running)

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence, or keep it until its grammar is ready."""
        if sequence.state is SequenceState.PREPARING:
            self.preparing.append(sequence)
        else:
            assert sequence.state is SequenceState.WAITING
            self.waiting.push(sequence)

    def prepared(self, sequence: Sequence) -> None:
        """Queue a sequence whose grammar is ready."""
        self.preparing.remove(sequence)
        sequence.move_to(SequenceState.WAITING)
        self.waiting.push(sequence)

    def live(self) -> Iterable[Sequence]:
        """Every sequence that is not finished."""
        yield from self.preparing
        yield from self.waiting
        yield from self.receiving
        yield from self.running

    def finish(self, sequences: Iterable[Sequence]) -> None:
        """End sequences in whatever state they are and release what they hold, at once."""
        for sequence in list(sequences):
            self._leave_queue(sequence)
            sequence.move_to(SequenceState.FINISHED)
            self._cache.release(sequence)

    def of_request(self, request_id: RequestId) -> list[Sequence]:
        """The live sequences of one request."""
        return [sequence for sequence in self.live() if sequence.request_id == request_id]

    def expired(self, now: float) -> list[Sequence]:
        """Live sequences that have waited for too long, of which ``Sequence.overdue`` says why."""
        return [sequence for sequence in self.live() if sequence.overdue(now)]

    def wait(self, sequence: Sequence) -> float | None:
        """About how many seconds a new sequence would wait for its turn; None if nobody can tell yet."""
        seats = self.queue_limit - self._config.max_waiting_requests
        return self.pace.wait(max(0, self.waiting.ahead_of(sequence.caller, sequence.priority) - seats))

    def schedule(
        self,
        now: float,
        credit: PrefillCredit = NO_PREFILL,
        paused: AbstractSet[RequestId] = frozenset(),
    ) -> StepPlan:
        """Plan the next step. ``paused`` requests are prompts whose outgoing KV is not being taken fast enough."""
        budget = self._config.max_batched_tokens
        preempted_before = self.preemptions
        rows: list[ScheduledRows] = []

        for sequence in [s for s in self.running if s.pending == 1 and s.request_id not in paused]:
            if sequence.state is SequenceState.RUNNING and not sequence.awaits_constraint:
                self._schedule_rows(sequence, 1, rows)
        budget -= len(rows)

        for sequence in [s for s in self.running if s.pending > 1 and s.request_id not in paused]:
            if budget > 0 and sequence.state is SequenceState.RUNNING:
                budget -= self._schedule_rows(sequence, budget, rows)

        transfers: list[Sequence] = []
        admitted: list[Sequence] = []
        newcomers = 0
        self._head_is_stuck = self.preemptions > preempted_before
        self.awaits_prefill = False
        # After a preemption nothing is admitted: the preempted sequence would only come back and push others out.
        while self.waiting and budget > 0 and self._has_seat() and self.preemptions == preempted_before:
            sequence = self.waiting.head
            received = self._wants_received(sequence, credit)
            transfer = received and not self._cache.lacks_nothing(sequence)
            self.awaits_prefill = transfer and credit.streams <= len(transfers)
            if self.awaits_prefill or not self._admit(sequence, received):
                self._head_is_stuck = True
                break
            self.waiting.pop()
            if transfer:
                sequence.move_to(SequenceState.RECEIVING)
                # Transfers have deadlines of their own.
                sequence.due = math.inf
                self._epochs += 1
                sequence.epoch = Epoch(self._epochs)
                self.receiving.append(sequence)
                transfers.append(sequence)
            else:
                sequence.move_to(SequenceState.RUNNING)
                self.running.append(sequence)
                self.local_prefills += not received and sequence.pending > 1
            if not sequence.admitted:
                sequence.admitted = True
                newcomers += 1
                self.waiting.charge(sequence.caller, sequence.pending)
            self.prefix_queries += len(sequence.tokens)
            self.prefix_hits += sequence.computed
            if not sequence.generated:
                sequence.cached_tokens = sequence.computed
            if received and not transfer:
                # A window of one token sees no other: a transfer of nothing is complete before it begins.
                self._cache.received(sequence)
            if sequence.pending > sequence.awaits_constraint and not transfer:
                budget -= self._schedule_rows(sequence, budget, rows)
            admitted.append(sequence)
        self.pace.observe(newcomers, waiting=bool(self.waiting), now=now)
        to_clear = self._cache.take_to_clear()
        return StepPlan(to_clear, tuple(rows), self._draws(rows), tuple(transfers), tuple(admitted))

    def commit(self, plan: StepPlan, tokens: list[int], now: float) -> Committed:
        """Account for a computed step; ``tokens`` are the sampled ones, one per draw."""
        for scheduled in plan.rows:
            scheduled.sequence.computed += scheduled.rows
            scheduled.sequence.due = now + self._config.token_timeout
            self._cache.advance(scheduled.sequence)
        sampled: list[Sampled] = []
        copies: list[BlockCopy] = []
        for index, (draw, token) in enumerate(zip(plan.draws, tokens, strict=True)):
            sequence = draw.sequence if draw.choice == draw.sequence.choice else self._branch(draw, token, copies)
            if sequence is draw.sequence:
                sequence.tokens.append(token)
                sequence.branches = 1
            self.waiting.charge(sequence.caller, GENERATED_TOKEN_COST)
            reason = self._finish_reason(sequence, token)
            sampled.append(Sampled(sequence, token, reason, index))
        self.finish(s.sequence for s in sampled if s.reason is not FinishReason.MORE)
        return Committed(tuple(sampled), tuple(copies))

    def transfer_completed(self, sequence: Sequence) -> None:
        """Every slot of a receiving sequence's prompt has arrived, all but the last token's."""
        self._cache.received(sequence)
        self.receiving.remove(sequence)
        sequence.move_to(SequenceState.RUNNING)
        self.running.append(sequence)

    def transfer_failed(self, sequence: Sequence) -> None:
        """Count a failed attempt and give the sequence back to the queue."""
        sequence.transfer_attempts += 1
        self.transfer_refused(sequence)

    def transfer_refused(self, sequence: Sequence) -> None:
        """Give a receiving sequence back to the queue; its blocks go back unhashed."""
        self.receiving.remove(sequence)
        sequence.move_to(SequenceState.WAITING)
        self._cache.release(sequence)
        self.waiting.push(sequence)

    def _has_seat(self) -> bool:
        return len(self.running) + len(self.receiving) < self._config.max_running_requests

    def _admit(self, sequence: Sequence, received: bool) -> bool:
        known = len(sequence.tokens)
        if received:
            return self._cache.admit_received(sequence, tokens=known + 1)
        # A decode step needs the last token's logits, so that token is always computed; a prefill replica needs none.
        computes_last = self._config.role is not Role.PREFILL
        return self._cache.admit(sequence, reusable=self._reusable(sequence), tokens=known + computes_last)

    def _reusable(self, sequence: Sequence) -> int:
        """Tokens whose KV may come from the prefix cache."""
        if sequence.wants_prompt_logprobs:
            return 0
        return len(sequence.tokens) - (self._config.role is not Role.PREFILL)

    def _wants_received(self, sequence: Sequence, credit: PrefillCredit) -> bool:
        """Whether a prompt's KV is not to be computed here, as far as it is lacking."""
        return (
            self._config.role is Role.DECODE
            and credit.reachable
            and sequence.transfer_attempts < MAX_TRANSFER_ATTEMPTS
            and not sequence.wants_prompt_logprobs
            and len(sequence.tokens) - 1 - self._cache.cached_prefix(sequence, self._reusable(sequence))
            > self._config.local_prefill_threshold
        )

    def _schedule_rows(self, sequence: Sequence, budget: int, step: list[ScheduledRows]) -> int:
        """Make a sequence's next rows part of the step, if blocks can be found for them; returns how many there are."""
        scheduled = self._rows(sequence, budget)
        if not self._make_room(sequence, scheduled.rows, step):
            return 0
        step.append(scheduled)
        return scheduled.rows

    def _rows(self, sequence: Sequence, budget: int) -> ScheduledRows:
        # The last known token's logits are wanted only when it is known what may follow it.
        rows = self._cache.chunk(sequence, min(sequence.pending - sequence.awaits_constraint, budget))
        if self._config.role is Role.PREFILL:
            return ScheduledRows(sequence, sequence.computed, rows, 0)
        if sequence.wants_prompt_logprobs:
            rows = min(rows, MAX_PROMPT_LOGIT_ROWS)
            return ScheduledRows(sequence, sequence.computed, rows, rows)
        return ScheduledRows(sequence, sequence.computed, rows, int(rows == sequence.pending))

    def _draws(self, rows: list[ScheduledRows]) -> tuple[Draw, ...]:
        draws = []
        row = 0
        for scheduled in rows:
            row += scheduled.logit_rows
            sequence = scheduled.sequence
            reaches_end = scheduled.first + scheduled.rows == len(sequence.tokens)
            if scheduled.logit_rows and reaches_end and sequence.sampling.max_tokens > 0:
                draws += [Draw(row - 1, sequence, sequence.choice + branch) for branch in range(sequence.branches)]
        return tuple(draws)

    def _make_room(self, sequence: Sequence, rows: int, step: list[ScheduledRows]) -> bool:
        while not self._cache.extend(sequence, rows):
            victim = self._victim(step)
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        sequence.move_to(SequenceState.WAITING)
        self._cache.release(sequence)
        self.waiting.push(sequence)
        self.preemptions += 1

    def _victim(self, step: list[ScheduledRows]) -> Sequence:
        """Priorities count among one caller's sequences, so that nobody's keeps others' from being computed."""
        scheduled = {id(other.sequence) for other in step}
        candidates = [other for other in reversed(self.running) if id(other) not in scheduled]
        own = (other for other in candidates if other.caller == candidates[0].caller)
        return max(own, key=lambda other: other.priority)

    def _branch(self, draw: Draw, token: int, copies: list[BlockCopy]) -> Sequence:
        """Make another choice of a prompt whose first token was just sampled."""
        parent = draw.sequence
        computed_tokens = parent.tokens[: parent.computed]
        child = replace(
            parent,
            choice=draw.choice,
            tokens=[*computed_tokens, token],
            branches=1,
            state=SequenceState.WAITING,
            tables=[],
            hashes=list(parent.hashes[: parent.computed // self._cache.block_size]),
            computed=0,
            transfer_attempts=0,
            prompt_reported=True,
            constraint=None if parent.constraint is None else parent.constraint.sibling(),
        )
        copied = self._cache.fork(parent, child)
        if copied is None:
            self.waiting.push(child)
            return child
        copies += copied
        child.move_to(SequenceState.RUNNING)
        self.running.append(child)
        return child

    def _finish_reason(self, sequence: Sequence, token: int) -> FinishReason:
        sampling = sequence.sampling
        if sequence.generated >= sampling.min_tokens and token in sequence.end_tokens:
            return FinishReason.STOP
        if sequence.generated >= sampling.max_tokens or len(sequence.tokens) >= self._max_model_len:
            return FinishReason.LENGTH
        return FinishReason.MORE

    def _leave_queue(self, sequence: Sequence) -> None:
        match sequence.state:
            case SequenceState.PREPARING:
                self.preparing.remove(sequence)
            case SequenceState.WAITING:
                self.waiting.remove(sequence)
            case SequenceState.RECEIVING:
                self.receiving.remove(sequence)
            case _:
                self.running.remove(sequence)
