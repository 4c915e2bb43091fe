"""Rotary position embedding whose frequencies were learned: computed by position, because there is no table to fill."""

from collections.abc import Iterator

import torch

from worker.layers.rotary import Rotation, inverse_frequencies
from worker.layers.weights import Slot, WeightFormat
from worker.text_config import TextConfig


class LearnedRotary:
    """Rotary embedding in which every frequency is multiplied by ``exp(alpha)``, a learned number of its own."""

    def __init__(self, config: TextConfig, weights: WeightFormat) -> None:
        frequencies, self._scaling = inverse_frequencies(config, None, config.qk_rope_head_dim, max_positions=1)
        self._frequencies = frequencies.to(weights.device)
        self._dtype = weights.dtype
        self._pointwise = weights.pointwise
        self.alpha = WeightFormat(torch.float32, weights.device).empty(len(frequencies))

    def slots(self, name: str) -> Iterator[Slot]:
        """Where ``{name}.alpha`` goes."""
        yield Slot(f"{name}.alpha", self.alpha)

    def at(self, positions: torch.Tensor) -> Rotation:
        """The rotation of each position, int64 ``[rows]``."""
        angles = positions[:, None, None].float() * (self._frequencies * self.alpha.exp())
        cos, sin = angles.cos() * self._scaling, angles.sin() * self._scaling
        return Rotation(cos.to(self._dtype), sin.to(self._dtype), self._pointwise)
