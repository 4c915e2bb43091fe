"""How a layer says which checkpoint tensors it wants, and where each goes.

Layers allocate their (often fused) weights when the model is built; loading then copies every checkpoint tensor
straight into its part of them. ``Slot`` is that pair; the loader consumes the slots of a whole model.
"""

import math
from dataclasses import dataclass

import torch

MAX_ELEMENTS = 1 << 46


@dataclass(frozen=True, slots=True)
class Slot:
    """Checkpoint tensor ``name`` goes into ``destination``, a view of a layer's weight with the tensor's shape."""

    name: str
    destination: torch.Tensor


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """What every weight of a model is made of. ``device`` may be ``meta``: shapes without memory."""

    dtype: torch.dtype
    device: torch.device

    def empty(self, *shape: int) -> torch.Tensor:
        """A weight to be loaded. Raises ``ValueError`` for a size that no machine could hold."""
        if math.prod(shape) > MAX_ELEMENTS:
            raise ValueError(f"a weight of {' × '.join(map(str, shape))} numbers: check the sizes in config.json")
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def rounded(self, value: float) -> float:
        """The number that a weight of this format would hold."""
        return torch.tensor(value, dtype=self.dtype).item()
