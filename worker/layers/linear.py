"""Linear layers. Several projections of the same input are one matrix, so that a step does one product for all."""

from collections.abc import Iterator, Mapping

import torch
import torch.nn.functional as F

from worker.layers.weights import Slot, WeightFormat


class Linear:
    """``y = x W^T + b`` with ``weight`` ``[out, in]``; ``parts`` names consecutive row ranges by checkpoint module.

    ``Linear({"q_proj": 576, "k_proj": 192, "v_proj": 192}, …)`` computes all three at once.
    """

    def __init__(
        self, parts: Mapping[str, int], in_features: int, weight_format: WeightFormat, *, bias: bool = False
    ) -> None:
        out_features = sum(parts.values())
        self._parts = dict(parts)
        self.weight = weight_format.empty(out_features, in_features)
        self.bias = weight_format.empty(out_features) if bias else None

    def slots(self, prefix: str) -> Iterator[Slot]:
        """Where ``{prefix}.{part}.weight`` and ``.bias`` go."""
        begin = 0
        for name, rows in self._parts.items():
            part = slice(begin, begin + rows)
            yield Slot(f"{prefix}.{name}.weight", self.weight[part])
            if self.bias is not None:
                yield Slot(f"{prefix}.{name}.bias", self.bias[part])
            begin += rows

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[rows, in]`` to ``[rows, out]``."""
        return F.linear(hidden, self.weight, self.bias)
