"""Small operations of a decoder layer by the compiled kernels; see ``kernels.pointwise`` for what each is.

Tensors of another dtype than the kernels know, or of two, or of more dimensions than heads of rows, go to the plain
functions.
"""

import torch

from kernels import pointwise as plain
from kernels.native.library import INTEGER, POINTER, REAL, TYPES, function
from kernels.pointwise import apply_rotary_interleaved, gelu_and_multiply

__all__ = ["apply_rotary", "apply_rotary_interleaved", "gelu_and_multiply", "rms_norm", "silu_and_multiply"]

_NORM = (POINTER, INTEGER, INTEGER, INTEGER, INTEGER, INTEGER, POINTER, REAL, REAL, POINTER)
_ROTARY = (POINTER, INTEGER, INTEGER, INTEGER, INTEGER, POINTER, POINTER, INTEGER)
_GATE = (POINTER, INTEGER, INTEGER, INTEGER, POINTER)


def rms_norm(hidden: torch.Tensor, weight: torch.Tensor | None, epsilon: float, *, offset: float = 0.0) -> torch.Tensor:
    """Root-mean-square normalisation over the last dimension."""
    is_alike = weight is None or (weight.dtype is hidden.dtype and weight.is_contiguous())
    if hidden.dtype not in TYPES or hidden.ndim not in (2, 3) or hidden.stride(-1) != 1 or not is_alike:
        return plain.rms_norm(hidden, weight, epsilon, offset=offset)
    out = torch.empty(hidden.shape, dtype=hidden.dtype)
    heads, head_stride = (1, 0) if hidden.ndim == 2 else (hidden.shape[1], hidden.stride(1))
    function("rms_norm", hidden.dtype, *_NORM)(
        hidden.data_ptr(),
        hidden.stride(0),
        head_stride,
        hidden.shape[0],
        heads,
        hidden.shape[-1],
        None if weight is None else weight.data_ptr(),
        offset,
        epsilon,
        out.data_ptr(),
    )
    return out


def apply_rotary(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotate halves in place."""
    are_alike = all(table.dtype is heads.dtype and table.is_contiguous() for table in (cos, sin))
    if heads.dtype not in TYPES or heads.stride(-1) != 1 or not are_alike:
        plain.apply_rotary(heads, cos, sin)
        return
    function("apply_rotary", heads.dtype, *_ROTARY)(
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
    function("silu_and_multiply", gate_up.dtype, *_GATE)(
        gate_up.data_ptr(), gate_up.stride(0), rows, width, out.data_ptr()
    )
    return out
