"""A decode engine's transfers as its leading rank sees them: which prefill replica each comes from, which ranks wait.

One per decode engine, used on its thread only. A transfer begins when the scheduler has admitted a sequence for it, and
ends complete on every rank, cancelled with its request, or failed: when some rank's has, and the others have let go.
"""

import logging
from dataclasses import dataclass

from kv_transfer.frame import EndFrame
from kv_transfer.layout import Lifetime, SlotRange
from kv_transfer.plan import lacking
from worker.failure import TransferFailure
from worker.incoming_transfers import RankReceived
from worker.model_runner import ModelRunner
from worker.prefill_connector import OpenTransfer, Outcome, PrefillConnector
from worker.ranks.commands import CloseIncoming, OpenIncoming
from worker.ranks.team import RankTeam
from worker.scheduler import PrefillCredit
from worker.sequence import Epoch, RequestId, Sequence
from worker.wire import engine_pb2 as wire

log = logging.getLogger(__name__)

LATENESS = 5.0
"""Seconds after its deadline by which a stream must have ended."""
DEADLINE_GRACE = 0.1
"""Clocks of streams are a little ahead of the engine's."""


@dataclass(slots=True)
class _Running:
    sequence: Sequence
    opened: OpenTransfer
    ranges: tuple[SlotRange, ...]
    started: float
    waiting: set[int]
    received_bytes: int = 0
    end: EndFrame | None = None
    outcome: Outcome = Outcome.COMPLETE
    failure: TransferFailure | None = None


@dataclass(frozen=True, slots=True)
class Ended:
    """A transfer that is over: complete if there is an ``end``, else ``failure`` says why not.

    ``started`` is in the engine's clock, seconds.
    """

    sequence: Sequence
    incarnation: str
    ranges: tuple[SlotRange, ...]
    started: float
    received_bytes: int
    end: EndFrame | None
    failure: TransferFailure | None

    @property
    def busy(self) -> bool:
        """Whether the prefill replica had no stream to spare."""
        return self.failure is TransferFailure.BUSY


class Transfers:
    """See the module."""

    def __init__(self, runner: ModelRunner, team: RankTeam, connector: PrefillConnector) -> None:
        self._runner = runner
        self._team = team
        self._connector = connector
        self._running: dict[Epoch, _Running] = {}

    @property
    def peers(self) -> int:
        """Prefill replicas that can be used."""
        return self._connector.peers

    @property
    def last_error(self) -> str:
        """Why a prefill replica that exists cannot be used, if one cannot."""
        return self._connector.last_error

    def count(self, ended: Ended, unshared_bytes: int) -> None:
        """Account for a complete transfer at its prefill replica."""
        self._connector.count(ended.incarnation, ended.received_bytes, unshared_bytes)

    def by_prefill_replica(self) -> list[wire.PrefillTransfers]:
        """What every connected prefill replica has sent, as it is reported."""
        return [
            wire.PrefillTransfers(
                prefill_replica=incarnation,
                transfers=received.transfers,
                payload_bytes=received.payload_bytes,
                unshared_bytes=received.unshared_bytes,
            )
            for incarnation, received in self._connector.received().items()
        ]

    def credit(self, now: float) -> PrefillCredit:
        """What the prefill side offers."""
        return self._connector.credit(now)

    def start(self, sequence: Sequence, now: float) -> bool:
        """Ask for a receiving sequence's KV; False when no prefill replica can take it after all."""
        opened = self._connector.open(sequence, now)
        if opened is None:
            return False
        layout = self._runner.layout
        # Sinks are never held before.
        held = [
            0
            if section.lifetime is Lifetime.FIRST_TOKENS
            else sequence.tables[self._runner.group_of_section(index)].lacking_from
            for index, section in enumerate(layout.sections)
        ]
        ranges = lacking(layout, len(sequence.tokens), held)
        self._running[sequence.epoch] = _Running(sequence, opened, ranges, now, set(range(self._team.size)))
        self._team.apply(
            OpenIncoming(
                request_id=sequence.request_id,
                epoch=sequence.epoch,
                incarnation=opened.incarnation,
                lacking=ranges,
                tables=tuple(table.array() for table in sequence.tables),
                seconds=opened.deadline - now,
                token_ids=tuple(sequence.tokens[:-1]),
                cache_salt=sequence.salt,
                caller=sequence.caller,
                priority=sequence.priority,
            )
        )
        return True

    def received(self, event: RankReceived, now: float) -> Ended | None:
        """A rank is done with a transfer; returns it when it is over, complete or not."""
        running = self._running.get(Epoch(event.epoch))
        if running is None or event.rank not in running.waiting:
            return None
        running.waiting.remove(event.rank)
        running.received_bytes += event.received_bytes
        if event.rank == 0:
            running.end = event.end
        if event.end is None and running.outcome is Outcome.COMPLETE:
            source = running.opened.incarnation
            log.warning(
                "transfer of %s from %s failed on rank %d: %s", event.request_id, source, event.rank, event.error
            )
            if running.sequence.deadline <= now + DEADLINE_GRACE:
                # A stream that had no longer than its request says nothing about the peer.
                self._fail(running, Outcome.CANCELLED, TransferFailure.DEADLINE, now)
            elif event.busy:
                self._fail(running, Outcome.BUSY, TransferFailure.BUSY, now)
            else:
                self._fail(running, Outcome.FAILED, TransferFailure.BROKEN, now)
        return None if running.waiting else self._end(running, now)

    def overdue(self, now: float) -> list[Ended]:
        """Transfers of which some rank should have said long ago that it is done: nothing waits for ever."""
        late = [running for running in self._running.values() if now > running.opened.deadline + LATENESS]
        for running in late:
            name, source = running.sequence.request_id, running.opened.incarnation
            log.warning("a stream of %s from %s neither went on nor ended", name, source)
            if running.outcome is Outcome.COMPLETE:
                self._fail(running, Outcome.FAILED, TransferFailure.OVERDUE, now)
        return [self._end(running, now) for running in late]

    def cancel(self, name: RequestId, now: float) -> None:
        """The request is gone; its prefill replicas are told, and late pieces will be dropped."""
        for running in [running for running in self._running.values() if running.sequence.request_id == name]:
            if running.outcome is Outcome.COMPLETE:
                self._give_up(running, Outcome.CANCELLED, now)
            del self._running[running.sequence.epoch]

    def _fail(self, running: _Running, outcome: Outcome, failure: TransferFailure, now: float) -> None:
        running.failure = failure
        self._give_up(running, outcome, now)

    def _give_up(self, running: _Running, outcome: Outcome, now: float) -> None:
        """Have all ranks let go of it; those that still receive say what they had got."""
        running.outcome = outcome
        self._team.apply(CloseIncoming(running.sequence.epoch))
        self._connector.closed(running.opened, outcome, now)

    def _end(self, running: _Running, now: float) -> Ended:
        sequence, complete = running.sequence, running.outcome is Outcome.COMPLETE
        del self._running[sequence.epoch]
        if complete:
            self._connector.closed(running.opened, Outcome.COMPLETE, now)
        return Ended(
            sequence=sequence,
            incarnation=running.opened.incarnation,
            ranges=running.ranges,
            started=running.started,
            received_bytes=running.received_bytes,
            end=running.end if complete else None,
            failure=running.failure,
        )

    def close(self) -> None:
        """Drop every connection."""
        self._connector.close()
