"""RMSNorm, with a learned scale or without one."""

from collections.abc import Iterator

import torch

from worker.layers.weights import Slot, WeightFormat


class RMSNorm:
    """Normalises the last dimension, ``size`` wide, and scales it by ``offset + weight``."""

    def __init__(self, size: int, epsilon: float, weight_format: WeightFormat, *, offset: float = 0.0) -> None:
        self.weight = weight_format.empty(size)
        self._epsilon = epsilon
        self._offset = offset
        self._pointwise = weight_format.pointwise

    def slots(self, name: str) -> Iterator[Slot]:
        """Where ``{name}.weight`` goes."""
        yield Slot(f"{name}.weight", self.weight)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Same shape and dtype as ``hidden``."""
        return self._pointwise.rms_norm(hidden, self.weight, self._epsilon, offset=self._offset)

    def in_place(self, hidden: torch.Tensor) -> None:
        """Write over what was there."""
        self._pointwise.rms_norm_in_place(hidden, self.weight, self._epsilon, offset=self._offset)


class UnscaledRMSNorm:
    """Normalises the last dimension and leaves it at that."""

    def __init__(self, epsilon: float, weight_format: WeightFormat) -> None:
        self._epsilon = epsilon
        self._rms_norm = weight_format.pointwise.rms_norm

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Same shape and dtype as ``hidden``."""
        return self._rms_norm(hidden, None, self._epsilon)
