"""The prefill engine: computes prompts for decode replicas and sends each chunk's KV as soon as it is complete.

Built once per replica, then driven by its loop's thread. A job arrives with the call that will carry its KV; it ends
when the last piece is queued, or when the call is gone. Nothing is sampled here and no logits are computed.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import grpc

from kv_transfer.frame import EndFrame, PieceFrame
from kv_transfer.layout import SlotRange
from kv_transfer.plan import plan_pieces
from kv_transfer.prefill_server import PrefillJob
from worker.config import EngineConfig
from worker.events import CacheCleared, StatusWanted
from worker.model_runner import ModelRunner
from worker.sampling_params import SamplingParams
from worker.scheduler import Scheduler, StepPlan
from worker.sequence import RequestId, Sequence
from worker.wire import engine_pb2 as wire

log = logging.getLogger(__name__)

PrefillEvent = PrefillJob | StatusWanted | CacheCleared


@dataclass(slots=True)
class Outgoing:
    """A job under way: of each section, the lacking slots before ``sent`` have been queued on its stream."""

    job: PrefillJob
    sequence: Sequence
    sent: list[int]
    admitted: float
    payload_bytes: int = 0
    pieces: int = 0


class PrefillEngine:
    """See the module. ``wire_bytes`` reads what the KV sockets carried so far."""

    def __init__(
        self, config: EngineConfig, runner: ModelRunner, replica_id: str, wire_bytes: Callable[[], int]
    ) -> None:
        self._config = config
        self._runner = runner
        self._replica_id = replica_id
        self._wire_bytes = wire_bytes
        self._cache = runner.cache_manager()
        self._scheduler = Scheduler(config, self._cache, runner.max_model_len)
        self._jobs: dict[RequestId, Outgoing] = {}
        self._accepted = 0
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
            case StatusWanted():
                event.reply(self.status())
            case CacheCleared():
                self._cache.pool.clear_cache()
                event.reply()

    def step(self, now: float) -> bool:
        """Compute once; returns whether there was anything to compute."""
        self._drop_cancelled()
        plan = self._scheduler.schedule(now, paused=self._paused())
        self._runner.clear_blocks(plan.to_clear)
        for sequence in plan.admitted:
            self._jobs[sequence.request_id].admitted = now
        if plan.rows:
            try:
                self._runner.execute(plan.rows)
            except Exception:
                log.exception("a step failed; its prompts are given up")
                self._fail_step(plan)
            else:
                self.counters.steps += 1
                self._scheduler.commit(plan, [], now)
        for name in dict.fromkeys(s.request_id for s in (*plan.admitted, *(rows.sequence for rows in plan.rows))):
            if name in self._jobs:
                self._advance(self._jobs[name], now)
        if plan.rows and self._scheduler.idle:
            self._cache.pool.check()
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
            outstanding_prompt_tokens=sum(sequence.pending for sequence in self._scheduler.live()),
        )

    def status(self) -> wire.StatusReply:
        """Everything that a status page shows."""
        self.counters.prefix_queries = self._scheduler.prefix_queries
        self.counters.prefix_hits = self._scheduler.prefix_hits
        self.counters.wire_bytes = self._wire_bytes()
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
        for outgoing in list(self._jobs.values()):
            self._give_up(outgoing, grpc.StatusCode.UNAVAILABLE, "the replica is shutting down")

    def _accept(self, job: PrefillJob, now: float) -> None:
        own = len(self._runner.prefix_tokens)
        largest = max(job.token_ids[own:], default=0)
        if (
            job.token_ids[:own] != self._runner.prefix_tokens
            or len(job.token_ids) >= self._runner.max_model_len
            or largest >= self._runner.model.vocab_size
        ):
            job.stream.fail(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"{len(job.token_ids)} tokens with ids up to {largest}; this replica takes up to "
                f"{self._runner.max_model_len - 1} tokens of a vocabulary of {self._runner.model.vocab_size}",
            )
            return
        if self._scheduler.full:
            job.stream.fail(grpc.StatusCode.RESOURCE_EXHAUSTED, "the prefill queue is full")
            return
        # Calls may come from several decode replicas with equal request ids.
        self._accepted += 1
        sequence = Sequence(
            request_id=RequestId(f"{self._accepted}/{job.request_id}"),
            choice=0,
            tokens=list(job.token_ids),
            prompt_len=len(job.token_ids),
            sampling=SamplingParams(),
            salt=job.cache_salt,
            arrival=now,
            deadline=now + job.timeout,
        )
        self._jobs[sequence.request_id] = Outgoing(
            job, sequence, sent=[slots.begin for slots in job.lacking], admitted=now
        )
        self._scheduler.add(sequence)

    def _paused(self) -> frozenset[RequestId]:
        limit = self._config.max_staged_bytes
        return frozenset(name for name, outgoing in self._jobs.items() if outgoing.job.stream.queued_bytes > limit)

    def _drop_cancelled(self) -> None:
        for name, outgoing in list(self._jobs.items()):
            if outgoing.job.stream.cancelled:
                self.counters.requests_aborted += 1
                self._scheduler.finish([outgoing.sequence])
                del self._jobs[name]

    def _advance(self, outgoing: Outgoing, now: float) -> None:
        """Send what is computed and not sent; end the job when that is everything."""
        sequence, job = outgoing.sequence, outgoing.job
        layout = self._runner.layout
        tables = [table.array() for table in sequence.tables]
        for index, (section, slots) in enumerate(zip(layout.sections, job.lacking, strict=True)):
            ready = section.ready(slots, len(sequence.tokens) + 1, sequence.computed)
            unsent = SlotRange(outgoing.sent[index], max(outgoing.sent[index], ready.end))
            for piece in plan_pieces(layout, index, unsent, self._config.max_piece_bytes):
                payload = self._runner.read_piece(piece, tables)
                job.stream.put(PieceFrame(job.epoch, piece, payload))
                outgoing.payload_bytes += payload.nbytes
                outgoing.pieces += 1
            outgoing.sent[index] = unsent.end
        if sequence.pending:
            return
        job.stream.put(
            EndFrame(
                epoch=job.epoch,
                payload_bytes=outgoing.payload_bytes,
                pieces=outgoing.pieces,
                cached_tokens=sequence.cached_tokens,
                queue_seconds=sequence.queue_seconds,
                compute_seconds=now - outgoing.admitted,
            )
        )
        self.counters.requests_finished += 1
        self.counters.prompt_tokens += len(sequence.tokens)
        self.counters.transfers += 1
        self.counters.payload_bytes += outgoing.payload_bytes
        self._scheduler.finish([sequence])
        del self._jobs[sequence.request_id]

    def _fail_step(self, plan: StepPlan) -> None:
        for scheduled in plan.rows:
            outgoing = self._jobs[scheduled.sequence.request_id]
            self._give_up(outgoing, grpc.StatusCode.INTERNAL, "the replica failed while it computed this prompt")

    def _give_up(self, outgoing: Outgoing, code: grpc.StatusCode, message: str) -> None:
        outgoing.job.stream.fail(code, message)
        self.counters.requests_failed += 1
        self._scheduler.finish([outgoing.sequence])
        del self._jobs[outgoing.sequence.request_id]
