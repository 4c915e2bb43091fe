"""Triton kernels of ``kernels.pointwise``, each one pass over its rows: read once, calculated in float32, written once.

Tensors are float32, bfloat16 or float16.
"""

import torch
import triton
import triton.language as tl

from kernels.launch import SUPPORTED_DTYPES, Kernel, next_power_of_two
from kernels.pointwise import take_rows
from kernels.tuning import ELEMENTS_PER_PROGRAM, warps_for

__all__ = [
    "add_rms_norm",
    "apply_rotary",
    "apply_rotary_interleaved",
    "gelu_and_multiply",
    "rms_norm",
    "rms_norm_in_place",
    "silu_and_multiply",
    "take_rows",
]


def rms_norm(hidden: torch.Tensor, weight: torch.Tensor | None, epsilon: float, *, offset: float = 0.0) -> torch.Tensor:
    """Root-mean-square normalisation over the last dimension (Zhang & Sennrich 2019), scaled by ``offset + weight``.

    ``hidden`` is ``[..., width]``; of two or three dimensions, such as heads within a fused projection, it may have any
    strides but for the last. Returns a contiguous tensor of its shape and dtype.
    """
    rows = _as_heads(hidden)
    out = torch.empty(rows.shape, dtype=hidden.dtype, device=hidden.device)
    _normalise(rows, None, weight, epsilon, offset, out)
    return out.view(hidden.shape)


def rms_norm_in_place(
    hidden: torch.Tensor, weight: torch.Tensor | None, epsilon: float, *, offset: float = 0.0
) -> None:
    """The same, written where it was read."""
    hidden.copy_(rms_norm(hidden, weight, epsilon, offset=offset))


def add_rms_norm(
    hidden: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, epsilon: float, *, offset: float = 0.0
) -> torch.Tensor:
    """``residual += hidden`` in place, rounded to its dtype, then ``rms_norm`` of the sum, which is returned.

    Both are ``[rows, width]`` of one dtype, the last dimension contiguous.
    """
    if hidden.shape != residual.shape or hidden.dtype != residual.dtype or residual.stride(-1) != 1:
        raise ValueError(
            f"hidden is {hidden.dtype} {tuple(hidden.shape)}, the residual {residual.dtype} {tuple(residual.shape)}: "
            "they must be alike, the residual's last dimension contiguous"
        )
    out = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device)
    _normalise(_as_heads(hidden), residual, weight, epsilon, offset, out)
    return out


def apply_rotary(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotate in place, first half of the rotary dimensions against their second half (Su et al. 2021).

    ``heads`` is ``[rows, heads, head_dim]``, any strides; ``cos`` and ``sin`` are ``[rows, 1, rotary_dim // 2]``.
    """
    _rotate(heads, cos, sin, is_interleaved=False)


def apply_rotary_interleaved(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """The same with neighbours rotated against each other: dimension ``2 i`` against ``2 i + 1``."""
    _rotate(heads, cos, sin, is_interleaved=True)


def silu_and_multiply(gate_up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` for ``[rows, 2 * width]``; returns ``[rows, width]`` (Shazeer 2020)."""
    return _gate(gate_up, is_gelu=False)


def gelu_and_multiply(gate_up: torch.Tensor) -> torch.Tensor:
    """``gelu(gate) * up`` for ``[rows, 2 * width]``, GELU in its tanh form (Hendrycks & Gimpel 2016)."""
    return _gate(gate_up, is_gelu=True)


def _as_heads(hidden: torch.Tensor) -> torch.Tensor:
    """``[rows, heads, width]`` with a contiguous last dimension, a view where that is possible."""
    _check_dtype(hidden)
    if hidden.stride(-1) != 1:
        hidden = hidden.contiguous()
    if hidden.ndim == 2:
        return hidden[:, None]
    return hidden if hidden.ndim == 3 else hidden.reshape(-1, 1, hidden.shape[-1])


def _check_dtype(tensor: torch.Tensor) -> None:
    if tensor.dtype not in SUPPORTED_DTYPES:
        raise ValueError(f"Triton kernels take {', '.join(map(str, SUPPORTED_DTYPES))}, not {tensor.dtype}")


def _normalise(
    rows: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    epsilon: float,
    offset: float,
    out: torch.Tensor,
) -> None:
    count, heads, width = rows.shape
    padded = next_power_of_two(width)
    tile = max(1, ELEMENTS_PER_PROGRAM // padded)
    normalise_rows.launch(
        (triton.cdiv(count * heads, tile),),
        rows,
        rows.stride(0),
        rows.stride(1),
        rows if residual is None else residual,
        0 if residual is None else residual.stride(0),
        rows if weight is None else weight,
        out,
        count * heads,
        epsilon,
        offset,
        heads=heads,
        width=width,
        padded=padded,
        row_tile=tile,
        is_added=residual is not None,
        is_scaled=weight is not None,
        warps=warps_for(tile * padded),
    )


def _rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, is_interleaved: bool) -> None:
    _check_dtype(heads)
    count, per_row, _ = heads.shape
    half = cos.shape[-1]
    padded = next_power_of_two(half)
    tile = max(1, min(next_power_of_two(per_row), ELEMENTS_PER_PROGRAM // padded))
    rotate_heads.launch(
        (count, triton.cdiv(per_row, tile)),
        heads,
        *heads.stride(),
        cos.contiguous(),
        sin.contiguous(),
        heads=per_row,
        half=half,
        padded=padded,
        head_tile=tile,
        is_interleaved=is_interleaved,
        warps=warps_for(tile * padded),
    )


def _gate(gate_up: torch.Tensor, *, is_gelu: bool) -> torch.Tensor:
    _check_dtype(gate_up)
    if gate_up.stride(-1) != 1:
        gate_up = gate_up.contiguous()
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, width)
    tile = min(ELEMENTS_PER_PROGRAM, next_power_of_two(width))
    gate_rows.launch(
        (rows, triton.cdiv(width, tile)),
        gate_up,
        gate_up.stride(0),
        out,
        width=width,
        tile=tile,
        is_gelu=is_gelu,
        warps=warps_for(tile),
    )
    return out


@Kernel
def normalise_rows(
    hidden: tl.tensor,
    row_stride: tl.tensor,
    head_stride: tl.tensor,
    residual: tl.tensor,
    residual_stride: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    rows: int,
    epsilon: tl.tensor,
    offset: tl.tensor,
    heads: tl.constexpr,
    width: tl.constexpr,
    padded: tl.constexpr,
    row_tile: tl.constexpr,
    is_added: tl.constexpr,
    is_scaled: tl.constexpr,
) -> None:
    """One program per ``row_tile`` heads of rows."""
    row = (tl.program_id(0) * row_tile + tl.arange(0, row_tile)).to(tl.int64)
    dim = tl.arange(0, padded)
    inside = (row < rows)[:, None] & (dim < width)[None, :]
    start = (row // heads) * row_stride + (row % heads) * head_stride
    values = tl.load(hidden + start[:, None] + dim[None, :], mask=inside, other=0.0).to(tl.float32)
    if is_added:
        place = residual + (row * residual_stride)[:, None] + dim[None, :]
        rounded = (values + tl.load(place, mask=inside, other=0.0).to(tl.float32)).to(residual.dtype.element_ty)
        tl.store(place, rounded, mask=inside)
        values = rounded.to(tl.float32)
    mean = tl.sum(values * values, 1) / width
    values = values * tl.rsqrt(mean + epsilon)[:, None]
    if is_scaled:
        scales = tl.load(weight + dim, mask=dim < width, other=0.0).to(tl.float32) + offset
        values = values * scales[None, :]
    tl.store(out + (row * width)[:, None] + dim[None, :], values.to(out.dtype.element_ty), mask=inside)


@Kernel
def rotate_heads(
    tensor: tl.tensor,
    row_stride: tl.tensor,
    head_stride: tl.tensor,
    dim_stride: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    heads: tl.constexpr,
    half: tl.constexpr,
    padded: tl.constexpr,
    head_tile: tl.constexpr,
    is_interleaved: tl.constexpr,
) -> None:
    """One program per row and ``head_tile`` of its heads."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * head_tile + tl.arange(0, head_tile)
    pair = tl.arange(0, padded)
    inside = (head < heads)[:, None] & (pair < half)[None, :]
    start = tensor + (row * row_stride + head * head_stride)[:, None]
    if is_interleaved:
        first_place = start + (2 * pair * dim_stride)[None, :]
        second_place = start + ((2 * pair + 1) * dim_stride)[None, :]
    else:
        first_place = start + (pair * dim_stride)[None, :]
        second_place = start + ((pair + half) * dim_stride)[None, :]
    first = tl.load(first_place, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(second_place, mask=inside, other=0.0).to(tl.float32)
    cosines = tl.load(cos + row * half + pair, mask=pair < half, other=0.0).to(tl.float32)[None, :]
    sines = tl.load(sin + row * half + pair, mask=pair < half, other=0.0).to(tl.float32)[None, :]
    element: tl.constexpr = tensor.dtype.element_ty
    tl.store(first_place, (first * cosines - second * sines).to(element), mask=inside)
    tl.store(second_place, (second * cosines + first * sines).to(element), mask=inside)


@Kernel
def gate_rows(
    gate_up: tl.tensor,
    row_stride: tl.tensor,
    out: tl.tensor,
    width: tl.constexpr,
    tile: tl.constexpr,
    is_gelu: tl.constexpr,
) -> None:
    """One program per row and ``tile`` of its width."""
    row = tl.program_id(0).to(tl.int64)
    dim = tl.program_id(1) * tile + tl.arange(0, tile)
    inside = dim < width
    gate = tl.load(gate_up + row * row_stride + dim, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * row_stride + width + dim, mask=inside, other=0.0).to(tl.float32)
    if is_gelu:
        # (1 + tanh(x)) / 2 = sigmoid(2 x)
        gate = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    else:
        gate = gate * tl.sigmoid(gate)
    tl.store(out + row * width + dim, (gate * up).to(out.dtype.element_ty), mask=inside)
