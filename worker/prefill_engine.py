"""The prefill engine: computes prompts for decode replicas and sends each chunk's KV as soon as it is complete.

Built once per replica, then driven by its leading rank's loop. A job arrives with the call that will carry its KV; it
ends when the last piece is queued, or when the call is gone. Nothing is sampled here and no logits are computed.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import grpc

from kv_transfer.prefill_server import PrefillJob, RankStream
from worker.config import EngineConfig
from worker.events import CacheCleared, DrainStarted, LoadWanted, StatusWanted
from worker.failure import Failure
from worker.model_runner import ModelRunner
from worker.ranks.commands import ClearBlocks, CloseOutgoing, Compute, OpenOutgoing, SendComputed, Summary
from worker.ranks.process_group import RankLost
from worker.ranks.team import RankTeam
from worker.replica_load import ReplicaLoad
from worker.sampling_params import SamplingParams
from worker.scheduler import Scheduler, StepPlan
from worker.sequence import RequestId, Sequence
from worker.wire import engine_pb2 as wire

log = logging.getLogger(__name__)

PrefillEvent = PrefillJob | RankStream | StatusWanted | LoadWanted | CacheCleared | DrainStarted


@dataclass(slots=True)
class _Prompt:
    """A job under way."""

    job: PrefillJob
    sequence: Sequence
    admitted: float


class PrefillEngine:
    """See the module. ``wire_bytes`` reads what the leading rank's KV sockets carried; ``clock`` gives seconds."""

    def __init__(
        self,
        config: EngineConfig,
        runner: ModelRunner,
        team: RankTeam,
        replica_id: str,
        wire_bytes: Callable[[], int],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._config = config
        self._runner = runner
        self._team = team
        self._replica_id = replica_id
        self._wire_bytes = wire_bytes
        self._cache = runner.cache_manager()
        self._scheduler = Scheduler(config, self._cache, runner.max_model_len)
        self._jobs: dict[RequestId, _Prompt] = {}
        self._accepted = 0
        self._drain: DrainStarted | None = None
        self.counters = wire.Counters()

    @property
    def idle(self) -> bool:
        """Whether it has no job at all."""
        return self._scheduler.idle

    def handle(self, event: PrefillEvent, now: float) -> None:
        """Take one event from outside."""
        match event:
            case PrefillJob():
                self._accept(event, now)
            case RankStream():
                self._team.outgoing.attach(event)
            case StatusWanted():
                event.reply(self.status())
            case LoadWanted():
                event.reply(ReplicaLoad(queued_prompt_tokens=self._prompt_tokens()))
            case CacheCleared():
                self._cache.pool.clear_cache()
                event.reply()
            case DrainStarted():
                self._drain = event

    def step(self, now: float) -> bool:
        """Compute once; returns whether there was anything to compute."""
        self._drop_cancelled()
        for sequence in self._scheduler.expired(now):
            late, why = sequence.lateness(now), sequence.overdue(now)
            self._give_up(self._jobs[sequence.request_id], late, grpc.StatusCode.ABORTED, why)
        plan = self._scheduler.schedule(now, paused=self._paused())
        if plan.to_clear:
            self._team.apply(ClearBlocks(plan.to_clear))
        for sequence in plan.admitted:
            self._jobs[sequence.request_id].admitted = now
        if plan.rows:
            try:
                self._team.apply(self._compute(plan))
            except RankLost:
                raise
            except Exception:
                log.exception("a step failed; its prompts are given up")
                self._fail_step(plan)
            else:
                self.counters.steps += 1
                self._scheduler.commit(plan, [], now)
        for name in dict.fromkeys(s.request_id for s in (*plan.admitted, *(rows.sequence for rows in plan.rows))):
            if name in self._jobs:
                self._advance(self._jobs[name])
        if plan.rows and self._scheduler.idle:
            self._cache.pool.check()
        if self._drain is not None and self.idle:
            self._drain.drained()
        return bool(plan.rows)

    def load(self) -> wire.Load:
        """How full it is."""
        counts = self._cache.counts()
        return wire.Load(
            running_requests=len(self._scheduler.running),
            waiting_requests=len(self._scheduler.waiting),
            free_blocks=counts.free,
            cached_blocks=counts.cached,
            total_blocks=counts.total,
            outstanding_prompt_tokens=self._prompt_tokens(),
            draining=self._drain is not None,
        )

    def status(self) -> wire.StatusReply:
        """Everything that a status page shows."""
        self.counters.preemptions = self._scheduler.preemptions
        self.counters.prefix_queries = self._scheduler.prefix_queries
        self.counters.prefix_hits = self._scheduler.prefix_hits
        others = self._team.followers_totals()
        self.counters.wire_bytes = self._wire_bytes() + others.wire_bytes
        self.counters.payload_bytes = self._team.outgoing.payload_bytes + others.sent_bytes
        return wire.StatusReply(
            role=self._config.role.value,
            replica_id=self._replica_id,
            load=self.load(),
            counters=self.counters,
            held_blocks=self._cache.counts().held,
            block_size=self._config.block_size,
            owner_layers=self._runner.owner_layers,
            total_layers=self._runner.attention_layers,
        )

    def stop(self, now: float) -> None:
        """Give up everything."""
        del now
        for prompt in list(self._jobs.values()):
            self._give_up(prompt, Failure.STOPPED, grpc.StatusCode.UNAVAILABLE, "the replica is shutting down")

    def _prompt_tokens(self) -> int:
        """Of accepted prompts, those that are not computed."""
        return sum(sequence.pending for sequence in self._scheduler.live())

    def _accept(self, job: PrefillJob, now: float) -> None:
        own = len(self._runner.prefix_tokens)
        largest = max(job.token_ids[own:], default=0)
        if (
            job.token_ids[:own] != self._runner.prefix_tokens
            or len(job.token_ids) >= self._runner.max_model_len
            or largest >= self._runner.model.vocab_size
        ):
            self._refuse(
                job,
                Failure.INVALID,
                grpc.StatusCode.INVALID_ARGUMENT,
                f"{len(job.token_ids)} tokens with ids up to {largest}; this replica takes up to "
                f"{self._runner.max_model_len - 1} tokens of a vocabulary of {self._runner.model.vocab_size}",
            )
            return
        if any(prompt.job.name == job.name for prompt in self._jobs.values()):
            self._refuse(job, Failure.INVALID, grpc.StatusCode.INVALID_ARGUMENT, f"{job.name} is under way already")
            return
        if self._scheduler.full or self._drain is not None:
            # Not a failure of this replica: the prompt goes elsewhere, and the decode replica soon knows better.
            reason = Failure.QUEUE_FULL if self._drain is None else Failure.DRAINING
            self._refuse(job, reason, grpc.StatusCode.RESOURCE_EXHAUSTED, "the prefill replica takes no more prompts")
            return
        # Calls may come from several decode replicas with equal request ids.
        self._accepted += 1
        sequence = Sequence(
            request_id=RequestId(f"{self._accepted}/{job.name.request_id}"),
            choice=0,
            tokens=list(job.token_ids),
            prompt_len=len(job.token_ids),
            sampling=SamplingParams(),
            salt=job.cache_salt,
            arrival=now,
            deadline=now + job.timeout,
            caller=job.caller,
            priority=job.priority,
        )
        self._jobs[sequence.request_id] = _Prompt(job, sequence, admitted=now)
        self._team.outgoing.attach(RankStream(job.name, 0, job.stream))
        self._team.apply(OpenOutgoing(job.name, job.receivers, len(job.token_ids) + 1, job.lacking, job.timeout))
        self._scheduler.add(sequence)

    def _paused(self) -> frozenset[RequestId]:
        slow = self._team.backlogged(self._config.max_staged_bytes)
        return frozenset(name for name, prompt in self._jobs.items() if prompt.job.name in slow)

    def _drop_cancelled(self) -> None:
        for name, prompt in list(self._jobs.items()):
            if prompt.job.stream.cancelled:
                self.counters.requests_aborted += 1
                self._close(prompt, grpc.StatusCode.ABORTED, "the receiver has cancelled")
                self._scheduler.finish([prompt.sequence])
                del self._jobs[name]

    def _compute(self, plan: StepPlan) -> Compute:
        """The step, whose layers' KV leaves while later layers are computed."""
        return Compute(
            tuple(replace(rows.contents, transfer=self._jobs[rows.sequence.request_id].job.name) for rows in plan.rows)
        )

    def _advance(self, prompt: _Prompt) -> None:
        """Send what is computed and not sent; end the job when that is everything."""
        sequence, job = prompt.sequence, prompt.job
        summary = Summary(
            cached_tokens=sequence.cached_tokens,
            queue_seconds=prompt.admitted - job.arrived,
            # The step that was just computed belongs to it.
            compute_seconds=self._clock() - prompt.admitted,
        )
        self._team.apply(
            SendComputed(
                name=job.name,
                computed=sequence.computed,
                tables=tuple(table.array() for table in sequence.tables),
                summary=None if sequence.pending else summary,
            )
        )
        if sequence.pending:
            return
        self.counters.requests_finished += 1
        self.counters.prompt_tokens += len(sequence.tokens)
        self.counters.transfers += 1
        self._scheduler.finish([sequence])
        del self._jobs[sequence.request_id]

    def _fail_step(self, plan: StepPlan) -> None:
        for scheduled in plan.rows:
            prompt = self._jobs[scheduled.sequence.request_id]
            message = "the replica failed while it computed this prompt"
            self._give_up(prompt, Failure.STEP, grpc.StatusCode.INTERNAL, message)

    def _refuse(self, job: PrefillJob, failure: Failure, code: grpc.StatusCode, message: str) -> None:
        self.counters.failures[failure] += 1
        job.stream.fail(code, message)

    def _give_up(self, prompt: _Prompt, failure: Failure, code: grpc.StatusCode, message: str) -> None:
        log.warning("%s: %s", prompt.job.name, failure)
        self._close(prompt, code, message)
        self.counters.requests_failed += 1
        self.counters.failures[failure] += 1
        self._scheduler.finish([prompt.sequence])
        del self._jobs[prompt.sequence.request_id]

    def _close(self, prompt: _Prompt, code: grpc.StatusCode, message: str) -> None:
        self._team.apply(CloseOutgoing(prompt.job.name, code.value[0], message))
