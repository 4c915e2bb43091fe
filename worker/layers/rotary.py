"""Rotary position embedding: one table of cosines and sines per model, read by position.

The frequencies of a scaling variant come from transformers, whose checkpoints define them. With *dynamic* scaling the
frequencies depend on the length; here position ``p`` uses those of a sequence of ``p + 1`` tokens, which is what
token-by-token decoding gives, and which does not depend on how a prompt was cut into chunks or cached.
"""

from dataclasses import dataclass

import torch
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from kernels.pointwise import apply_rotary

SUPPORTED = ("default", "linear", "dynamic", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class Rotation:
    """Cosines and sines of one step's rows, ``[rows, 1, head_dim // 2]``."""

    cos: torch.Tensor
    sin: torch.Tensor

    def apply(self, heads: torch.Tensor) -> None:
        """Rotate ``[rows, heads, head_dim]`` in place."""
        apply_rotary(heads, self.cos, self.sin)

    def select(self, rows: torch.Tensor) -> "Rotation":
        """The rotation of some of the rows, given by index."""
        return Rotation(self.cos.index_select(0, rows), self.sin.index_select(0, rows))


class RotaryTable:
    """Cosines and sines for positions ``[0, max_positions)``."""

    def __init__(
        self, config: PretrainedConfig, head_dim: int, max_positions: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        positions = torch.arange(max_positions, dtype=torch.float32)
        frequencies, scaling = _frequencies(config, head_dim, max_positions)
        angles = positions[:, None] * frequencies
        self._cos = (angles.cos() * scaling).to(device, dtype)[:, None, :]
        self._sin = (angles.sin() * scaling).to(device, dtype)[:, None, :]

    def at(self, positions: torch.Tensor) -> Rotation:
        """The rotation of each position, int64 ``[rows]``."""
        return Rotation(self._cos.index_select(0, positions), self._sin.index_select(0, positions))


def _frequencies(config: PretrainedConfig, head_dim: int, max_positions: int) -> tuple[torch.Tensor, float]:
    """Inverse frequencies, ``[head_dim // 2]`` or one row per position, and the factor on cosine and sine."""
    kind = config.rope_parameters["rope_type"]
    if kind not in SUPPORTED:
        raise ValueError(f"rope_type {kind!r} is not supported; supported are {', '.join(SUPPORTED)}")
    if kind == "default":
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        return 1.0 / (config.rope_parameters["rope_theta"] ** exponents), 1.0
    compute = ROPE_INIT_FUNCTIONS[kind]
    if kind == "dynamic" and max_positions > config.max_position_embeddings:
        trained = config.max_position_embeddings
        short = compute(config)[0].expand(trained, -1)
        # Lengths are tensors as in transformers, where a Python number would round differently.
        lengths = torch.arange(trained + 1, max_positions + 1)
        long = [compute(config, seq_len=length)[0] for length in lengths]
        return torch.cat([short, torch.stack(long)]), 1.0
    frequencies, scaling = compute(config)
    return frequencies, float(scaling)
