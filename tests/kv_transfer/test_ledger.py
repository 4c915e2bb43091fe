from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kv_transfer.layout import CacheLayout, Piece
from kv_transfer.ledger import Ledger, UnexpectedPiece
from kv_transfer.manifest import Manifest
from kv_transfer.plan import plan_pieces
from tests.kv_transfer.layouts import layouts, make_layout, token_ranges


def manifest(layout: CacheLayout, held: int, end: int) -> Manifest:
    return Manifest("r", 1, held, end, blocks=(), deadline=0.0, layout=layout)


@given(layout=layouts, tokens=token_ranges(), limit=st.integers(1, 400), data=st.data())
@settings(max_examples=100, deadline=None)
def test_pieces_complete_a_transfer_in_any_order(
    layout: CacheLayout, tokens: tuple[int, int], limit: int, data: st.DataObject
) -> None:
    expected = manifest(layout, *tokens)
    ledger = Ledger(expected)
    pieces = data.draw(st.permutations(list(plan_pieces(layout, *tokens, limit))))
    for piece in pieces:
        assert not ledger.complete
        ledger.check(piece, piece.payload_bytes(layout))
        ledger.record(piece)
    assert ledger.complete
    assert ledger.received_bytes == expected.expected_bytes == layout.bytes_per_token * (tokens[1] - tokens[0])


class LedgerMachine(RuleBasedStateMachine):
    """A ledger against a set of (layer, token): whatever a peer sends, only what is missing is taken."""

    @initialize(layout=layouts, held=st.integers(0, 5), count=st.integers(1, 6))
    def start(self, layout: CacheLayout, held: int, count: int) -> None:
        self.layout, self.held, self.end = layout, held, held + count
        self.ledger = Ledger(manifest(layout, held, self.end))
        self.expected = set(product(range(len(layout.owners)), range(held, self.end)))
        self.arrived: set[tuple[int, int]] = set()

    @rule(
        layers=st.tuples(st.integers(0, 7), st.integers(0, 7)),
        tokens=st.tuples(st.integers(0, 12), st.integers(0, 12)),
        excess=st.sampled_from([0, 0, 0, 0, 1, -1, 4096]),
    )
    def anything(self, layers: tuple[int, int], tokens: tuple[int, int], excess: int) -> None:
        piece = Piece(*layers, *tokens)
        slots = set(product(range(*layers), range(*tokens)))
        size = sum(self.layout.owners[layer].bytes_per_token for layer, _ in slots & self.expected)
        good = slots and slots <= self.expected and not slots & self.arrived and not excess
        self._offer(piece, size + excess, slots if good else None)

    @precondition(lambda self: hasattr(self, "ledger") and self.arrived != self.expected)
    @rule(data=st.data())
    def something_that_lacks(self, data: st.DataObject) -> None:
        layer, token = data.draw(st.sampled_from(sorted(self.expected - self.arrived)))
        size = self.layout.owners[layer].bytes_per_token
        self._offer(Piece(layer, layer + 1, token, token + 1), size, {(layer, token)})

    def _offer(self, piece: Piece, size: int, slots: set[tuple[int, int]] | None) -> None:
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
            assert self.ledger.received_bytes == sum(
                self.layout.owners[layer].bytes_per_token for layer, _ in self.arrived
            )


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(max_examples=60, stateful_step_count=20, deadline=None)


@pytest.mark.parametrize(
    ("piece", "size", "message"),
    [
        (Piece(0, 3, 4, 10), 18 * 8, "layers 0–3 of 2 owners"),
        (Piece(1, 1, 4, 10), 0, "layers 1–1 of 2 owners"),
        (Piece(0, 1, 3, 10), 7 * 8, "tokens 3–10, expected within 4–10"),
        (Piece(0, 1, 9, 11), 2 * 8, "tokens 9–11, expected within 4–10"),
        (Piece(0, 1, 6, 6), 0, "tokens 6–6"),
        (Piece(0, 2, 4, 10), 95, "95 payload bytes, expected 96"),
        (Piece(0, 2, 4, 10), 97, "97 payload bytes, expected 96"),
        (Piece(1, 2, 8, 9), 8, "arrived twice"),
    ],
)
def test_a_refusal_says_what_is_wrong_and_changes_nothing(piece: Piece, size: int, message: str) -> None:
    ledger = Ledger(manifest(make_layout(8, 8), 4, 10))
    ledger.record(Piece(1, 2, 7, 9))
    with pytest.raises(UnexpectedPiece, match=message):
        ledger.check(piece, size)
    assert ledger.received_bytes == 16
    for rest in (Piece(0, 1, 4, 10), Piece(1, 2, 4, 7), Piece(1, 2, 9, 10)):
        ledger.check(rest, 8 * (rest.token_end - rest.token_begin))
        ledger.record(rest)
    assert ledger.complete


def test_an_empty_transfer_is_complete() -> None:
    assert Ledger(manifest(make_layout(8, 8), 4, 4)).complete
