"""Queries that grow with their position (scalable softmax, Nakanishi 2025)."""

from collections.abc import Iterator

import torch

from worker.layers.weights import Slot, TensorPart, WeightFormat
from worker.ranks.span import Span


class QueryScaling:
    """A head's queries times ``s * log(position + 1) + b``, so that attention stays sharp in long contexts."""

    def __init__(self, heads: Span, weights: WeightFormat) -> None:
        self._part = TensorPart(0, (heads,))
        self.slope = weights.empty(len(heads))
        self.offset = weights.empty(len(heads))

    def slots(self, prefix: str) -> Iterator[Slot]:
        """``{prefix}.s`` and ``{prefix}.b``."""
        yield Slot(f"{prefix}.s", self.slope, self._part)
        yield Slot(f"{prefix}.b", self.offset, self._part)

    def apply(self, query: torch.Tensor, log_positions: torch.Tensor) -> None:
        """Scale ``[rows, heads, head_dim]`` in place; ``log_positions`` is ``[rows, 1]``."""
        query.mul_((log_positions * self.slope + self.offset)[:, :, None])
