"""The ranks of one replica: what each computes a part of, and how they put the parts together.

A group is made before the model, lives as long as its rank, and is called by the model on the engine's thread, by every
rank in the same order. A replica of one rank has ``SOLO``, where there is nothing to put together.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from worker.ranks.span import Span


class CannotSplit(ValueError):
    """Something that so many ranks cannot share; the message names it and its size."""


class RankGroup(Protocol):
    """Rank ``rank`` of ``size``. Rank 0 leads: it schedules and samples."""

    @property
    def rank(self) -> int:
        """This one."""
        ...

    @property
    def size(self) -> int:
        """How many there are."""
        ...

    def sum(self, partial: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks' tensors of one shape, on every rank bit for bit the same; in place."""
        ...

    def gather(self, part: torch.Tensor) -> torch.Tensor | None:
        """All ranks' tensors of one shape side by side along the last dimension, on rank 0; None elsewhere."""
        ...


class Solo:
    """The one rank of a replica that is not split. A ``RankGroup``."""

    rank = 0
    size = 1

    def sum(self, partial: torch.Tensor) -> torch.Tensor:
        """What came in."""
        return partial

    def gather(self, part: torch.Tensor) -> torch.Tensor | None:
        """What came in."""
        return part


SOLO = Solo()


@dataclass(frozen=True, slots=True)
class DescribedRank:
    """A rank of a replica that does not exist, for a model that is only described. A ``RankGroup``.

    What it returns has the shape that the ranks' result would have, and no meaning.
    """

    rank: int
    size: int

    def sum(self, partial: torch.Tensor) -> torch.Tensor:
        """What came in."""
        return partial

    def gather(self, part: torch.Tensor) -> torch.Tensor | None:
        """As wide as all ranks' together."""
        return part.new_empty(*part.shape[:-1], part.shape[-1] * self.size) if self.rank == 0 else None


def split(group: RankGroup, whole: int, what: str) -> Span:
    """This rank's equal part of ``whole``. Raises ``CannotSplit`` naming ``what`` does not divide."""
    if whole % group.size:
        raise CannotSplit(f"{what} is {whole}, which {group.size} ranks cannot share equally")
    part = whole // group.size
    return Span(group.rank * part, (group.rank + 1) * part, whole)


def split_heads(group: RankGroup, heads: int, what: str) -> Span:
    """The same for KV heads: where there are fewer than ranks, several consecutive ranks hold the same one."""
    if heads >= group.size:
        return split(group, heads, what)
    if group.size % heads:
        raise CannotSplit(f"{what} is {heads}, which {group.size} ranks can neither share nor repeat equally")
    head = group.rank // (group.size // heads)
    return Span(head, head + 1, heads)


def split_rows(group: RankGroup, whole: int) -> Span:
    """Of a dimension that need not divide: equal parts, of which the last ones may be short or empty."""
    part = -(-whole // group.size)
    return Span(min(whole, group.rank * part), min(whole, (group.rank + 1) * part), whole)
