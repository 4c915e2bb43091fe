"""The generating engine: owns a request from admission to its last token, on a decode or a colocated replica.

Built once per replica, then driven by its leading rank's loop: ``handle`` takes one event, ``step`` computes once.
Everything here runs on that thread, so pages, scheduler and ledgers have a single writer. What can fail for one request
fails only that request.
"""

import logging
import time
from collections.abc import Callable, Iterable

from kv_transfer.rank_pair import replica_lower_bound, unshared_bytes
from kv_transfer.transfer import PieceArrived, TransferEnded
from worker.config import EngineConfig
from worker.events import (
    Aborted,
    CacheCleared,
    ClientArrived,
    ClientGone,
    DecodeEvent,
    DrainStarted,
    LoadWanted,
    StatusWanted,
    Submitted,
)
from worker.failure import Failure
from worker.grammar.grammar import GrammarError
from worker.grammar.grammars import CannotGoOn, GrammarReady, Grammars
from worker.incoming_transfers import RankReceived
from worker.logprobs import drawn_logprobs, take_prompt_logprobs
from worker.model_runner import ModelRunner
from worker.outbox import Outbox
from worker.prefill_connector import PrefillConnector
from worker.prompt_phases import PromptPhases
from worker.ranks.commands import ClearBlocks, CopyBlocks
from worker.ranks.process_group import RankLost
from worker.ranks.team import RankTeam
from worker.replica_load import ReplicaLoad, occupancy
from worker.request import Client, Request, RequestLimits, make_sequence, request_id_of
from worker.sampler import sample
from worker.sampling_params import InvalidRequest
from worker.scheduler import NO_PREFILL, Scheduler, StepPlan
from worker.sequence import RequestId, Sequence, SequenceState
from worker.transfers import Ended, Transfers
from worker.wire import engine_pb2 as wire

log = logging.getLogger(__name__)


class DecodeEngine:
    """See the module. ``clock`` gives seconds."""

    def __init__(
        self,
        config: EngineConfig,
        runner: ModelRunner,
        team: RankTeam,
        replica_id: str,
        connector: PrefillConnector | None = None,
        grammars: Grammars | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._runner = runner
        self._team = team
        self._replica_id = replica_id
        self.counters = wire.Counters()
        self._grammars = grammars
        self._transfers = None if connector is None else Transfers(runner, team, connector)
        self._cache = runner.cache_manager()
        self._scheduler = Scheduler(config, self._cache, runner.max_model_len)
        self._limits = RequestLimits(
            vocab_size=runner.model.vocab_size,
            max_model_len=runner.max_model_len - len(runner.prefix_tokens),
            prefix_tokens=runner.prefix_tokens,
            max_choices=config.max_running_requests,
            default_timeout=config.request_timeout,
            queue_timeout=config.queue_timeout,
            eos_token_ids=runner.eos_token_ids,
        )
        self._requests: dict[RequestId, Request] = {}
        self._outbox = Outbox(self._requests, self.counters, self.load, clock)
        self._drain: DrainStarted | None = None

    def handle(self, event: DecodeEvent, now: float) -> None:
        """Take one event from outside."""
        match event:
            case PieceArrived():
                self._team.incoming.take(event)
            case TransferEnded():
                self._team.incoming.end(event)
                self._take_ended(now)
            case RankReceived():
                self._take_received(event, now)
                self._take_ended(now)
            case Submitted():
                self._submit(event, now)
            case GrammarReady():
                self._grammar_ready(event)
            case Aborted():
                self._abort([request_id_of(event.client, event.wire_id)], now)
            case ClientArrived():
                self._outbox.arrived(event.client)
            case ClientGone():
                gone = [name for name, request in self._requests.items() if request.client is event.client]
                self._abort(gone, now)
                self._outbox.gone(event.client)
            case StatusWanted():
                event.reply(self.status())
            case LoadWanted():
                event.reply(self._replica_load())
            case CacheCleared():
                self._cache.pool.clear_cache()
                event.reply()
            case DrainStarted():
                self._drain = event
                self._outbox.report_load()

    def step(self, now: float) -> bool:
        """Compute once; returns whether there was anything to compute."""
        self._expire(now)
        self._settle_grammars()
        for ended in self._transfers.overdue(now) if self._transfers is not None else ():
            self._end_transfer(ended, now)
        credit = self._transfers.credit(now) if self._transfers is not None else NO_PREFILL
        plan = self._scheduler.schedule(now, credit)
        for sequence in plan.admitted:
            self._requests[sequence.request_id].phases.admitted(now)
        if plan.to_clear:
            self._team.apply(ClearBlocks(plan.to_clear))
        for sequence in plan.transfers:
            if self._transfers is None or not self._transfers.start(sequence, now):
                self._scheduler.transfer_refused(sequence)
        if plan.transfers:
            self._take_ended(now)
        if plan.rows:
            try:
                self._compute(plan, now)
            except RankLost:
                raise
            except Exception:
                log.exception("a step failed; its requests are given up")
                self._fail_step(plan)
        self._outbox.flush(now, self.idle)
        if plan.rows and self._scheduler.idle:
            self._cache.pool.check()
        if self._drain is not None and self.idle:
            self._drain.drained()
        return bool(plan.rows)

    @property
    def idle(self) -> bool:
        """Whether it has no request at all."""
        return self._scheduler.idle

    def load(self) -> wire.Load:
        """How full it is."""
        counts = self._cache.counts()
        waiting = self._scheduler.waiting
        return wire.Load(
            running_requests=len(self._scheduler.running),
            waiting_requests=len(self._scheduler.preparing) + len(waiting),
            receiving_requests=len(self._scheduler.receiving),
            free_blocks=counts.free,
            cached_blocks=counts.cached,
            total_blocks=counts.total,
            outstanding_prompt_tokens=waiting.tokens,
            prefill_peers=self._transfers.peers if self._transfers is not None else 0,
            queue_limit=self._scheduler.queue_limit,
            queue_ms_per_request=int((self._scheduler.pace.wait(1) or 0.0) * 1e3),
            draining=self._drain is not None,
        )

    def _replica_load(self) -> ReplicaLoad:
        """What waits for a prefill replica needs no other decode replica."""
        counts, scheduler = self._cache.counts(), self._scheduler
        waiting = scheduler.waiting
        return ReplicaLoad(
            queued_prompt_tokens=waiting.tokens if scheduler.awaits_prefill else 0,
            occupancy=occupancy(
                kv_use=counts.held / counts.total,
                seats_used=len(scheduler.running) + len(scheduler.receiving),
                seats=self._config.max_running_requests,
                queued=0 if scheduler.awaits_prefill else len(waiting),
            ),
        )

    def status(self) -> wire.StatusReply:
        """Everything that a status page shows."""
        self.counters.preemptions = self._scheduler.preemptions
        self.counters.local_prefills = self._scheduler.local_prefills
        self.counters.prefix_queries = self._scheduler.prefix_queries
        self.counters.prefix_hits = self._scheduler.prefix_hits
        if self._transfers is not None:
            others = self._team.followers_totals()
            self.counters.payload_bytes = self._team.incoming.payload_bytes + others.received_bytes
            self.counters.stale_pieces = self._team.incoming.stale_pieces + others.stale_pieces
        return wire.StatusReply(
            role=self._config.role.value,
            replica_id=self._replica_id,
            load=self.load(),
            counters=self.counters,
            held_blocks=self._cache.counts().held,
            block_size=self._config.block_size,
            owner_layers=self._runner.owner_layers,
            total_layers=self._runner.attention_layers,
            prefill_error=self._transfers.last_error if self._transfers is not None else "",
            prefill_transfers=self._transfers.by_prefill_replica() if self._transfers is not None else [],
        )

    def stop(self, now: float) -> None:
        """Give up everything."""
        for name in list(self._requests):
            self._fail(name, Failure.STOPPED, "the replica is shutting down")
        self._outbox.flush(now, self.idle)
        if self._grammars is not None:
            self._grammars.close()
        if self._transfers is not None:
            self._transfers.close()

    # Requests

    def _submit(self, event: Submitted, now: float) -> None:
        client, submit = event.client, event.submit
        name = request_id_of(client, submit.request_id)
        self._outbox.submitted(client)
        try:
            if name in self._requests:
                raise InvalidRequest(f"request_id {submit.request_id} is already in use")
            sequence = make_sequence(submit, name, self._limits, now)
            grammar = sequence.sampling.grammar
            if grammar is not None and self._grammars is None:
                raise InvalidRequest("this replica was started without a tokenizer, which grammars need")
        except InvalidRequest as error:
            self._refuse(client, submit.request_id, Failure.INVALID, str(error))
            return
        if self._drain is not None:
            self._refuse(client, submit.request_id, Failure.DRAINING, "the replica takes nothing new")
            return
        refusal = self._refusal(sequence, now)
        if refusal is not None:
            self.counters.requests_refused += 1
            self._refuse(client, submit.request_id, *refusal)
            return
        phases = PromptPhases(event.arrived)
        self._requests[name] = Request(client, submit.request_id, open_choices=submit.n, phases=phases)
        self._scheduler.add(sequence)
        if grammar is not None and self._grammars is not None:
            self._grammars.prepare(sequence, grammar)

    def _refusal(self, sequence: Sequence, now: float) -> tuple[Failure, str] | None:
        """Why a new request cannot queue, if it cannot. May make room at the cost of who has more than a fair share."""
        wait, patience = self._scheduler.wait(sequence), sequence.start_by - now
        if wait is not None and wait > patience:
            slow = f"its turn would come in about {wait:.0f} s, but it must start within {patience:.1f} s"
            return Failure.QUEUE_SLOW, slow
        if self._scheduler.full:
            full = f"the queue holds {len(self._scheduler.waiting)} requests already (--max-waiting-requests)"
            displaced = self._scheduler.waiting.displaced_by(sequence.caller)
            if displaced is None:
                return Failure.QUEUE_FULL, full
            self._fail(displaced.request_id, Failure.DISPLACED, f"{full}, too many of them yours")
        return None

    def _abort(self, names: Iterable[RequestId], now: float) -> None:
        for name in names:
            if self._drop(name, now) is not None:
                self.counters.requests_aborted += 1

    def _expire(self, now: float) -> None:
        late = {sequence.request_id: sequence for sequence in self._scheduler.expired(now)}
        for name, sequence in late.items():
            self._fail(name, sequence.lateness(now), sequence.overdue(now))

    def _fail(self, name: RequestId, failure: Failure, message: str) -> None:
        request = self._drop(name, 0.0)
        if request is not None:
            overloaded = failure.kind == wire.ERROR_KIND_OVERLOADED
            self.counters.requests_failed += not overloaded
            self.counters.requests_refused += overloaded
            self._refuse(request.client, request.wire_id, failure, message)

    def _drop(self, name: RequestId, now: float) -> Request | None:
        """Forget a request and everything that it holds, here and at its prefill replica."""
        if self._transfers is not None:
            self._transfers.cancel(name, now)
        self._scheduler.finish(self._scheduler.of_request(name))
        return self._requests.pop(name, None)

    def _refuse(self, client: Client, wire_id: str, failure: Failure, message: str) -> None:
        self.counters.failures[failure] += 1
        # The message may quote the request. Under load there are many refusals.
        level = logging.DEBUG if failure.refused else logging.WARNING
        log.log(level, "%s of %s: %s", wire_id, client.client_id, failure)
        error = wire.Error(kind=failure.kind, message=message, reason=failure)
        if failure.kind == wire.ERROR_KIND_OVERLOADED:
            error.retry_after_ms = int(self._scheduler.pace.retry_after(len(self._scheduler.waiting)) * 1e3)
        self._outbox.refuse(client, wire_id, error)

    # Grammars

    def _grammar_ready(self, event: GrammarReady) -> None:
        for sequence in self._scheduler.of_request(event.request_id):
            if isinstance(event.outcome, Exception):
                self._fail_grammar(event.request_id, event.outcome)
            else:
                sequence.constraint = event.outcome
                self._scheduler.prepared(sequence)

    def _settle_grammars(self) -> None:
        for ended in self._grammars.settle() if self._grammars is not None else ():
            if isinstance(ended, CannotGoOn):
                self._fail_grammar(ended.sequence.request_id, ended.error)
            elif ended.state is not SequenceState.FINISHED:
                self._scheduler.finish([ended])
                self._outbox.end(ended, wire.FINISH_REASON_STOP)

    def _fail_grammar(self, name: RequestId, error: BaseException) -> None:
        if isinstance(error, GrammarError):
            self._fail(name, Failure.INVALID, str(error))
        else:
            log.error("%s: its grammar could not be used", name, exc_info=error)
            self._fail(name, Failure.GRAMMAR, "the replica failed over this request's grammar")

    # Transfers

    def _take_ended(self, now: float) -> None:
        """Of the leading rank's; others report theirs. One that fails elsewhere ends here by being closed."""
        while ended := self._team.incoming.take_ended():
            for received in ended:
                self._take_received(received, now)

    def _take_received(self, event: RankReceived, now: float) -> None:
        """A rank is done with a transfer."""
        assert self._transfers is not None
        ended = self._transfers.received(event, now)
        if ended is not None:
            self._end_transfer(ended, now)

    def _end_transfer(self, ended: Ended, now: float) -> None:
        assert self._transfers is not None
        sequence = ended.sequence
        report = self._requests[sequence.request_id].transfer
        if ended.end is None:
            report.retransmitted_bytes += ended.received_bytes
            self.counters.retransmitted_bytes += ended.received_bytes
            assert ended.failure is not None
            self.counters.transfer_failures[ended.failure] += 1
            if ended.busy:
                self._scheduler.transfer_refused(sequence)
            else:
                self.counters.transfers_failed += 1
                self._scheduler.transfer_failed(sequence)
            return
        layout = self._runner.layout
        bound = replica_lower_bound(layout, ended.ranges, self._team.size)
        unshared = unshared_bytes(layout, ended.ranges, self._team.size)
        report.payload_bytes += ended.received_bytes
        report.lower_bound_bytes += bound
        report.unshared_bytes += unshared
        report.transfer_ms += (now - ended.started) * 1e3
        report.queue_ms += ended.end.queue_seconds * 1e3
        report.attempts = sequence.transfer_attempts + 1
        report.prefill_replica = ended.incarnation
        cached = max(0, ended.end.cached_tokens - sequence.prefix_len)
        self._requests[sequence.request_id].prefill_cached_tokens = cached
        self._requests[sequence.request_id].phases.received(ended.end, now)
        self.counters.transfers += 1
        self.counters.completed_bytes += ended.received_bytes
        self.counters.lower_bound_bytes += bound
        self.counters.unshared_bytes += unshared
        self.counters.transfer_seconds += now - ended.started
        self._transfers.count(ended, unshared)
        self._scheduler.transfer_completed(sequence)

    # Steps

    def _compute(self, plan: StepPlan, now: float) -> None:
        logits = self._team.apply(plan.compute)
        if logits is not None:
            take_prompt_logprobs(self._requests, plan, logits)
        tokens = sample(logits, plan.draws) if logits is not None else []
        described = drawn_logprobs(plan, tokens, logits) if logits is not None else {}
        self.counters.steps += 1
        committed = self._scheduler.commit(plan, tokens, now)
        if committed.copies:
            self._team.apply(CopyBlocks(committed.copies))
        for sampled in committed.sampled:
            self._outbox.token(sampled, described.get(sampled.draw))
            if self._grammars is not None and sampled.sequence.constraint is not None:
                self._grammars.follow(sampled.sequence)
        self._finish_without_tokens(plan)

    def _finish_without_tokens(self, plan: StepPlan) -> None:
        """End requests that wanted only their prompt's log-probabilities."""
        for scheduled in plan.rows:
            sequence = scheduled.sequence
            if sequence.sampling.max_tokens == 0 and sequence.prompt_reported:
                request = self._requests[sequence.request_id]
                self._scheduler.finish([sequence])
                for choice in range(request.open_choices):
                    self._outbox.end(sequence, wire.FINISH_REASON_LENGTH, sequence.choice + choice)

    def _fail_step(self, plan: StepPlan) -> None:
        for name in dict.fromkeys(scheduled.sequence.request_id for scheduled in plan.rows):
            self._fail(name, Failure.STEP, "the replica failed while it computed this request")
