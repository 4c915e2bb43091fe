"""Which heads of an attention layer one rank computes."""

from dataclasses import dataclass
from typing import Self

from worker.ranks.rank_group import RankGroup, split, split_heads
from worker.ranks.span import Span


@dataclass(frozen=True, slots=True)
class Heads:
    """A rank's query heads, and the KV heads that these attend to."""

    query: Span
    key_value: Span

    @classmethod
    def of(cls, group: RankGroup, heads: int, kv_heads: int) -> Self:
        """Of all heads of a layer, which are consecutive in groups. Raises ``CannotSplit``."""
        return cls(split(group, heads, "num_attention_heads"), split_heads(group, kv_heads, "num_key_value_heads"))
