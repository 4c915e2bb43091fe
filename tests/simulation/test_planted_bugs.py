"""Bugs that are planted in the real code, one at a time: the simulation finds each within a stated number of schedules.

What it would not find it would not guard.
"""

from collections.abc import Callable
from typing import Any

import pytest

from kv_transfer.ledger import Ledger
from kv_transfer.transfer import PieceArrived
from tests.simulation.simulation import ScheduleFailed, simulate
from worker.incoming_transfers import IncomingTransfers, RankReceived
from worker.kv_cache import manager
from worker.kv_cache.block_pool import BlockHash
from worker.kv_cache.group_blocks import WindowBlocks
from worker.kv_cache.manager import KVCacheManager
from worker.prefill_connector import Outcome, PrefillConnector
from worker.ranks.commands import CloseIncoming, Command, Compute, OpenIncoming
from worker.ranks.rank import Rank
from worker.scheduler import Scheduler
from worker.sequence import Sequence
from worker.transfers import Ended, Transfers

Plant = Callable[[pytest.MonkeyPatch], None]


def no_manifest_check(patch: pytest.MonkeyPatch) -> None:
    """A piece of a transfer that is not live any more is written where it once belonged."""
    take, open_ = IncomingTransfers.take, IncomingTransfers.open
    opened: dict[tuple[IncomingTransfers, int], OpenIncoming] = {}

    def remember(self: IncomingTransfers, command: OpenIncoming) -> None:
        opened[self, command.epoch] = command
        open_(self, command)

    def careless(self: IncomingTransfers, event: PieceArrived) -> None:
        frame = event.frame
        if frame.epoch not in self._live:
            command = opened[self, frame.epoch]
            for peer in self._peers._peers.get(command.incarnation, ()):
                if peer.pair.sender == event.sender:
                    self._runner.write_piece(peer.passing, frame.piece, command.tables, frame.payload)
        take(self, event)

    patch.setattr(IncomingTransfers, "open", remember)
    patch.setattr(IncomingTransfers, "take", careless)


def no_ledger_check(patch: pytest.MonkeyPatch) -> None:
    """A request runs when its stream has ended, whatever has arrived."""
    patch.setattr(Ledger, "complete", property(lambda self: True))


def a_piece_is_ticked_twice(patch: pytest.MonkeyPatch) -> None:
    """What came before is accepted again and counted again."""
    patch.setattr(Ledger, "check", lambda self, piece, payload_bytes: None)
    patch.setattr(Ledger, "complete", property(lambda self: self.received_bytes >= self._manifest.expected_bytes))


def freed_early_on_abort(patch: pytest.MonkeyPatch) -> None:
    """The blocks of a request that is aborted are free a few steps before its transfer is closed."""
    apply = Rank.apply
    waiting: dict[Rank, list[tuple[CloseIncoming, int]]] = {}

    def late(self: Rank, command: Command) -> Any:
        if isinstance(command, CloseIncoming):
            waiting.setdefault(self, []).append((command, 3))
            return None
        result = apply(self, command)
        left = [(closing, steps - isinstance(command, Compute)) for closing, steps in waiting.pop(self, [])]
        for closing, steps in left:
            if steps == 0:
                apply(self, closing)
        waiting[self] = [(closing, steps) for closing, steps in left if steps]
        return result

    patch.setattr(Rank, "apply", late)


def hashed_before_it_is_received(patch: pytest.MonkeyPatch) -> None:
    """Blocks can be found by others as soon as they are reserved for a transfer."""
    admit = KVCacheManager.admit_received

    def hasty(self: KVCacheManager, sequence: Sequence, *, tokens: int) -> bool:
        admitted = admit(self, sequence, tokens=tokens)
        if admitted and self._prefix_caching:
            for group, table in zip(self._groups, sequence.tables, strict=True):
                if group.block_size:
                    group.advance(table, sequence.hashes, len(sequence.tokens) - 1, publish=True)
        return admitted

    patch.setattr(KVCacheManager, "admit_received", hasty)


def salts_are_ignored(patch: pytest.MonkeyPatch) -> None:
    """One tenant's cached prefix is another's."""
    patch.setattr(manager, "first_parent", lambda salt: BlockHash(b""))


def the_first_rank_completes(patch: pytest.MonkeyPatch) -> None:
    """A request runs when one of its replica's ranks has everything."""
    received = Transfers.received

    def hasty(self: Transfers, event: RankReceived, now: float) -> Ended | None:
        running = self._running.get(event.epoch)  # type: ignore[call-overload]
        if running is not None and event.end is not None and event.rank == 0:
            running.waiting = {0}
        return received(self, event, now)

    patch.setattr(Transfers, "received", hasty)


def other_ranks_are_not_told_of_an_abort(patch: pytest.MonkeyPatch) -> None:
    """They go on writing into blocks that somebody else has by now."""
    apply = Rank.apply

    def deaf(self: Rank, command: Any) -> Any:
        if isinstance(command, CloseIncoming) and self.incoming is not None and self.incoming._rank > 0:
            return None
        return apply(self, command)

    patch.setattr(Rank, "apply", deaf)


def a_window_is_given_back_early(patch: pytest.MonkeyPatch) -> None:
    """By one token."""
    first_seen = WindowBlocks._first_seen
    patch.setattr(WindowBlocks, "_first_seen", lambda self, computed: first_seen(self, computed + 1))


def choices_share_what_they_write(patch: pytest.MonkeyPatch) -> None:
    """A fork's copies are not made."""
    branch = Scheduler._branch

    def forgetful(self: Scheduler, draw: Any, token: int, copies: list[Any]) -> Sequence:
        return branch(self, draw, token, [])

    patch.setattr(Scheduler, "_branch", forgetful)


def a_lost_transfer_is_not_asked_for_again(patch: pytest.MonkeyPatch) -> None:
    """A request whose transfer failed is forgotten in a queue."""
    patch.setattr(Scheduler, "transfer_failed", lambda self, sequence: None)


def a_refused_transfer_keeps_its_stream(patch: pytest.MonkeyPatch) -> None:
    """The credit of a prefill replica shrinks whenever it is busy."""
    closed = PrefillConnector.closed

    def leaky(self: PrefillConnector, opened: Any, outcome: Outcome, now: float) -> None:
        closed(self, opened, outcome, now)
        if outcome is Outcome.BUSY:
            opened.link.streams += 1

    patch.setattr(PrefillConnector, "closed", leaky)


WITHIN: dict[Plant, int] = {
    no_manifest_check: 400,
    no_ledger_check: 400,
    a_piece_is_ticked_twice: 2000,
    freed_early_on_abort: 500,
    hashed_before_it_is_received: 100,
    salts_are_ignored: 200,
    the_first_rank_completes: 100,
    other_ranks_are_not_told_of_an_abort: 1500,
    a_window_is_given_back_early: 50,
    choices_share_what_they_write: 50,
    a_lost_transfer_is_not_asked_for_again: 50,
    a_refused_transfer_keeps_its_stream: 200,
}


@pytest.mark.parametrize(("plant", "within"), WITHIN.items(), ids=lambda value: getattr(value, "__name__", str(value)))
def test_a_planted_bug_is_found(plant: Plant, within: int, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    assert any(_fails(seed) for seed in range(within))


def _fails(seed: int) -> bool:
    try:
        simulate(seed)
    except ScheduleFailed:
        return True
    return False
