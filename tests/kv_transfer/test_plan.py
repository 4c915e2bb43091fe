from collections import Counter
from dataclasses import replace
from itertools import pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_transfer.layout import CacheLayout, Lifetime, OwnerLayer, Piece, Section, SlotRange
from kv_transfer.plan import check_request, lacking, lower_bound, plan_pieces, whole_section
from kv_transfer.rank_pair import unshared_bytes
from tests.kv_transfer.layouts import HYBRID, layout_of, layouts, make_layout, needed_slots, slot_ranges


def size_of(layout: CacheLayout, piece: Piece) -> int:
    slots = piece.slot_end - piece.slot_begin
    owners = layout.sections[piece.section].owners
    return sum(owners[layer].bytes_per_slot * slots for layer in range(piece.layer_begin, piece.layer_end))


def slots_in(pieces: list[Piece]) -> Counter[tuple[int, int, int]]:
    """(section, owner, slot) of every slot of every piece."""
    return Counter(
        slot
        for piece in pieces
        for slot in product(
            [piece.section], range(piece.layer_begin, piece.layer_end), range(piece.slot_begin, piece.slot_end)
        )
    )


@st.composite
def large_pieces(draw: st.DrawFn, layout: CacheLayout) -> Piece:
    """Consecutive owners of a section, and any slots of them."""
    section = draw(st.integers(0, len(layout.sections) - 1))
    begin = draw(st.integers(0, len(layout.sections[section].owners) - 1))
    end = draw(st.integers(begin + 1, len(layout.sections[section].owners)))
    slots = draw(slot_ranges())
    return Piece(section, begin, end, slots.begin, slots.end)


@st.composite
def held_of(draw: st.DrawFn, layout: CacheLayout) -> list[int]:
    """What a decode replica may hold of every section."""
    return [draw(st.integers(0, 40)) for _ in layout.sections]


# Pieces


@given(layout=layouts, limit=st.integers(1, 2000), data=st.data())
@settings(max_examples=200)
def test_pieces_cover_everything_once_in_producing_order(layout: CacheLayout, limit: int, data: st.DataObject) -> None:
    whole = data.draw(large_pieces(layout))
    pieces = list(plan_pieces(layout, whole, limit))

    assert slots_in(pieces) == slots_in([whole])
    for piece, following in pairwise(pieces):
        if following.layer_begin == piece.layer_begin:
            assert following.layer_end == piece.layer_end
            assert following.slot_begin == piece.slot_end
        else:
            assert following.layer_begin == piece.layer_end
    for piece in pieces:
        assert piece.payload_bytes(layout) == size_of(layout, piece)
        one_slot_of_one_layer = piece.layer_end - piece.layer_begin == piece.slot_end - piece.slot_begin == 1
        assert size_of(layout, piece) <= limit or one_slot_of_one_layer


@given(layout=layouts, limit=st.integers(1, 2000), data=st.data())
def test_no_two_neighbours_would_have_fitted_into_one_piece(
    layout: CacheLayout, limit: int, data: st.DataObject
) -> None:
    whole = data.draw(large_pieces(layout))
    for piece, following in pairwise(plan_pieces(layout, whole, limit)):
        whole_range = (piece.slot_begin, piece.slot_end) == (whole.slot_begin, whole.slot_end)
        if whole_range:
            assert size_of(layout, replace(piece, layer_end=piece.layer_end + 1)) > limit
        elif following.layer_begin == piece.layer_begin:
            assert size_of(layout, replace(piece, slot_end=piece.slot_end + 1)) > limit


@given(layout=layouts, slots=slot_ranges(), data=st.data())
def test_a_section_is_one_piece_of_all_its_owners(layout: CacheLayout, slots: SlotRange, data: st.DataObject) -> None:
    section = data.draw(st.integers(0, len(layout.sections) - 1))
    owners = range(len(layout.sections[section].owners))
    every = Counter(product([section], owners, range(slots.begin, slots.end)))
    assert slots_in([whole_section(layout, section, slots)]) == every


@given(layout=layouts, prompt=st.integers(1, 60), limit=st.integers(1, 500), data=st.data())
@settings(max_examples=200)
def test_a_whole_transfer_sends_every_lacking_slot_of_every_owner_once_and_nothing_else(
    layout: CacheLayout, prompt: int, limit: int, data: st.DataObject
) -> None:
    """However the prompt is cut into chunks, and whatever is held."""
    held = data.draw(held_of(layout))
    ranges = lacking(layout, prompt, held)
    ends = data.draw(st.sets(st.integers(0, prompt - 1))) | {prompt - 1}
    pieces: list[Piece] = []
    sent = [slots.begin for slots in ranges]
    for computed in sorted(ends):
        for index, (section, slots) in enumerate(zip(layout.sections, ranges, strict=True)):
            ready = section.ready(slots, prompt, computed)
            unsent = SlotRange(sent[index], ready.end)
            new = list(plan_pieces(layout, whole_section(layout, index, unsent), limit))
            if section.lifetime is Lifetime.STATE:
                assert not new or computed == prompt - 1, "a state is sent before it is the last one"
            pieces += new
            sent[index] = ready.end

    expected = Counter(
        (index, layer, slot)
        for index, (section, first) in enumerate(zip(layout.sections, held, strict=True))
        for layer in range(len(section.owners))
        for slot in needed_slots(section, prompt)
        if slot >= first
    )
    assert slots_in(pieces) == expected
    assert sum(size_of(layout, piece) for piece in pieces) == lower_bound(layout, ranges)


def test_a_short_prompt_goes_in_one_piece() -> None:
    layout = make_layout(8, 8, 8)
    whole = Piece(0, 0, 3, 3, 10)
    assert list(plan_pieces(layout, whole, 8 * 3 * 7)) == [whole]
    assert list(plan_pieces(layout, whole, 8 * 3 * 7 - 1)) == [Piece(0, 0, 2, 3, 10), Piece(0, 2, 3, 3, 10)]


def test_a_state_larger_than_the_limit_is_still_whole() -> None:
    assert list(plan_pieces(HYBRID, Piece(2, 0, 2, 0, 1), 60)) == [Piece(2, 0, 1, 0, 1), Piece(2, 1, 2, 0, 1)]


def test_nothing_to_send_makes_no_piece() -> None:
    assert list(plan_pieces(make_layout(8), Piece(0, 0, 1, 5, 5), 100)) == []


# What lacks


@given(layout=layouts, prompt=st.integers(1, 60), data=st.data())
@settings(max_examples=200)
def test_lacking_and_its_bytes_slot_by_slot(layout: CacheLayout, prompt: int, data: st.DataObject) -> None:
    held = data.draw(held_of(layout))
    ranges = lacking(layout, prompt, held)
    bound = unshared = 0
    for section, slots, first in zip(layout.sections, ranges, held, strict=True):
        missing = {slot for slot in needed_slots(section, prompt) if slot >= first}
        assert set(range(slots.begin, slots.end)) == missing
        for owner in section.owners:
            bound += owner.bytes_per_slot * len(missing)
            unshared += (1 + owner.sharers) * owner.bytes_per_slot * len(missing)
    assert lower_bound(layout, ranges) == bound
    assert unshared_bytes(layout, ranges, receivers=1) == unshared
    assert check_request(layout, prompt, ranges) is None


def test_lower_bound_of_a_real_layout() -> None:
    # Qwen3-8B in bfloat16: 2 * 8 heads * 128 * 2 bytes per owner and token; 19 owners after sharing.
    def bound(owners: int, prompt: int, held: int) -> int:
        layout = make_layout(*[4096] * owners)
        return lower_bound(layout, lacking(layout, prompt, [held]))

    assert bound(36, 513, 0) == 512 * 147_456
    assert bound(19, 513, 0) == 512 * 77_824
    assert bound(19, 513, 500) == 12 * 77_824
    assert bound(1, 1, 0) == 0


def test_lower_bound_of_a_hybrid_model() -> None:
    # Gemma 3n E2B in bfloat16: 2 * 2 heads * 256 * 2 bytes; 4 full and 16 sliding owners of window 512, 10 share.
    owner = [OwnerLayer(f"layers.{index}", 2, 2048, 0) for index in range(20)]
    gemma = layout_of(
        Section(Lifetime.EVERY_TOKEN, 0, 0, tuple(owner[:4])), Section(Lifetime.LAST_TOKENS, 512, 0, tuple(owner[4:]))
    )
    assert lower_bound(gemma, lacking(gemma, 101, [0, 0])) == 100 * 40_960
    assert lower_bound(gemma, lacking(gemma, 2001, [0, 0])) == 2000 * 8192 + 511 * 32_768
    assert lower_bound(gemma, lacking(gemma, 2001, [1600, 1600])) == 400 * 40_960
    # Qwen3-Next-80B: 12 attention owners, and 36 states of float32 [32, 128, 128] and bfloat16 [8192, 3], once.
    state = 32 * 128 * 128 * 4 + 8192 * 3 * 2
    qwen = layout_of(
        Section(Lifetime.EVERY_TOKEN, 0, 0, tuple(OwnerLayer(f"a{i}", 2, 2048, 0) for i in range(12))),
        Section(Lifetime.STATE, 0, 0, tuple(OwnerLayer(f"s{i}", 0, state, 0) for i in range(36))),
    )
    for prompt in (2, 1001):
        assert lower_bound(qwen, lacking(qwen, prompt, [0, 0])) == (prompt - 1) * 24_576 + 36 * state
    assert lower_bound(qwen, lacking(qwen, 1, [0, 0])) == 0


# What may be asked for


@given(layout=layouts, prompt=st.integers(1, 16), data=st.data())
@settings(max_examples=200)
def test_a_request_may_ask_for_the_end_of_what_is_needed_and_nothing_else(
    layout: CacheLayout, prompt: int, data: st.DataObject
) -> None:
    numbers = st.integers(0, 17)
    asked = [SlotRange(data.draw(numbers), data.draw(numbers)) for _ in layout.sections]
    for index in range(len(asked)):
        if data.draw(st.booleans()):
            asked[index] = lacking(layout, prompt, [data.draw(numbers)] * len(layout.sections))[index]
    possible = [set[SlotRange]() for _ in layout.sections]
    for held in range(prompt + 1):
        for index, slots in enumerate(lacking(layout, prompt, [held] * len(layout.sections))):
            possible[index].add(slots)
    good = all(slots in each for slots, each in zip(asked, possible, strict=True))
    assert (check_request(layout, prompt, asked) is None) == good


@pytest.mark.parametrize(
    ("ranges", "message"),
    [
        ([(0, 9), (6, 9)], "2 slot ranges for 3 sections"),
        ([(0, 9), (6, 9), (0, 1), (0, 1)], "4 slot ranges for 3 sections"),
        ([(0, 8), (6, 9), (0, 1)], "tokens 0–8 of section 0, of which a prompt of 10 tokens needs 0–9"),
        ([(0, 10), (6, 9), (0, 1)], "tokens 0–10 of section 0"),
        ([(0, 9), (5, 9), (0, 1)], "tokens 5–9 of section 1, of which a prompt of 10 tokens needs 6–9"),
        ([(0, 9), (6, 9), (0, 2)], "state 0–2 of section 2, of which a prompt of 10 tokens needs 0–1"),
        ([(0, 9), (6, 9), (0, 0)], "state 0–0 of section 2"),
        ([(10, 9), (6, 9), (0, 1)], "tokens 10–9 of section 0"),
    ],
)
def test_a_refused_request_is_told_what_it_could_have(ranges: list[tuple[int, int]], message: str) -> None:
    problem = check_request(HYBRID, 10, [SlotRange(*slots) for slots in ranges])
    assert problem is not None
    assert message in problem
