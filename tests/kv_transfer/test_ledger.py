from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kv_transfer.layout import CacheLayout, Piece, SlotRange
from kv_transfer.ledger import Ledger, UnexpectedPiece
from kv_transfer.manifest import Manifest
from kv_transfer.plan import lacking, plan_pieces, whole_section
from tests.kv_transfer.layouts import layouts, make_layout

Slot = tuple[int, int, int]
"""Section, owner, slot."""


def manifest(layout: CacheLayout, *ranges: SlotRange) -> Manifest:
    return Manifest("r", 1, ranges, layout)


def slots_of(piece: Piece) -> set[Slot]:
    return set(
        product([piece.section], range(piece.layer_begin, piece.layer_end), range(piece.slot_begin, piece.slot_end))
    )


def size_of(layout: CacheLayout, slots: set[Slot]) -> int:
    return sum(layout.sections[section].owners[layer].bytes_per_slot for section, layer, _ in slots)


@given(layout=layouts, prompt=st.integers(1, 40), limit=st.integers(1, 400), data=st.data())
def test_pieces_complete_a_transfer_in_any_order(
    layout: CacheLayout, prompt: int, limit: int, data: st.DataObject
) -> None:
    held = [data.draw(st.integers(0, 20)) for _ in layout.sections]
    expected = manifest(layout, *lacking(layout, prompt, held))
    ledger = Ledger(expected)
    sections = [whole_section(layout, index, slots) for index, slots in enumerate(expected.ranges)]
    planned = [piece for whole in sections for piece in plan_pieces(layout, whole, limit)]
    for piece in data.draw(st.permutations(planned)):
        assert not ledger.complete
        ledger.check(piece, piece.payload_bytes(layout))
        ledger.record(piece)
    assert ledger.complete
    every = set[Slot]().union(*map(slots_of, planned))
    assert ledger.received_bytes == expected.expected_bytes == size_of(layout, every)


class LedgerMachine(RuleBasedStateMachine):
    """A ledger against a set of slots: whatever a peer sends, only what is missing is taken."""

    @initialize(layout=layouts, data=st.data())
    def start(self, layout: CacheLayout, data: st.DataObject) -> None:
        self.layout = layout
        ranges = []
        for _ in layout.sections:
            begin = data.draw(st.integers(0, 5))
            ranges.append(SlotRange(begin, begin + data.draw(st.integers(0, 5))))
        self.ledger = Ledger(manifest(layout, *ranges))
        self.expected = {
            slot
            for index, slots in enumerate(ranges)
            for slot in product([index], range(len(layout.sections[index].owners)), range(slots.begin, slots.end))
        }
        self.arrived: set[Slot] = set()

    @rule(
        section=st.integers(-1, 4),
        layers=st.tuples(st.integers(0, 5), st.integers(0, 5)),
        tokens=st.tuples(st.integers(0, 12), st.integers(0, 12)),
        excess=st.sampled_from([0, 0, 0, 0, 1, -1, 4096]),
    )
    def anything(self, section: int, layers: tuple[int, int], tokens: tuple[int, int], excess: int) -> None:
        piece = Piece(section, *layers, *tokens)
        slots = slots_of(piece)
        good = slots and slots <= self.expected and not slots & self.arrived and not excess
        self._offer(piece, size_of(self.layout, slots & self.expected) + excess, slots if good else None)

    @precondition(lambda self: hasattr(self, "ledger") and self.arrived != self.expected)
    @rule(data=st.data())
    def something_that_lacks(self, data: st.DataObject) -> None:
        section, layer, slot = data.draw(st.sampled_from(sorted(self.expected - self.arrived)))
        size = self.layout.sections[section].owners[layer].bytes_per_slot
        self._offer(Piece(section, layer, layer + 1, slot, slot + 1), size, {(section, layer, slot)})

    @precondition(lambda self: hasattr(self, "ledger") and self.arrived)
    @rule(data=st.data())
    def something_that_came_before(self, data: st.DataObject) -> None:
        section, layer, slot = data.draw(st.sampled_from(sorted(self.arrived)))
        size = self.layout.sections[section].owners[layer].bytes_per_slot
        self._offer(Piece(section, layer, layer + 1, slot, slot + 1), size, None)

    def _offer(self, piece: Piece, size: int, slots: set[Slot] | None) -> None:
        if slots is None:
            with pytest.raises(UnexpectedPiece):
                self.ledger.check(piece, size)
        else:
            self.ledger.check(piece, size)
            self.ledger.record(piece)
            self.arrived |= slots

    @invariant()
    def agrees(self) -> None:
        if hasattr(self, "ledger"):
            assert self.ledger.complete == (self.arrived == self.expected)
            assert self.ledger.received_bytes == size_of(self.layout, self.arrived)


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(max_examples=80, stateful_step_count=20, deadline=None)


@pytest.mark.parametrize(
    ("piece", "size", "message"),
    [
        (Piece(0, 0, 3, 4, 10), 18 * 8, "layers 0–3 of 2 owners"),
        (Piece(0, 1, 1, 4, 10), 0, "layers 1–1 of 2 owners"),
        (Piece(0, 0, 1, 3, 10), 7 * 8, "slots 3–10, expected within 4–10"),
        (Piece(0, 0, 1, 9, 11), 2 * 8, "slots 9–11, expected within 4–10"),
        (Piece(0, 0, 1, 6, 6), 0, "slots 6–6"),
        (Piece(0, 0, 2, 4, 10), 95, "95 payload bytes, expected 96"),
        (Piece(0, 0, 2, 4, 10), 97, "97 payload bytes, expected 96"),
        (Piece(0, 1, 2, 8, 9), 8, "arrived twice"),
        (Piece(1, 0, 2, 4, 10), 96, "section 1 of 1"),
        (Piece(2**32 - 1, 0, 2, 4, 10), 96, "section 4294967295 of 1"),
    ],
)
def test_a_refusal_says_what_is_wrong_and_changes_nothing(piece: Piece, size: int, message: str) -> None:
    ledger = Ledger(manifest(make_layout(8, 8), SlotRange(4, 10)))
    ledger.record(Piece(0, 1, 2, 7, 9))
    with pytest.raises(UnexpectedPiece, match=message):
        ledger.check(piece, size)
    assert ledger.received_bytes == 16
    for rest in (Piece(0, 0, 1, 4, 10), Piece(0, 1, 2, 4, 7), Piece(0, 1, 2, 9, 10)):
        ledger.check(rest, 8 * (rest.slot_end - rest.slot_begin))
        ledger.record(rest)
    assert ledger.complete


def test_an_empty_transfer_is_complete() -> None:
    assert Ledger(manifest(make_layout(8, 8), SlotRange(4, 4))).complete
