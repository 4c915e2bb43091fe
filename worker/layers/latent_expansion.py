"""The matrix that expands latents into every head's keys and values (DeepSeek-V2, 2024, section 2.1).

Built with a model's layer, which hands it to its attention. Keys and values are strided views of the checkpoint's
matrix: nothing is prepared or copied.
"""

from collections.abc import Iterator

from kernels.attention.latent import Expansion
from worker.layers.weights import Slot, TensorPart, WeightFormat
from worker.ranks.span import Span


class LatentExpansion:
    """``weight`` is ``[heads * (key_dim + value_dim), latent_dim]``, head by head, keys first, of this rank's heads."""

    def __init__(self, heads: Span, latent_dim: int, key_dim: int, value_dim: int, weight_format: WeightFormat) -> None:
        self._rows = heads.times(key_dim + value_dim)
        self.weight = weight_format.empty(len(self._rows), latent_dim)
        by_head = self.weight.view(len(heads), key_dim + value_dim, latent_dim)
        self.by_head = Expansion(by_head[:, :key_dim], by_head[:, key_dim:])

    def slots(self, name: str) -> Iterator[Slot]:
        """Where ``{name}.weight`` goes."""
        yield Slot(f"{name}.weight", self.weight, TensorPart(0, (self._rows,)))
