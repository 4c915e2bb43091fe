"""One choice of one request, from admission to its last token.

A sequence is made when a request arrives (choice 0) or when a prompt's first token is sampled for the other choices. It
lives in the scheduler, which alone changes it, and ends when it is finished and its blocks are released.
"""

import math
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, NewType

from worker.failure import Failure
from worker.kv_cache.block_pool import BlockHash
from worker.kv_cache.block_table import BlockTable
from worker.sampling_params import SamplingParams

if TYPE_CHECKING:
    from worker.grammar.constraint import Constraint

RequestId = NewType("RequestId", str)
Epoch = NewType("Epoch", int)


class SequenceState(Enum):
    """Where a sequence is. ``TRANSITIONS`` says what may follow what."""

    PREPARING = auto()
    """Its grammar is being compiled. Holds no blocks."""
    WAITING = auto()
    """Queued: new, preempted, or given back after a failed transfer. Holds no blocks."""
    RECEIVING = auto()
    """Holds blocks that a prefill replica's KV is being written to. Not computed on."""
    RUNNING = auto()
    """Holds blocks and takes part in steps."""
    FINISHED = auto()
    """Ended, for whatever reason. Holds nothing."""


TRANSITIONS: dict[SequenceState, frozenset[SequenceState]] = {
    SequenceState.PREPARING: frozenset({SequenceState.WAITING, SequenceState.FINISHED}),
    SequenceState.WAITING: frozenset({SequenceState.RECEIVING, SequenceState.RUNNING, SequenceState.FINISHED}),
    SequenceState.RECEIVING: frozenset({SequenceState.RUNNING, SequenceState.WAITING, SequenceState.FINISHED}),
    SequenceState.RUNNING: frozenset({SequenceState.WAITING, SequenceState.FINISHED}),
    SequenceState.FINISHED: frozenset(),
}


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens and KV of one choice.

    ``tokens`` are prompt and generated tokens; ``computed`` of them are in the cache. The first ``prefix_len`` are the
    model's own, not the client's. ``tables`` are its blocks, one table per KV cache group. ``hashes`` names the leading
    full blocks of the smallest block size. ``branches`` is how many choices still share this prompt. ``deadline`` is in
    the engine's clock, seconds, like ``due``, by when it must have gone on, and ``start_by``, by when it must have
    been admitted once. ``caller``, ``priority`` and ``arrival_number``, which the queue gives it, order it there.
    ``constraint`` is what a grammar lets follow, if there is one.
    """

    request_id: RequestId
    choice: int
    tokens: list[int]
    prompt_len: int
    sampling: SamplingParams
    salt: str
    arrival: float
    deadline: float
    due: float = math.inf
    eos_token_ids: frozenset[int] = frozenset()
    prefix_len: int = 0
    branches: int = 1
    state: SequenceState = SequenceState.WAITING
    computed: int = 0
    tables: list[BlockTable] = field(default_factory=list)
    hashes: list[BlockHash] = field(default_factory=list)
    epoch: Epoch = Epoch(0)
    transfer_attempts: int = 0
    prompt_reported: bool = False
    cached_tokens: int = 0
    caller: str = ""
    priority: int = 0
    start_by: float = math.inf
    admitted: bool = False
    arrival_number: int = 0
    constraint: "Constraint | None" = None

    @property
    def pending(self) -> int:
        """Known tokens without KV: 1 in decode, more in prefill."""
        return len(self.tokens) - self.computed

    @property
    def generated(self) -> int:
        """How many tokens were sampled."""
        return len(self.tokens) - self.prompt_len

    @property
    def end_tokens(self) -> frozenset[int]:
        """Tokens that end it."""
        own = self.sampling.stop_token_ids
        return own if self.sampling.ignore_eos else own | self.eos_token_ids

    def has_not_started(self, now: float) -> bool:
        """Whether its turn has not come in time, which says nothing about the request."""
        return self.state is SequenceState.WAITING and not self.admitted and self.start_by <= now < self.deadline

    def overdue(self, now: float) -> str:
        """Why it is to end, if it has waited for too long; empty if not."""
        if self.deadline <= now:
            return "the request's deadline has passed (its timeout, or --request-timeout)"
        if self.has_not_started(now):
            return f"its turn did not come within {self.start_by - self.arrival:g} s"
        return "the request has not gone on for too long (--token-timeout)" if self.due <= now else ""

    def lateness(self, now: float) -> Failure:
        """What it is counted as when it is overdue."""
        if self.has_not_started(now):
            return Failure.WAITED
        return Failure.DEADLINE if self.deadline <= now else Failure.STALLED

    @property
    def awaits_constraint(self) -> bool:
        """Whether it is not known yet which tokens its grammar lets follow: until then none can be sampled."""
        return self.constraint is not None and self.constraint.next is None

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether rows of the prompt still need logits."""
        return self.sampling.prompt_logprobs is not None and not self.prompt_reported

    def move_to(self, state: SequenceState) -> None:
        """Change state; an impossible change is a bug of ours."""
        assert state in TRANSITIONS[self.state], f"{self.request_id}: {self.state} → {state}"
        self.state = state
