"""Against transformers' own formulas, on the same random inputs."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, apply_rotary_pos_emb
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from kernels.pointwise import apply_rotary, rms_norm, silu_and_multiply

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2**-6}
dtypes = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@dtypes
@pytest.mark.parametrize(("norm", "shape"), [(LlamaRMSNorm, (5, 48)), (Qwen3RMSNorm, (5, 3, 16))])
def test_rms_norm(norm: Callable[..., Any], shape: tuple[int, ...], dtype: torch.dtype) -> None:
    # Rows of very different size, one so small that epsilon decides.
    hidden = random(*shape, dtype=dtype) * torch.tensor([1e-3, 1, 1, 30, 1e3]).view(-1, *[1] * (len(shape) - 1))
    hidden = hidden.to(dtype)
    reference = norm(shape[-1], eps=1e-5).to(dtype)
    with torch.no_grad():
        reference.weight.copy_(random(shape[-1], dtype=dtype, seed=1))
        expected = reference(hidden)
    out = rms_norm(hidden, reference.weight.detach(), 1e-5)
    assert out.dtype == dtype
    torch.testing.assert_close(out, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@dtypes
def test_rotary_turns_heads_in_place_and_nothing_else(dtype: torch.dtype) -> None:
    rows, heads, head_dim = 6, 4, 10
    angles = random(rows, head_dim // 2, dtype=torch.float32, seed=2) * 3
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    # The queries and keys of a fused projection: strided, with values behind them.
    fused = random(rows, (heads + 2) * head_dim, dtype=dtype).view(rows, heads + 2, head_dim)
    before = fused.clone()
    query = before[:, :heads].transpose(0, 1)[None]
    expected, _ = apply_rotary_pos_emb(query, query, cos.repeat(1, 2)[None], sin.repeat(1, 2)[None])

    apply_rotary(fused[:, :heads], cos[:, None], sin[:, None])

    torch.testing.assert_close(
        fused[:, :heads], expected[0].transpose(0, 1), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
    )
    torch.testing.assert_close(fused[:, heads:], before[:, heads:], rtol=0, atol=0)


@dtypes
def test_silu_and_multiply(dtype: torch.dtype) -> None:
    width = 8
    config = SimpleNamespace(hidden_size=2 * width, intermediate_size=width, mlp_bias=False, hidden_act="silu")
    mlp = LlamaMLP(config).to(dtype)
    gate_up = random(5, 2 * width, dtype=dtype) * 4
    # With projections that only pick columns, the layer is nothing but its activation.
    eye = torch.eye(2 * width)
    with torch.no_grad():
        mlp.gate_proj.weight.copy_(eye[:width])
        mlp.up_proj.weight.copy_(eye[width:])
        mlp.down_proj.weight.copy_(eye[:, :width])
        expected = mlp(gate_up)[:, :width]
    torch.testing.assert_close(silu_and_multiply(gate_up), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
