"""A decode engine's transfers under way: reservations, ledgers, and the pieces that arrive for them.

One per decode engine, used on its thread only. A transfer begins when the scheduler has admitted a sequence for it, and
ends complete, failed, or cancelled with its request; pages are written only between those two moments.
"""

import logging
from dataclasses import dataclass

from kv_transfer.layout import Lifetime
from kv_transfer.ledger import Ledger, UnexpectedPiece
from kv_transfer.manifest import Manifest
from kv_transfer.plan import lacking
from kv_transfer.staging import StagingBudget
from kv_transfer.transfer import PieceArrived, TransferEnded
from worker.kv_cache.block_table import BlockTable
from worker.model_runner import ModelRunner
from worker.prefill_connector import OpenTransfer, Outcome, PrefillConnector
from worker.scheduler import PrefillCredit
from worker.sequence import Epoch, RequestId, Sequence
from worker.wire import engine_pb2 as wire

log = logging.getLogger(__name__)

LATENESS = 5.0
"""Seconds after its deadline by which a stream must have ended."""


@dataclass(frozen=True, slots=True)
class Incoming:
    """One transfer. ``started`` is in the engine's clock, seconds."""

    sequence: Sequence
    manifest: Manifest
    ledger: Ledger
    opened: OpenTransfer
    started: float


class IncomingTransfers:
    """See the module. ``counters`` are the engine's."""

    def __init__(
        self, runner: ModelRunner, connector: PrefillConnector, staging: StagingBudget, counters: wire.Counters
    ) -> None:
        self._runner = runner
        self._connector = connector
        self._staging = staging
        self._counters = counters
        # By epoch: several choices of one request may be received at once, after they were preempted.
        self._live: dict[Epoch, Incoming] = {}

    @property
    def peers(self) -> int:
        """Prefill replicas that can be used."""
        return self._connector.peers

    @property
    def last_error(self) -> str:
        """Why a prefill replica that exists cannot be used, if one cannot."""
        return self._connector.last_error

    def credit(self, now: float) -> PrefillCredit:
        """What the prefill side offers."""
        return self._connector.credit(now)

    def start(self, sequence: Sequence, now: float) -> bool:
        """Ask for a receiving sequence's KV; False when no prefill replica can take it after all."""
        layout = self._runner.layout
        # Sinks are never held before.
        held = [
            0 if section.lifetime is Lifetime.FIRST_TOKENS else self._table(sequence, index).lacking_from
            for index, section in enumerate(layout.sections)
        ]
        manifest = Manifest(
            request_id=sequence.request_id,
            epoch=sequence.epoch,
            ranges=lacking(layout, len(sequence.tokens), held),
            tables=tuple(tuple(table.blocks) for table in sequence.tables),
            deadline=sequence.deadline,
            layout=layout,
        )
        opened = self._connector.open(sequence, manifest, now)
        if opened is None:
            return False
        self._live[sequence.epoch] = Incoming(sequence, manifest, Ledger(manifest), opened, now)
        return True

    def _table(self, sequence: Sequence, section: int) -> BlockTable:
        """A table that says what a section's owners lack."""
        return sequence.tables[self._runner.group_of_section(section)]

    def take(self, event: PieceArrived) -> None:
        """Check a piece and write it; whatever no live manifest covers is dropped."""
        frame = event.frame
        try:
            incoming = self._live.get(Epoch(frame.epoch))
            if incoming is None or incoming.manifest.request_id != event.request_id:
                self._counters.stale_pieces += 1
                return
            try:
                incoming.ledger.check(frame.piece, frame.payload.nbytes)
            except UnexpectedPiece as error:
                log.error("%s from %s: %s", event.request_id, incoming.opened.incarnation, error)
                incoming.opened.transfer.cancel()
                return
            tables = [table.array() for table in incoming.sequence.tables]
            self._runner.write_piece(frame.piece, tables, frame.payload)
            incoming.ledger.record(frame.piece)
            self._counters.payload_bytes += frame.payload.nbytes
        finally:
            self._staging.give_back(frame.payload.nbytes)

    def end(self, event: TransferEnded, now: float) -> Incoming | None:
        """A stream is over; returns its transfer, complete or not, or None for one that was cancelled before."""
        incoming = self._live.pop(Epoch(event.epoch), None)
        if incoming is None:
            return None
        complete = event.end is not None and incoming.ledger.complete
        outcome = Outcome.COMPLETE if complete else Outcome.BUSY if event.busy else Outcome.FAILED
        self._connector.closed(incoming.opened, outcome, now)
        if not complete and not event.busy:
            log.warning("transfer of %s failed: %s", event.request_id, event.error)
        return incoming

    def overdue(self, now: float) -> list[TransferEnded]:
        """Ends of transfers whose streams should have said long ago that they are over: nothing waits for ever."""
        late = [incoming for incoming in self._live.values() if now > incoming.opened.deadline + LATENESS]
        for incoming in late:
            incoming.opened.transfer.cancel()
        return [
            TransferEnded(i.manifest.request_id, i.manifest.epoch, None, "its stream neither went on nor ended")
            for i in late
        ]

    def cancel(self, name: RequestId, now: float) -> None:
        """The request is gone; its prefill replicas are told, and late pieces will be dropped."""
        for incoming in [incoming for incoming in self._live.values() if incoming.sequence.request_id == name]:
            del self._live[incoming.sequence.epoch]
            incoming.opened.transfer.cancel()
            self._connector.closed(incoming.opened, Outcome.CANCELLED, now)

    def close(self) -> None:
        """Drop every connection."""
        self._connector.close()
