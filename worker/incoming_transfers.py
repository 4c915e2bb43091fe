"""A decode rank's transfers under way: which streams bring what, ledgers, and the pieces that arrive for them.

One per decode rank, used on its engine's thread only. A transfer is opened when blocks were reserved for it, and ends
complete, failed, or closed with its request; pages are written only between those two moments.
"""

import logging
from dataclasses import dataclass, field

from kv_transfer.frame import EndFrame
from kv_transfer.ledger import Ledger, UnexpectedPiece
from kv_transfer.manifest import Manifest
from kv_transfer.rank_pair import PairLayout
from kv_transfer.staging import StagingBudget
from kv_transfer.transfer import PieceArrived, Transfer, TransferEnded
from worker.model_runner import ModelRunner
from worker.prefill_peers import PrefillPeers
from worker.ranks.commands import CloseIncoming, OpenIncoming

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RankReceived:
    """How a transfer ended on rank ``rank``: with all that it needs if there is an ``end``, else with an ``error``.

    ``busy``: the prefill replica had no stream to spare.
    """

    rank: int
    request_id: str
    epoch: int
    received_bytes: int
    end: EndFrame | None
    error: str = ""
    busy: bool = False


@dataclass(slots=True)
class _Source:
    """What comes from one prefill rank."""

    passing: PairLayout
    ledger: Ledger
    transfer: Transfer
    address: str
    end: EndFrame | None = None


@dataclass(slots=True)
class _Incoming:
    command: OpenIncoming
    sources: dict[int, _Source] = field(default_factory=dict)

    @property
    def received_bytes(self) -> int:
        return sum(source.ledger.received_bytes for source in self.sources.values())


class IncomingTransfers:
    """See the module; of rank ``rank``.

    ``payload_bytes`` were written so far, ``stale_pieces`` came when nobody wanted them any more."""

    def __init__(
        self,
        runner: ModelRunner,
        peers: PrefillPeers,
        staging: StagingBudget,
        rank: int = 0,
    ) -> None:
        self._runner = runner
        self._peers = peers
        self._staging = staging
        self._rank = rank
        # By epoch: several choices of one request may be received at once, after they were preempted.
        self._live: dict[int, _Incoming] = {}
        self._ended: list[RankReceived] = []
        self.payload_bytes = 0
        self.stale_pieces = 0

    def take_ended(self) -> list[RankReceived]:
        """How transfers have ended here since this was last asked."""
        ended, self._ended = self._ended, []
        return ended

    def open(self, command: OpenIncoming) -> None:
        """Ask the prefill replica's ranks for what this one lacks."""
        incoming = self._live[command.epoch] = _Incoming(command)
        for peer, transfer in self._peers.open(command):
            passing = peer.passing
            manifest = Manifest(command.request_id, command.epoch, passing.slots(command.lacking), passing.layout)
            incoming.sources[peer.pair.sender] = _Source(passing, Ledger(manifest), transfer, peer.address)
        if not incoming.sources:
            self._end(incoming, f"{command.incarnation} is gone or does not answer")

    def take(self, event: PieceArrived) -> None:
        """Check a piece and write it; whatever no live manifest covers is dropped."""
        frame = event.frame
        try:
            incoming = self._live.get(frame.epoch)
            source = None if incoming is None else incoming.sources.get(event.sender)
            if incoming is None or source is None or incoming.command.request_id != event.request_id:
                self.stale_pieces += 1
                return
            try:
                source.ledger.check(frame.piece, frame.payload.nbytes)
            except UnexpectedPiece as error:
                log.error("%s from %s: %s", event.request_id, source.address, error)
                source.transfer.cancel()
                return
            self._runner.write_piece(source.passing, frame.piece, incoming.command.tables, frame.payload)
            source.ledger.record(frame.piece)
            self.payload_bytes += frame.payload.nbytes
        finally:
            self._staging.give_back(frame.payload.nbytes)

    def end(self, event: TransferEnded) -> None:
        """A stream is over. The first that brought too little ends the transfer, the last that did not completes it."""
        incoming = self._live.get(event.epoch)
        source = None if incoming is None else incoming.sources.get(event.sender)
        if incoming is None or source is None:
            return
        if event.end is None or not source.ledger.complete:
            error = event.error if event.end is None else "the stream ended before everything had arrived"
            self._end(incoming, f"{source.address}: {error}" if source.address not in error else error, event.busy)
            return
        source.end = event.end
        if all(other.end is not None for other in incoming.sources.values()):
            self._end(incoming)

    def close(self, command: CloseIncoming) -> None:
        """Nothing is wanted any more; prefill ranks are told, and late pieces will be dropped."""
        incoming = self._live.get(command.epoch)
        if incoming is not None:
            self._end(incoming, "it was closed")

    def _end(self, incoming: _Incoming, error: str = "", busy: bool = False) -> None:
        del self._live[incoming.command.epoch]
        for source in incoming.sources.values():
            if error and source.end is None:
                source.transfer.cancel()
        # The lowest rank's is the request's own stream, where there is one.
        ends = [incoming.sources[sender].end for sender in sorted(incoming.sources)]
        self._ended.append(
            RankReceived(
                rank=self._rank,
                request_id=incoming.command.request_id,
                epoch=incoming.command.epoch,
                received_bytes=incoming.received_bytes,
                end=None if error else ends[0],
                error=error,
                busy=busy,
            )
        )
