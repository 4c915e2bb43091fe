"""Small layouts, and strategies for them."""

from collections.abc import Set as AbstractSet
from itertools import count

from hypothesis import strategies as st

from kv_transfer.layout import CacheLayout, Lifetime, OwnerLayer, Section, SlotRange


def make_layout(*bytes_per_slot: int) -> CacheLayout:
    """Owners of the given sizes whose every token is needed; two layers share the first."""
    owners = tuple(OwnerLayer(f"layers.{i}", 2, size, 2 * (i == 0)) for i, size in enumerate(bytes_per_slot))
    return layout_of(Section(Lifetime.EVERY_TOKEN, 0, 0, owners))


def layout_of(*sections: Section) -> CacheLayout:
    """A layout of the given sections."""
    sharing = sum(owner.sharers for section in sections for owner in section.owners)
    return CacheLayout("fingerprint", "bfloat16", sections, sharing_digest="digest", sharing_layers=sharing)


LAYOUT = make_layout(8, 8, 8)

HYBRID = layout_of(
    Section(Lifetime.EVERY_TOKEN, 0, 0, (OwnerLayer("full.0", 2, 8, 0), OwnerLayer("full.1", 2, 16, 3))),
    Section(Lifetime.LAST_TOKENS, 4, 0, (OwnerLayer("window.0", 1, 4, 1),)),
    Section(Lifetime.STATE, 0, 0, (OwnerLayer("state.0", 0, 100, 0), OwnerLayer("state.1", 0, 50, 0))),
)
"""Full attention, a window and a state; of all but the state, the bytes of a token are 8 + 16 + 4."""

_SINKING = (OwnerLayer("sinks.0", 1, 4, 0), OwnerLayer("sinks.1", 1, 4, 1))
SINKS = layout_of(
    Section(Lifetime.FIRST_TOKENS, 0, 3, _SINKING),
    Section(Lifetime.LAST_TOKENS, 4, 3, _SINKING),
)
"""Owners that see the first three tokens and the last four."""


@st.composite
def _layouts(draw: st.DrawFn) -> CacheLayout:
    numbers = count()
    sections = []
    for lifetime in draw(st.lists(st.sampled_from(Lifetime), min_size=1, max_size=4)):
        window = draw(st.integers(1, 12)) if lifetime is Lifetime.LAST_TOKENS else 0
        sinks = draw(st.integers(0, 6)) if lifetime in (Lifetime.LAST_TOKENS, Lifetime.FIRST_TOKENS) else 0
        sizes = draw(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 2)), min_size=1, max_size=4))
        owners = tuple(OwnerLayer(f"layers.{next(numbers)}", 2, size, sharers) for size, sharers in sizes)
        sections.append(Section(lifetime, window, sinks, owners))
    return layout_of(*sections)


layouts = _layouts()


@st.composite
def slot_ranges(draw: st.DrawFn) -> SlotRange:
    """Slots ``[begin, end)``, at least one."""
    begin = draw(st.integers(0, 30))
    return SlotRange(begin, begin + draw(st.integers(1, 30)))


def needed_slots(section: Section, prompt_len: int) -> AbstractSet[int]:
    """Slots that the last of ``prompt_len`` tokens reads and that it does not write itself, one by one."""
    last = prompt_len - 1
    match section.lifetime:
        case Lifetime.EVERY_TOKEN:
            return set(range(last))
        case Lifetime.LAST_TOKENS:
            # Sinks are another section's.
            return {token for token in range(section.sinks, last) if last - token < section.window}
        case Lifetime.FIRST_TOKENS:
            return {token for token in range(last) if token < section.sinks}
        case Lifetime.STATE:
            # Before the first token there is no state.
            return {0} if last > 0 else set()
