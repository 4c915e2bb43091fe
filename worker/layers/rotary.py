"""Rotary position embedding: a table of cosines and sines for all layers that turn alike, read by position.

The frequencies of a scaling variant come from transformers, whose checkpoints define them. With *dynamic* scaling the
frequencies depend on the length; here position ``p`` uses those of a sequence of ``p + 1`` tokens, which is what
token-by-token decoding gives, and which does not depend on how a prompt was cut into chunks or cached.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from kernels.table import Pointwise, pointwise
from worker.text_config import TextConfig

SUPPORTED = ("default", "linear", "dynamic", "llama3", "yarn", "proportional")


@dataclass(frozen=True, slots=True)
class Rotation:
    """Cosines and sines of one step's rows, ``[rows, 1, rotary_dim // 2]``."""

    cos: torch.Tensor
    sin: torch.Tensor
    kernels: Pointwise

    def apply(self, heads: torch.Tensor) -> None:
        """Rotate the first ``rotary_dim`` of ``[rows, heads, head_dim]`` in place."""
        self.kernels.apply_rotary(heads, self.cos, self.sin)

    def apply_interleaved(self, heads: torch.Tensor) -> None:
        """The same for heads whose rotary dimensions come in pairs of neighbours."""
        self.kernels.apply_rotary_interleaved(heads, self.cos, self.sin)

    def select(self, rows: torch.Tensor) -> "Rotation":
        """The rotation of some of the rows, given by index."""
        return Rotation(self.cos.index_select(0, rows), self.sin.index_select(0, rows), self.kernels)


class RotaryTable:
    """Cosines and sines for positions ``[0, max_positions)``.

    A ``partial_rotary_factor`` in the configuration turns only that share of a head of ``head_dim``. In models whose
    ``rope_parameters`` are a map by layer type, ``layer_type`` chooses; ``head_dim`` is then that of such layers.
    """

    def __init__(
        self,
        config: TextConfig,
        head_dim: int,
        max_positions: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        layer_type: str | None = None,
    ) -> None:
        self._kernels = pointwise(device, dtype)
        positions = torch.arange(max_positions, dtype=torch.float32)
        frequencies, scaling = inverse_frequencies(config, layer_type, head_dim, max_positions)
        angles = positions[:, None] * frequencies
        self._cos = (angles.cos() * scaling).to(device, dtype)[:, None, :]
        self._sin = (angles.sin() * scaling).to(device, dtype)[:, None, :]

    def at(self, positions: torch.Tensor) -> Rotation:
        """The rotation of each position, int64 ``[rows]``."""
        take_rows = self._kernels.take_rows
        return Rotation(take_rows(self._cos, positions), take_rows(self._sin, positions), self._kernels)


def rope_parameters(config: TextConfig, layer_type: str | None) -> Mapping[str, Any]:
    """The parameters of a model's only rope, or of the layers of one type."""
    parameters: Mapping[str, Any] = config.rope_parameters
    return parameters if layer_type is None else parameters[layer_type]


def score_factor(parameters: Mapping[str, Any]) -> float:
    """What attention scores are multiplied with: the square of a scaled rope's ``mscale`` (YaRN, Peng et al. 2023)."""
    strength = parameters.get("mscale_all_dim") or 0.0
    if parameters["rope_type"] == "default" or not strength or parameters["factor"] <= 1:
        return 1.0
    return float((0.1 * strength * math.log(parameters["factor"]) + 1.0) ** 2)


def inverse_frequencies(
    config: TextConfig, layer_type: str | None, head_dim: int, max_positions: int
) -> tuple[torch.Tensor, float]:
    """Inverse frequencies, ``[rotary_dim // 2]`` or one row per position, and the factor on cosine and sine."""
    parameters = rope_parameters(config, layer_type)
    kind = parameters["rope_type"]
    if kind not in SUPPORTED:
        raise ValueError(f"rope_type {kind!r} is not supported; supported are {', '.join(SUPPORTED)}")
    if kind == "default":
        rotary_dim = int(head_dim * parameters.get("partial_rotary_factor", 1.0))
        exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
        return 1.0 / (parameters["rope_theta"] ** exponents), 1.0
    # Seconds of imports, for models whose configuration needed them anyway.
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # noqa: PLC0415

    compute = ROPE_INIT_FUNCTIONS[kind]
    if kind == "dynamic" and max_positions > config.max_position_embeddings:
        trained = config.max_position_embeddings
        short = compute(config, layer_type=layer_type)[0].expand(trained, -1)
        # Lengths are tensors as in transformers, where a Python number would round differently.
        lengths = torch.arange(trained + 1, max_positions + 1)
        long = [compute(config, seq_len=length, layer_type=layer_type)[0] for length in lengths]
        return torch.cat([short, torch.stack(long)]), 1.0
    frequencies, scaling = compute(config, layer_type=layer_type)
    return frequencies, float(scaling)
