from collections import Counter
from itertools import pairwise, product

from hypothesis import given, settings
from hypothesis import strategies as st

from kv_transfer.layout import CacheLayout, Piece
from kv_transfer.plan import lower_bound, plan_pieces
from tests.kv_transfer.layouts import layouts, make_layout, token_ranges


def size_of(layout: CacheLayout, piece: Piece) -> int:
    tokens = piece.token_end - piece.token_begin
    return sum(layout.owners[layer].bytes_per_token * tokens for layer in range(piece.layer_begin, piece.layer_end))


@given(layout=layouts, tokens=token_ranges(), limit=st.integers(1, 2000))
@settings(max_examples=200, deadline=None)
def test_pieces_cover_everything_once_in_producing_order(
    layout: CacheLayout, tokens: tuple[int, int], limit: int
) -> None:
    begin, end = tokens
    pieces = list(plan_pieces(layout, begin, end, limit))

    covered = Counter(
        slot
        for piece in pieces
        for slot in product(range(piece.layer_begin, piece.layer_end), range(piece.token_begin, piece.token_end))
    )
    assert covered == Counter(product(range(len(layout.owners)), range(begin, end)))
    for piece, following in pairwise(pieces):
        if following.layer_begin == piece.layer_begin:
            assert following.layer_end == piece.layer_end
            assert following.token_begin == piece.token_end
        else:
            assert following.layer_begin == piece.layer_end
    for piece in pieces:
        assert piece.payload_bytes(layout) == size_of(layout, piece)
        one_token_of_one_layer = piece.layer_end - piece.layer_begin == piece.token_end - piece.token_begin == 1
        assert size_of(layout, piece) <= limit or one_token_of_one_layer
    assert sum(map(size_of, [layout] * len(pieces), pieces)) == lower_bound(layout, end + 1, begin)


@given(layout=layouts, tokens=token_ranges(), limit=st.integers(1, 2000))
@settings(max_examples=100, deadline=None)
def test_no_two_neighbours_would_have_fitted_into_one_piece(
    layout: CacheLayout, tokens: tuple[int, int], limit: int
) -> None:
    begin, end = tokens
    for piece, following in pairwise(plan_pieces(layout, begin, end, limit)):
        whole_range = (piece.token_begin, piece.token_end) == (begin, end)
        if whole_range:
            assert size_of(layout, Piece(piece.layer_begin, piece.layer_end + 1, begin, end)) > limit
        elif following.layer_begin == piece.layer_begin:
            longer = Piece(piece.layer_begin, piece.layer_end, piece.token_begin, piece.token_end + 1)
            assert size_of(layout, longer) > limit


def test_a_short_prompt_goes_in_one_piece() -> None:
    layout = make_layout(8, 8, 8)
    assert list(plan_pieces(layout, 3, 10, 8 * 3 * 7)) == [Piece(0, 3, 3, 10)]
    assert list(plan_pieces(layout, 3, 10, 8 * 3 * 7 - 1)) == [Piece(0, 2, 3, 10), Piece(2, 3, 3, 10)]


def test_nothing_to_send_makes_no_piece() -> None:
    assert list(plan_pieces(make_layout(8), 5, 5, 100)) == []
    assert list(plan_pieces(make_layout(8), 9, 5, 100)) == []


@given(layout=layouts, prompt=st.integers(1, 300), held=st.integers(0, 300))
@settings(deadline=None)
def test_lower_bound_is_what_lacks_of_every_owner(layout: CacheLayout, prompt: int, held: int) -> None:
    # The decode side computes the last prompt token itself.
    lacking = [token for token in range(prompt - 1) if token >= held]
    assert lower_bound(layout, prompt, held) == sum(o.bytes_per_token for o in layout.owners for _ in lacking)


def test_lower_bound_of_a_real_layout() -> None:
    # Qwen3-8B in bfloat16: 2 * 8 heads * 128 * 2 bytes per owner and token; 19 owners after sharing.
    assert lower_bound(make_layout(*[4096] * 36), 513, 0) == 512 * 147_456
    assert lower_bound(make_layout(*[4096] * 19), 513, 0) == 512 * 77_824
    assert lower_bound(make_layout(*[4096] * 19), 513, 500) == 12 * 77_824
    assert lower_bound(make_layout(4096), 1, 0) == 0
