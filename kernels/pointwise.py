"""Small fused operations of a decoder layer, as plain PyTorch references."""

import torch
import torch.nn.functional as F


def rms_norm(hidden: torch.Tensor, weight: torch.Tensor | None, epsilon: float, *, offset: float = 0.0) -> torch.Tensor:
    """Root-mean-square normalisation over the last dimension (Zhang & Sennrich 2019), statistics in float32 at least.

    The result is scaled by ``offset + weight``, added in float32 at least, or not at all without a weight.
    """
    shape = (hidden.shape[-1],)
    if weight is None or offset == 0.0:
        return F.rms_norm(hidden, shape, weight, epsilon)
    wide = torch.promote_types(hidden.dtype, torch.float32)
    return F.rms_norm(hidden.to(wide), shape, weight.to(wide) + offset, epsilon).to(hidden.dtype)


def rms_norm_in_place(
    hidden: torch.Tensor, weight: torch.Tensor | None, epsilon: float, *, offset: float = 0.0
) -> None:
    """The same, written where it was read; ``hidden`` may have any strides."""
    hidden.copy_(rms_norm(hidden, weight, epsilon, offset=offset))


def apply_rotary(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotate in place, first half of the rotary dimensions against their second half (Su et al. 2021).

    ``heads`` is ``[rows, heads, head_dim]``, any strides; ``cos`` and ``sin`` are ``[rows, 1, rotary_dim // 2]``. What
    a head has beyond ``rotary_dim`` stays as it is.
    """
    first, second = heads[..., : 2 * cos.shape[-1]].chunk(2, dim=-1)
    rotated = first * cos - second * sin
    second.mul_(cos).addcmul_(first, sin)
    first.copy_(rotated)


def apply_rotary_interleaved(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """The same with neighbours rotated against each other: dimension ``2 i`` against ``2 i + 1``."""
    rotary = heads[..., : 2 * cos.shape[-1]]
    first, second = rotary[..., 0::2], rotary[..., 1::2]
    rotated = first * cos - second * sin
    second.mul_(cos).addcmul_(first, sin)
    first.copy_(rotated)


def silu_and_multiply(gate_up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` for ``[rows, 2 * width]``; returns ``[rows, width]`` (Shazeer 2020)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def gelu_and_multiply(gate_up: torch.Tensor) -> torch.Tensor:
    """``gelu(gate) * up`` for ``[rows, 2 * width]``, GELU in its tanh form (Hendrycks & Gimpel 2016)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh").mul_(up)


def take_rows(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """``table[index]``, a new tensor: ``[count, …]`` for int64 ``[count]``, which must all be rows of the table."""
    return table.index_select(0, index)
