"""Triton's pointwise kernels against the references."""

import pytest
import torch

from kernels import fused_pointwise, pointwise
from tests.kernels.interpreted.steps import tolerance

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def check(out: torch.Tensor, expected: torch.Tensor) -> None:
    assert out.dtype == expected.dtype
    limit = tolerance(out.dtype)
    torch.testing.assert_close(out, expected, rtol=limit, atol=limit)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 64), (5, 80), (3, 2049), (70, 33)])
@pytest.mark.parametrize("offset", [None, 0.0, 1.0])
def test_rms_norm(dtype: torch.dtype, rows: int, width: int, offset: float | None) -> None:
    hidden = random(rows, width, dtype=dtype)
    weight = None if offset is None else random(width, dtype=dtype, seed=1)
    out = fused_pointwise.rms_norm(hidden, weight, 1e-5, offset=offset or 0.0)
    check(out, pointwise.rms_norm(hidden, weight, 1e-5, offset=offset or 0.0))


def test_rms_norm_of_heads_within_a_fused_projection() -> None:
    fused = random(5, 200, dtype=torch.float32)
    heads = fused[:, 8:104].view(5, 3, 32)
    weight = random(32, dtype=torch.float32, seed=1)
    expected = pointwise.rms_norm(heads, weight, 1e-6)
    check(fused_pointwise.rms_norm(heads, weight, 1e-6), expected)
    check(fused_pointwise.rms_norm(heads.transpose(0, 1)[None], weight, 1e-6), expected.transpose(0, 1)[None])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sum_is_normalised_and_kept(dtype: torch.dtype) -> None:
    hidden, weight = random(7, 100, dtype=dtype), random(100, dtype=dtype, seed=1)
    residual = random(7, 130, dtype=dtype, seed=2)[:, 20:120]
    total = residual + hidden
    out = fused_pointwise.add_rms_norm(hidden, residual, weight, 1e-5, offset=1.0)
    # Triton's interpreter rounds bfloat16 towards zero, a GPU to the nearest.
    limit = 2**-7 if dtype == torch.bfloat16 else 0
    torch.testing.assert_close(residual, total, rtol=limit, atol=0)
    check(out, pointwise.rms_norm(residual, weight, 1e-5, offset=1.0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize(("heads", "rotary_dim"), [(1, 64), (3, 40), (9, 2)])
def test_rotary(dtype: torch.dtype, is_interleaved: bool, heads: int, rotary_dim: int) -> None:
    """Heads are part of a wider row, and wider than what is rotated."""
    angles = random(4, 1, rotary_dim // 2, dtype=torch.float32, seed=1)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    ours = random(4, heads * 64 + 6, dtype=dtype)
    theirs = ours.clone()
    name = "apply_rotary_interleaved" if is_interleaved else "apply_rotary"
    for module, fused in ((fused_pointwise, ours), (pointwise, theirs)):
        vars(module)[name](fused[:, 3:-3].view(4, heads, 64), cos, sin)
    check(ours, theirs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 96, 2050])
@pytest.mark.parametrize("name", ["silu_and_multiply", "gelu_and_multiply"])
def test_gates(dtype: torch.dtype, width: int, name: str) -> None:
    gate_up = random(3, 2 * width + 5, dtype=dtype)[:, 5:]
    check(vars(fused_pointwise)[name](gate_up), vars(pointwise)[name](gate_up))


def test_types_that_are_not_supported_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"torch.float32.*not torch.float64"):
        fused_pointwise.silu_and_multiply(torch.zeros(2, 4, dtype=torch.float64))
    with pytest.raises(ValueError, match="must be alike"):
        fused_pointwise.add_rms_norm(torch.zeros(2, 4), torch.zeros(2, 5), None, 1e-5)
