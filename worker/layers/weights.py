"""How a layer says which checkpoint tensors it wants, and where each goes.

Layers allocate their (often fused) weights when the model is built; loading then copies every checkpoint tensor, or
this rank's part of it, straight into its part of them. ``Slot`` is that pair; the loader consumes the slots of a whole
model.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from kernels.table import Pointwise, pointwise
from worker.ranks.rank_group import SOLO, RankGroup
from worker.ranks.span import Span

MAX_ELEMENTS = 1 << 46


@dataclass(frozen=True, slots=True)
class TensorPart:
    """Of one ``dimension`` of a checkpoint's tensor these spans, one after the other; of other dimensions all."""

    dimension: int
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class Slot:
    """Checkpoint tensor ``name``, or a ``part`` of it, goes into ``destination``, a view of a layer's weight."""

    name: str
    destination: torch.Tensor
    part: TensorPart | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The whole tensor's."""
        shape = list(self.destination.shape)
        if self.part is not None:
            shape[self.part.dimension] = self.part.spans[0].whole
        return tuple(shape)

    def reads(self) -> Iterator[tuple[torch.Tensor, tuple[slice, ...] | None]]:
        """What to read: views of the destination, with the slices of the tensor that go there (None: all of it)."""
        if self.part is None:
            yield self.destination, None
            return
        dimension, begin = self.part.dimension, 0
        for span in self.part.spans:
            slices = (*[slice(None)] * dimension, slice(span.begin, span.end))
            yield self.destination.narrow(dimension, begin, len(span)), slices
            begin += len(span)


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """What every weight of a model is made of, and the ranks that it is split over.

    ``device`` may be ``meta``: shapes without memory.
    """

    dtype: torch.dtype
    device: torch.device
    ranks: RankGroup = SOLO

    @property
    def pointwise(self) -> Pointwise:
        """Small operations on what layers with such weights compute."""
        return pointwise(self.device, self.dtype)

    def empty(self, *shape: int) -> torch.Tensor:
        """A weight to be loaded. Raises ``ValueError`` for a size that no machine could hold."""
        if math.prod(shape) > MAX_ELEMENTS:
            raise ValueError(f"a weight of {' × '.join(map(str, shape))} numbers: check the sizes in config.json")
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def rounded(self, value: float) -> float:
        """The number that a weight of this format would hold."""
        return torch.tensor(value, dtype=self.dtype).item()
