"""What one rank of a prefill replica sends to one rank of a decode replica. Pure functions of a layout and two sizes.

An owner's heads are split over a replica's ranks in order; where there are fewer heads than ranks, several consecutive
ranks hold the same head. A decode rank needs every head that it holds. Of the prefill ranks that hold one, each sends a
part of its slots: a latent, which is the same on all ranks, leaves each of them once for every decode rank, in parts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from kv_transfer.layout import CacheLayout, OwnerLayer, Section, SlotRange


@dataclass(frozen=True, slots=True)
class RankPair:
    """Rank ``sender`` of ``senders`` in a prefill replica, rank ``receiver`` of ``receivers`` in a decode replica."""

    sender: int
    senders: int
    receiver: int
    receivers: int


MAX_RANKS = 64
"""More than any replica has; a peer says how many it is."""

ONLY_PAIR = RankPair(0, 1, 0, 1)
"""Of two replicas that are not split."""


@dataclass(frozen=True, slots=True)
class HeadRange:
    """Heads ``[begin, end)`` of a whole layer."""

    begin: int
    end: int

    def __len__(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class PairOwner:
    """Owner ``index`` of a section of the whole layout, of which ``heads`` pass."""

    index: int
    heads: HeadRange


@dataclass(frozen=True, slots=True)
class PairSection:
    """Where a section of a pair's layout comes from: owners of ``section``, part ``part`` of ``parts`` slots."""

    section: int
    owners: tuple[PairOwner, ...]
    part: int
    parts: int

    def slots(self, slots: SlotRange) -> SlotRange:
        """This pair's part of slots that a decode rank lacks."""
        count = len(slots)
        return SlotRange(
            slots.begin + count * self.part // self.parts, slots.begin + count * (self.part + 1) // self.parts
        )


@dataclass(frozen=True, slots=True)
class PairLayout:
    """Everything that can pass between the two. Pieces count in ``layout``, whose sections ``sections`` explain.

    ``places`` are the sections and the indices in them that an owner has, by its name.
    """

    layout: CacheLayout
    sections: tuple[PairSection, ...]
    places: Mapping[str, Sequence[tuple[int, int]]]

    def slots(self, lacking: Sequence[SlotRange]) -> tuple[SlotRange, ...]:
        """Of what a decode replica lacks, section by section of the whole layout, what passes here."""
        return tuple(section.slots(lacking[section.section]) for section in self.sections)


def heads_of(heads: int, rank: int, ranks: int) -> HeadRange:
    """The heads that a rank holds. The sizes were checked when its model was built."""
    if heads >= ranks:
        assert heads % ranks == 0, f"{heads} heads on {ranks} ranks"
        return HeadRange(rank * heads // ranks, (rank + 1) * heads // ranks)
    assert ranks % heads == 0, f"{heads} heads on {ranks} ranks"
    head = rank * heads // ranks
    return HeadRange(head, head + 1)


def pair_layout(layout: CacheLayout, pair: RankPair) -> PairLayout:
    """What passes between two ranks; no sections if nothing does."""
    sections: list[Section] = []
    origins: list[PairSection] = []
    for index, section in enumerate(layout.sections):
        by_part: dict[tuple[int, int], list[PairOwner]] = {}
        for number, owner in enumerate(section.owners):
            sent = heads_of(owner.heads, pair.sender, pair.senders)
            needed = heads_of(owner.heads, pair.receiver, pair.receivers)
            passing = HeadRange(max(sent.begin, needed.begin), min(sent.end, needed.end))
            if passing.begin < passing.end:
                holders = max(1, pair.senders // owner.heads)
                by_part.setdefault((pair.sender % holders, holders), []).append(PairOwner(number, passing))
        for (part, parts), owners in by_part.items():
            records = tuple(_passing(section.owners[owner.index], owner.heads) for owner in owners)
            sections.append(replace(section, owners=records))
            origins.append(PairSection(index, tuple(owners), part, parts))
    places: dict[str, list[tuple[int, int]]] = {}
    for index, section in enumerate(sections):
        for number, record in enumerate(section.owners):
            places.setdefault(record.name, []).append((index, number))
    return PairLayout(replace(layout, sections=tuple(sections)), tuple(origins), places)


def peers_of_receiver(layout: CacheLayout, receiver: int, receivers: int, senders: int) -> tuple[int, ...]:
    """The prefill ranks from which a decode rank gets anything."""
    pairs = (RankPair(sender, senders, receiver, receivers) for sender in range(senders))
    return tuple(pair.sender for pair in pairs if pair_layout(layout, pair).sections)


def replica_lower_bound(layout: CacheLayout, lacking: Sequence[SlotRange], receivers: int) -> int:
    """The fewest payload bytes for a decode replica: every rank needs each slot of every head that it holds once."""
    return sum(
        owner.bytes_per_slot * max(owner.heads, receivers) // owner.heads * len(slots)
        for section, slots in zip(layout.sections, lacking, strict=True)
        for owner in section.owners
    )


def unshared_bytes(layout: CacheLayout, lacking: Sequence[SlotRange], receivers: int) -> int:
    """The same if every layer that shares a cache had one of its own."""
    return sum(
        owner.bytes_per_slot * (1 + owner.sharers) * max(owner.heads, receivers) // owner.heads * len(slots)
        for section, slots in zip(layout.sections, lacking, strict=True)
        for owner in section.owners
    )


def check_ranks(layout: CacheLayout, ranks: int) -> str | None:
    """Why no replica of so many ranks can hold this layout, or None if one can."""
    if ranks > MAX_RANKS:
        return f"{ranks} ranks are more than {MAX_RANKS}"
    for owner in layout.owners:
        if owner.heads % ranks and ranks % owner.heads:
            return f"{owner.name} has {owner.heads} KV heads, which {ranks} ranks can neither share nor repeat"
    return None


def _passing(owner: OwnerLayer, heads: HeadRange) -> OwnerLayer:
    return replace(owner, kv_heads=len(heads), bytes_per_slot=owner.bytes_per_slot * len(heads) // owner.heads)
