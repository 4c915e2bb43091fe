"""Linear layers. Several projections of the same input are one matrix, so that a step does one product for all.

Over several ranks a layer's rows are split, and the columns of the layer that takes its output: the one's output stays
where it is, the other's is a sum over ranks (Shoeybi et al. 2019, Megatron-LM).
"""

from collections.abc import Iterator, Mapping

import torch

from kernels import table
from worker.layers.matrix import Arrange, Matrix
from worker.layers.weights import Slot, TensorPart, WeightFormat
from worker.ranks.span import Span


class Linear:
    """``y = x W^T + b`` with ``weight`` ``[out, in]``; ``parts`` names consecutive row ranges by checkpoint module.

    ``Linear({"q_proj": 576, "k_proj": 192, "v_proj": 192}, …)`` computes all three at once. Of a part that is a span
    this rank has only those rows; of the others every rank has all. ``widths`` are the rows that it has. ``arrange`` is
    ``Matrix``'s.
    """

    def __init__(
        self,
        parts: Mapping[str, int | Span],
        in_features: int,
        weight_format: WeightFormat,
        *,
        bias: bool = False,
        arrange: Arrange = table.matrix,
    ) -> None:
        self._parts = {name: Span(0, part, part) if isinstance(part, int) else part for name, part in parts.items()}
        self.widths = {name: len(part) for name, part in self._parts.items()}
        out_features = sum(self.widths.values())
        self.bias = weight_format.empty(out_features) if bias else None
        self._matrix = Matrix(weight_format.empty(out_features, in_features), self.bias, arrange)

    @property
    def weight(self) -> torch.Tensor:
        """``[out, in]``, until the first product."""
        return self._matrix.weight

    def slots(self, prefix: str) -> Iterator[Slot]:
        """Where ``{prefix}.{part}.weight`` and ``.bias`` go."""
        begin = 0
        for name, span in self._parts.items():
            rows, part = slice(begin, begin + len(span)), TensorPart(0, (span,))
            yield Slot(f"{prefix}.{name}.weight", self.weight[rows], part)
            if self.bias is not None:
                yield Slot(f"{prefix}.{name}.bias", self.bias[rows], part)
            begin += len(span)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[rows, in]`` to ``[rows, out]``."""
        return self._matrix(hidden)


class SummedLinear:
    """A linear layer whose input is split over ranks: each has the columns of its ``inputs``, all get the sum."""

    def __init__(
        self, name: str, out_features: int, inputs: Span, weight_format: WeightFormat, *, bias: bool = False
    ) -> None:
        self._name = name
        self._inputs = inputs
        self._ranks = weight_format.ranks
        self.bias = weight_format.empty(out_features) if bias else None
        added = self.bias if self._ranks.rank == 0 else None
        self._matrix = Matrix(weight_format.empty(out_features, len(inputs)), added)

    @property
    def weight(self) -> torch.Tensor:
        """``[out, inputs]`` of this rank, until the first product."""
        return self._matrix.weight

    def slots(self, prefix: str) -> Iterator[Slot]:
        """Where ``{prefix}.{name}.weight`` and ``.bias`` go."""
        yield Slot(f"{prefix}.{self._name}.weight", self.weight, TensorPart(1, (self._inputs,)))
        if self.bias is not None:
            yield Slot(f"{prefix}.{self._name}.bias", self.bias)

    def partial(self, hidden: torch.Tensor) -> torch.Tensor:
        """This rank's summand, for a layer that adds to it before it sums."""
        return self._matrix(hidden)

    def __call__(self, hidden: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """``[rows, inputs]`` to ``[rows, out]``, with ``residual``, which every rank has, added to the sum."""
        if self._ranks.size == 1:
            return self._matrix(hidden, residual)
        whole = self._ranks.sum(self._matrix(hidden))
        return whole if residual is None else whole.add_(residual)
