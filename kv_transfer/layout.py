"""Plain records that describe what a transfer is about: which layers own KV, how large a slot is, which part moves.

The worker translates its specs into a ``CacheLayout`` once, when an engine starts. Planning, checking and accounting
need nothing else: no tensor, no model, no name of a model.

What moves is counted in *slots*. A layer that stores something of every token has one slot per token; a recurrent
layer has a single slot, the state, whose range is ``[0, 1)``.
"""

from dataclasses import dataclass
from enum import Enum

WIRE_VERSION = 1
"""Raised with every change of the messages. A replica understands its own version and the one before.

1: first version.
"""


class Lifetime(Enum):
    """For how long the slots of a section are needed."""

    EVERY_TOKEN = 1
    LAST_TOKENS = 2
    STATE = 3
    FIRST_TOKENS = 4


@dataclass(frozen=True, slots=True)
class SlotRange:
    """Slots ``[begin, end)``; empty when they are equal."""

    begin: int
    end: int

    def __len__(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class OwnerLayer:
    """A layer that owns KV: the bytes of one slot, and how many layers use its cache as well.

    ``kv_heads`` are those of the whole layer, over which a replica's ranks divide a slot, a state's too; 0 means that
    it cannot be divided.
    """

    name: str
    kv_heads: int
    bytes_per_slot: int
    sharers: int

    @property
    def heads(self) -> int:
        """The equal parts of a slot, at least one."""
        return max(1, self.kv_heads)


@dataclass(frozen=True, slots=True)
class Section:
    """Owners whose slots are needed equally long, in producing order.

    ``window`` is 0 unless they slide. Sliding owners that see the first ``sinks`` tokens as well are in two sections,
    one for these and one for the window behind them.
    """

    lifetime: Lifetime
    window: int
    sinks: int
    owners: tuple[OwnerLayer, ...]

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one slot over all owners."""
        return sum(owner.bytes_per_slot for owner in self.owners)

    def needed(self, prompt_len: int) -> SlotRange:
        """Slots that the step of the last prompt token needs from the tokens before it."""
        last = prompt_len - 1
        match self.lifetime:
            case Lifetime.EVERY_TOKEN:
                return SlotRange(0, last)
            case Lifetime.FIRST_TOKENS:
                return SlotRange(0, min(self.sinks, last))
            case Lifetime.LAST_TOKENS:
                return SlotRange(max(min(self.sinks, last), prompt_len - self.window), last)
            case Lifetime.STATE:
                return SlotRange(0, min(1, last))

    def ready(self, needed: SlotRange, prompt_len: int, computed: int) -> SlotRange:
        """Of the slots that are ``needed``, those that exist once ``computed`` prompt tokens are."""
        if self.lifetime is Lifetime.STATE:
            return needed if computed >= prompt_len - 1 else SlotRange(needed.begin, needed.begin)
        return SlotRange(needed.begin, max(needed.begin, min(needed.end, computed)))


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """Everything about a replica's KV that its peer must agree with.

    ``sharing_digest`` stands for the map from sharing layers to targets. Block size and tensor-parallel size are
    absent: they may differ.
    """

    fingerprint: str
    kv_dtype: str
    sections: tuple[Section, ...]
    sharing_digest: str
    sharing_layers: int

    @property
    def owners(self) -> tuple[OwnerLayer, ...]:
        """Every owner once, section by section."""
        return tuple(dict.fromkeys(owner for section in self.sections for owner in section.owners))


@dataclass(frozen=True, slots=True)
class Piece:
    """Slots ``[slot_begin, slot_end)`` of owners ``[layer_begin, layer_end)`` of one section."""

    section: int
    layer_begin: int
    layer_end: int
    slot_begin: int
    slot_end: int

    def payload_bytes(self, layout: CacheLayout) -> int:
        """Exact size of its payload."""
        owners = layout.sections[self.section].owners[self.layer_begin : self.layer_end]
        return sum(owner.bytes_per_slot for owner in owners) * (self.slot_end - self.slot_begin)
