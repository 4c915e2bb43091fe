from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.layout import CacheLayout, Lifetime, Piece, Section, SlotRange
from kv_transfer.rank_pair import unshared_bytes
from tests.kv_transfer.layouts import HYBRID, SINKS, layout_of, layouts, needed_slots


def slots_of(slots: SlotRange) -> set[int]:
    return set(range(slots.begin, slots.end))


@given(layout=layouts, prompt=st.integers(1, 40))
def test_needed_is_what_the_last_prompt_tokens_step_reads(layout: CacheLayout, prompt: int) -> None:
    for section in layout.sections:
        needed = section.needed(prompt)
        assert slots_of(needed) == needed_slots(section, prompt)
        assert len(needed) == len(needed_slots(section, prompt))


def test_a_window_needs_what_it_still_reaches_of_the_tokens_before_the_last() -> None:
    window = Section(Lifetime.LAST_TOKENS, 512, 0, ())
    # The last of 1000 tokens, at position 999, sees itself and the 511 before: 488 to 998.
    assert window.needed(1000) == SlotRange(488, 999)
    assert window.needed(100) == SlotRange(0, 99)
    assert window.needed(1) == SlotRange(0, 0)
    assert window.needed(512) == SlotRange(0, 511)
    assert window.needed(513) == SlotRange(1, 512)


def test_a_window_of_one_token_needs_nothing_that_was_before() -> None:
    assert len(Section(Lifetime.LAST_TOKENS, 1, 0, ()).needed(30)) == 0


@given(layout=layouts, prompt=st.integers(1, 30), held=st.integers(0, 30), steps=st.sets(st.integers(0, 30)))
def test_slots_are_ready_as_soon_as_they_exist_and_each_once(
    layout: CacheLayout, prompt: int, held: int, steps: set[int]
) -> None:
    for section in layout.sections:
        whole = section.needed(prompt)
        wanted = SlotRange(min(max(whole.begin, held), whole.end), whole.end)
        sent: list[int] = []
        for computed in sorted({step for step in steps if step < prompt - 1} | {prompt - 1}):
            ready = section.ready(wanted, prompt, computed)
            if section.lifetime is Lifetime.STATE:
                exists = slots_of(wanted) if computed == prompt - 1 else set()
            else:
                exists = {slot for slot in slots_of(wanted) if slot < computed}
            assert slots_of(ready) == exists
            assert ready.begin == wanted.begin
            sent += range(wanted.begin + len(sent), ready.end)
        assert sent == sorted(slots_of(wanted))


def test_a_state_is_ready_once_and_only_at_the_end() -> None:
    state = Section(Lifetime.STATE, 0, 0, ())
    needed = state.needed(10)
    assert [len(state.ready(needed, 10, computed)) for computed in range(11)] == [0] * 9 + [1, 1]


def test_sizes_count_owners_once_and_sharing_layers_only_when_asked() -> None:
    assert [section.bytes_per_slot for section in HYBRID.sections] == [24, 4, 150]
    unshared = [unshared_bytes(layout_of(section), [SlotRange(0, 1)], receivers=1) for section in HYBRID.sections]
    assert unshared == [8 + 4 * 16, 8, 150]
    assert [owner.name for owner in HYBRID.owners] == ["full.0", "full.1", "window.0", "state.0", "state.1"]


def test_sinks_and_the_window_behind_them_need_every_token_once() -> None:
    sinks, window = SINKS.sections
    needed = {prompt: (sinks.needed(prompt), window.needed(prompt)) for prompt in (1, 3, 5, 7, 8, 20)}
    assert needed == {
        1: (SlotRange(0, 0), SlotRange(0, 0)),
        3: (SlotRange(0, 2), SlotRange(2, 2)),
        5: (SlotRange(0, 3), SlotRange(3, 4)),
        7: (SlotRange(0, 3), SlotRange(3, 6)),
        8: (SlotRange(0, 3), SlotRange(4, 7)),
        20: (SlotRange(0, 3), SlotRange(16, 19)),
    }
    assert [owner.name for owner in SINKS.owners] == ["sinks.0", "sinks.1"]


def test_a_piece_is_as_large_as_its_owners_slots() -> None:
    assert Piece(0, 0, 2, 3, 10).payload_bytes(HYBRID) == 7 * 24
    assert Piece(0, 1, 2, 3, 10).payload_bytes(HYBRID) == 7 * 16
    assert Piece(1, 0, 1, 3, 4).payload_bytes(HYBRID) == 4
    assert Piece(2, 0, 2, 0, 1).payload_bytes(HYBRID) == 150
