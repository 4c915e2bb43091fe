"""LayerNorm with a learned scale and shift (Ba et al. 2016)."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from worker.layers.weights import Slot, WeightFormat


class LayerNorm:
    """Centres and normalises the last dimension, ``size`` wide."""

    def __init__(self, size: int, epsilon: float, weight_format: WeightFormat) -> None:
        self.weight = weight_format.empty(size)
        self.bias = weight_format.empty(size)
        self._epsilon = epsilon

    def slots(self, name: str) -> Iterator[Slot]:
        """Where ``{name}.weight`` and ``{name}.bias`` go."""
        yield Slot(f"{name}.weight", self.weight)
        yield Slot(f"{name}.bias", self.bias)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Same shape and dtype as ``hidden``; statistics in float32 at least."""
        return F.layer_norm(hidden, self.weight.shape, self.weight, self.bias, self._epsilon)
