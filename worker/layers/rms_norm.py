"""RMSNorm with a learned scale."""

from collections.abc import Iterator

import torch

from kernels.pointwise import rms_norm
from worker.layers.weights import Slot, WeightFormat


class RMSNorm:
    """Normalises the last dimension, ``size`` wide."""

    def __init__(self, size: int, epsilon: float, weight_format: WeightFormat) -> None:
        self.weight = weight_format.empty(size)
        self._epsilon = epsilon

    def slots(self, name: str) -> Iterator[Slot]:
        """Where ``{name}.weight`` goes."""
        yield Slot(f"{name}.weight", self.weight)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Same shape and dtype as ``hidden``."""
        return rms_norm(hidden, self.weight, self._epsilon)
