"""Small operations of a decoder layer by the compiled kernels; see ``kernels.pointwise`` for what each is.

Tensors of another dtype than the kernels know, or of two, or of more dimensions than heads of rows, go to the plain
functions.
"""

import torch

from kernels import pointwise as plain
from kernels.native.kernel import INTEGER, POINTER, REAL, TYPES, kernel
from kernels.pointwise import apply_rotary_interleaved, gelu_and_multiply

__all__ = [
    "apply_rotary",
    "apply_rotary_interleaved",
    "gelu_and_multiply",
    "rms_norm",
    "rms_norm_in_place",
    "silu_and_multiply",
    "take_rows",
]

_NORM = (POINTER, INTEGER, INTEGER, INTEGER, INTEGER, INTEGER, POINTER, REAL, REAL, POINTER, INTEGER, INTEGER)
_ROTARY = (POINTER, INTEGER, INTEGER, INTEGER, INTEGER, POINTER, POINTER, INTEGER)
_GATE = (POINTER, INTEGER, INTEGER, INTEGER, POINTER)
_TAKE = (POINTER, INTEGER, POINTER, INTEGER, POINTER)


def rms_norm(hidden: torch.Tensor, weight: torch.Tensor | None, epsilon: float, *, offset: float = 0.0) -> torch.Tensor:
    """Root-mean-square normalisation over the last dimension."""
    if not _can_normalise(hidden, weight):
        return plain.rms_norm(hidden, weight, epsilon, offset=offset)
    out = torch.empty(hidden.shape, dtype=hidden.dtype)
    _normalise(hidden, weight, epsilon, offset, out)
    return out


def rms_norm_in_place(
    hidden: torch.Tensor, weight: torch.Tensor | None, epsilon: float, *, offset: float = 0.0
) -> None:
    """The same, written where it was read."""
    if _can_normalise(hidden, weight):
        _normalise(hidden, weight, epsilon, offset, hidden)
    else:
        plain.rms_norm_in_place(hidden, weight, epsilon, offset=offset)


def _can_normalise(hidden: torch.Tensor, weight: torch.Tensor | None) -> bool:
    is_alike = weight is None or (weight.dtype is hidden.dtype and weight.is_contiguous())
    return hidden.dtype in TYPES and hidden.ndim in (2, 3) and hidden.stride(-1) == 1 and is_alike


def _normalise(
    hidden: torch.Tensor, weight: torch.Tensor | None, epsilon: float, offset: float, out: torch.Tensor
) -> None:
    kernel("rms_norm", hidden.dtype, *_NORM)(
        hidden.data_ptr(),
        hidden.stride(0),
        hidden.stride(1) if hidden.ndim == 3 else 0,
        hidden.shape[0],
        hidden.shape[1] if hidden.ndim == 3 else 1,
        hidden.shape[-1],
        0 if weight is None else weight.data_ptr(),
        offset,
        epsilon,
        out.data_ptr(),
        out.stride(0),
        out.stride(1) if out.ndim == 3 else 0,
    )


def apply_rotary(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotate halves in place."""
    are_alike = all(table.dtype is heads.dtype and table.is_contiguous() for table in (cos, sin))
    if heads.dtype not in TYPES or heads.stride(-1) != 1 or not are_alike:
        plain.apply_rotary(heads, cos, sin)
        return
    kernel("apply_rotary", heads.dtype, *_ROTARY)(
        heads.data_ptr(),
        heads.stride(0),
        heads.stride(1),
        heads.shape[0],
        heads.shape[1],
        cos.data_ptr(),
        sin.data_ptr(),
        cos.shape[-1],
    )


def silu_and_multiply(gate_up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up``."""
    if gate_up.dtype not in TYPES or gate_up.ndim != 2 or gate_up.stride(1) != 1:
        return plain.silu_and_multiply(gate_up)
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, width)
    kernel("silu_and_multiply", gate_up.dtype, *_GATE)(
        gate_up.data_ptr(), gate_up.stride(0), rows, width, out.data_ptr()
    )
    return out


def take_rows(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """``table[index]``."""
    if table.dtype not in TYPES or not table.is_contiguous() or not index.is_contiguous():
        return plain.take_rows(table, index)
    out = table.new_empty(len(index), *table.shape[1:])
    kernel("take_rows", table.dtype, *_TAKE)(
        table.data_ptr(), table.stride(0), index.data_ptr(), len(index), out.data_ptr()
    )
    return out
