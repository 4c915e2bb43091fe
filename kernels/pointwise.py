"""Small fused operations of a decoder layer, as plain PyTorch references."""

import torch
import torch.nn.functional as F


def rms_norm(hidden: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Root-mean-square normalisation over the last dimension (Zhang & Sennrich 2019), statistics in float32."""
    return F.rms_norm(hidden, (hidden.shape[-1],), weight, epsilon)


def apply_rotary(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotate in place, first half of each head against its second half (Su et al. 2021).

    ``heads`` is ``[rows, heads, head_dim]``, any strides; ``cos`` and ``sin`` are ``[rows, 1, head_dim // 2]``.
    """
    first, second = heads.chunk(2, dim=-1)
    rotated = first * cos - second * sin
    second.mul_(cos).addcmul_(first, sin)
    first.copy_(rotated)


def silu_and_multiply(gate_up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` for ``[rows, 2 * width]``; returns ``[rows, width]`` (Shazeer 2020)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
