"""What passes between ranks, against a count of single (rank, owner, head, slot) items that knows nothing of pairs."""

from collections import Counter
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.layout import CacheLayout, Lifetime, OwnerLayer, Section, SlotRange
from kv_transfer.plan import lower_bound, plan_pieces, whole_section
from kv_transfer.rank_pair import (
    ONLY_PAIR,
    PairLayout,
    RankPair,
    check_ranks,
    pair_layout,
    peers_of_receiver,
    replica_lower_bound,
    unshared_bytes,
)
from tests.kv_transfer.layouts import HYBRID, LAYOUT, SINKS, layout_of

BYTES_PER_HEAD = 3
HEADS = (1, 2, 4, 8)
RANKS = st.sampled_from((1, 2, 4, 8))


@st.composite
def layouts(draw: st.DrawFn) -> CacheLayout:
    """Owners of every lifetime with any number of heads; a latent has one."""
    sections = []
    for number, lifetime in enumerate(draw(st.lists(st.sampled_from(Lifetime), min_size=1, max_size=3))):
        heads = draw(st.lists(st.sampled_from(HEADS), min_size=1, max_size=4))
        owners = [OwnerLayer(f"{number}.{i}", count, count * BYTES_PER_HEAD, i % 2) for i, count in enumerate(heads)]
        sections.append(Section(lifetime, 5, 2, tuple(owners)))
    return layout_of(*sections)


@st.composite
def cases(draw: st.DrawFn) -> tuple[CacheLayout, list[SlotRange]]:
    """A layout and what is lacking of each section."""
    layout = draw(layouts())
    lacking = []
    for section in layout.sections:
        begin = draw(st.integers(0, 20))
        count = draw(st.integers(0, 1)) if section.lifetime is Lifetime.STATE else draw(st.integers(0, 40))
        lacking.append(SlotRange(begin, begin + count))
    return layout, lacking


def holders(heads: int, ranks: int) -> list[set[int]]:
    """Of every rank the heads that it holds: dealt out in order, each to its own ranks where those are more."""
    if heads >= ranks:
        return [set(range(heads)[rank * (heads // ranks) :][: heads // ranks]) for rank in range(ranks)]
    return [{rank // (ranks // heads)} for rank in range(ranks)]


def items(passing: PairLayout, lacking: list[SlotRange]) -> Counter[tuple[int, int, int, int]]:
    """(section, owner, head, slot) of everything that passes, by the pieces that would be sent."""
    found: Counter[tuple[int, int, int, int]] = Counter()
    for index, slots in enumerate(passing.slots(lacking)):
        origin = passing.sections[index]
        for piece in plan_pieces(passing.layout, whole_section(passing.layout, index, slots), max_piece_bytes=17):
            size = 0
            for owner in origin.owners[piece.layer_begin : piece.layer_end]:
                heads = range(owner.heads.begin, owner.heads.end)
                for head, slot in product(heads, range(piece.slot_begin, piece.slot_end)):
                    found[origin.section, owner.index, head, slot] += 1
                    size += BYTES_PER_HEAD
            assert size == piece.payload_bytes(passing.layout)
    return found


@given(case=cases(), senders=RANKS, receivers=RANKS)
def test_every_rank_gets_what_it_holds_exactly_once_from_ranks_that_have_it(
    case: tuple[CacheLayout, list[SlotRange]], senders: int, receivers: int
) -> None:
    layout, lacking = case
    total = 0
    for receiver in range(receivers):
        got: Counter[tuple[int, int, int, int]] = Counter()
        for sender in range(senders):
            passing = pair_layout(layout, RankPair(sender, senders, receiver, receivers))
            sent = items(passing, lacking)
            for section, owner, head, _ in sent:
                assert head in holders(layout.sections[section].owners[owner].heads, senders)[sender]
            got += sent
            total += lower_bound(passing.layout, passing.slots(lacking))
        needed = Counter(
            (index, number, head, slot)
            for index, (section, slots) in enumerate(zip(layout.sections, lacking, strict=True))
            for number, owner in enumerate(section.owners)
            for head in holders(owner.heads, receivers)[receiver]
            for slot in range(slots.begin, slots.end)
        )
        assert got == needed
    assert total == replica_lower_bound(layout, lacking, receivers)


@given(case=cases(), senders=RANKS, receivers=RANKS)
def test_ranks_that_hold_the_same_head_share_the_work(
    case: tuple[CacheLayout, list[SlotRange]], senders: int, receivers: int
) -> None:
    layout, lacking = case
    for receiver in range(receivers):
        counts: dict[tuple[int, int, int], list[int]] = {}
        for sender in range(senders):
            sent: Counter[tuple[int, int, int]] = Counter()
            for section, owner, head, _ in items(
                pair_layout(layout, RankPair(sender, senders, receiver, receivers)), lacking
            ):
                sent[section, owner, head] += 1
            for key, count in sent.items():
                counts.setdefault(key, []).append(count)
        for (section, owner, _), sizes in counts.items():
            copies = max(1, senders // layout.sections[section].owners[owner].heads)
            slots = len(lacking[section])
            assert all(size <= -(-slots // copies) for size in sizes)


@given(layout=layouts(), senders=RANKS, receivers=RANKS)
def test_a_rank_asks_those_that_hold_a_head_of_its_own_and_nobody_else(
    layout: CacheLayout, senders: int, receivers: int
) -> None:
    for receiver in range(receivers):
        common = {
            sender
            for sender in range(senders)
            for owner in layout.owners
            if holders(owner.heads, senders)[sender] & holders(owner.heads, receivers)[receiver]
        }
        assert set(peers_of_receiver(layout, receiver, receivers, senders)) == common
    # The request's own stream is between the first ranks.
    assert 0 in peers_of_receiver(layout, 0, receivers, senders)


@pytest.mark.parametrize("layout", [LAYOUT, HYBRID, SINKS])
def test_between_replicas_that_are_not_split_everything_passes(layout: CacheLayout) -> None:
    lacking = [SlotRange(0, 1)] * len(layout.sections)
    passing = pair_layout(layout, ONLY_PAIR)
    assert passing.slots(lacking) == tuple(lacking)
    assert [section.bytes_per_slot for section in passing.layout.sections] == [
        section.bytes_per_slot for section in layout.sections
    ]


def test_what_sharing_saves_counts_every_rank_that_holds_a_head() -> None:
    layout = layout_of(
        Section(Lifetime.EVERY_TOKEN, 0, 0, (OwnerLayer("latent", 1, 10, 2), OwnerLayer("heads", 2, 8, 0)))
    )
    lacking = [SlotRange(0, 5)]
    assert replica_lower_bound(layout, lacking, 1) == 5 * (10 + 8)
    assert replica_lower_bound(layout, lacking, 2) == 5 * (2 * 10 + 8)
    assert replica_lower_bound(layout, lacking, 4) == 5 * (4 * 10 + 2 * 8)
    assert unshared_bytes(layout, lacking, 4) == 5 * (3 * 4 * 10 + 2 * 8)


def test_sizes_that_no_model_of_this_layout_can_have_are_named() -> None:
    layout = layout_of(Section(Lifetime.EVERY_TOKEN, 0, 0, (OwnerLayer("attn", 3, 9, 0),)))
    assert [ranks for ranks in range(1, 10) if check_ranks(layout, ranks) is None] == [1, 3, 6, 9]
    assert check_ranks(layout, 2) == "attn has 3 KV heads, which 2 ranks can neither share nor repeat"
