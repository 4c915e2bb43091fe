"""Against transformers' own formulas, on the same random inputs."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.models.gemma3.modeling_gemma3 import Gemma3MLP, Gemma3RMSNorm
from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, apply_rotary_pos_emb
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import apply_rotary_pos_emb as apply_partial_rotary

from kernels import pointwise as plain
from kernels.native import pointwise as native
from kernels.table import Pointwise

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2**-6}
dtypes = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
implementations = pytest.mark.parametrize("kernels", [plain, native], ids=["plain", "native"])


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@implementations
@dtypes
@pytest.mark.parametrize(("norm", "shape"), [(LlamaRMSNorm, (5, 48)), (Qwen3RMSNorm, (5, 3, 16))])
def test_rms_norm(kernels: Pointwise, norm: Callable[..., Any], shape: tuple[int, ...], dtype: torch.dtype) -> None:
    # Rows of very different size, one so small that epsilon decides.
    hidden = random(*shape, dtype=dtype) * torch.tensor([1e-3, 1, 1, 30, 1e3]).view(-1, *[1] * (len(shape) - 1))
    hidden = hidden.to(dtype)
    reference = norm(shape[-1], eps=1e-5).to(dtype)
    with torch.no_grad():
        reference.weight.copy_(random(shape[-1], dtype=dtype, seed=1))
        expected = reference(hidden)
    out = kernels.rms_norm(hidden, reference.weight.detach(), 1e-5)
    assert out.dtype == dtype
    torch.testing.assert_close(out, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    # Within something wider, of which the rest stays as it is.
    around = random(*shape[:-1], shape[-1] + 9, dtype=dtype, seed=2)
    held = around.clone()
    held[..., 3:-6] = hidden
    kernels.rms_norm_in_place(held[..., 3:-6], reference.weight.detach(), 1e-5)
    assert torch.equal(held[..., 3:-6], out)
    held[..., 3:-6] = around[..., 3:-6]
    assert torch.equal(held, around)


@implementations
@dtypes
def test_rms_norm_scaled_by_one_more_than_its_weight(kernels: Pointwise, dtype: torch.dtype) -> None:
    hidden = random(5, 48, dtype=dtype) * 30
    reference = Gemma3RMSNorm(48, eps=1e-5).to(dtype)
    with torch.no_grad():
        # So small that 1 + weight would lose it in bfloat16, were it added there.
        reference.weight.copy_(random(48, dtype=dtype, seed=1) * 2**-8)
        expected = reference(hidden)
    out = kernels.rms_norm(hidden, reference.weight.detach(), 1e-5, offset=1.0)
    assert out.dtype == dtype
    torch.testing.assert_close(out, expected, rtol=1e-6 if dtype == torch.float32 else 0, atol=1e-6)


@implementations
@dtypes
def test_rms_norm_without_a_scale(kernels: Pointwise, dtype: torch.dtype) -> None:
    hidden = random(5, 3, 16, dtype=dtype) * 30
    expected = Gemma4RMSNorm(16, eps=1e-5, with_scale=False)(hidden)
    torch.testing.assert_close(
        kernels.rms_norm(hidden, None, 1e-5), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
    )


@implementations
@dtypes
def test_rotary_of_a_part_of_each_head(kernels: Pointwise, dtype: torch.dtype) -> None:
    rows, heads, head_dim, rotary_dim = 6, 4, 20, 6
    angles = random(rows, rotary_dim // 2, dtype=torch.float32, seed=2) * 3
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    query = random(rows, heads, head_dim, dtype=dtype)
    reference = query.transpose(0, 1)[None]
    expected, _ = apply_partial_rotary(reference, reference, cos.repeat(1, 2)[None], sin.repeat(1, 2)[None])

    kernels.apply_rotary(query, cos[:, None], sin[:, None])

    torch.testing.assert_close(query, expected[0].transpose(0, 1), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@implementations
@dtypes
def test_rotary_turns_heads_in_place_and_nothing_else(kernels: Pointwise, dtype: torch.dtype) -> None:
    rows, heads, head_dim = 6, 4, 10
    angles = random(rows, head_dim // 2, dtype=torch.float32, seed=2) * 3
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    # The queries and keys of a fused projection: strided, with values behind them.
    fused = random(rows, (heads + 2) * head_dim, dtype=dtype).view(rows, heads + 2, head_dim)
    before = fused.clone()
    query = before[:, :heads].transpose(0, 1)[None]
    expected, _ = apply_rotary_pos_emb(query, query, cos.repeat(1, 2)[None], sin.repeat(1, 2)[None])

    kernels.apply_rotary(fused[:, :heads], cos[:, None], sin[:, None])

    torch.testing.assert_close(
        fused[:, :heads], expected[0].transpose(0, 1), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
    )
    torch.testing.assert_close(fused[:, heads:], before[:, heads:], rtol=0, atol=0)


@implementations
def test_interleaved_rotary_turns_neighbours_like_complex_numbers(kernels: Pointwise) -> None:
    generator = torch.Generator().manual_seed(4)
    whole = torch.randn(5, 3, 14, generator=generator)
    angles = torch.randn(5, 1, 4, generator=generator)
    pairs = torch.view_as_complex(whole[..., 2:10].reshape(5, 3, 4, 2))
    expected = whole.clone()
    expected[..., 2:10] = torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(2)
    # A head's first two dimensions are not given, its last four are not turned.
    kernels.apply_rotary_interleaved(whole[..., 2:], angles.cos(), angles.sin())
    torch.testing.assert_close(whole, expected)


@implementations
@dtypes
def test_silu_and_multiply(kernels: Pointwise, dtype: torch.dtype) -> None:
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
    torch.testing.assert_close(
        kernels.silu_and_multiply(gate_up), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
    )


@implementations
@dtypes
def test_gelu_and_multiply(kernels: Pointwise, dtype: torch.dtype) -> None:
    width = 8
    config = SimpleNamespace(hidden_size=2 * width, intermediate_size=width, hidden_activation="gelu_pytorch_tanh")
    mlp = Gemma3MLP(config).to(dtype)
    gate_up = random(5, 2 * width, dtype=dtype) * 4
    eye = torch.eye(2 * width)
    with torch.no_grad():
        mlp.gate_proj.weight.copy_(eye[:width])
        mlp.up_proj.weight.copy_(eye[width:])
        mlp.down_proj.weight.copy_(eye[:, :width])
        expected = mlp(gate_up)[:, :width]
    torch.testing.assert_close(
        kernels.gelu_and_multiply(gate_up), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
    )


def test_a_weight_of_another_type_is_not_read_as_if_it_were_of_the_rows() -> None:
    hidden, weight = random(5, 48, dtype=torch.bfloat16), random(48, dtype=torch.float32, seed=1)
    expected = plain.rms_norm(hidden.float(), weight, 1e-5)
    out = native.rms_norm(hidden, weight, 1e-5)
    torch.testing.assert_close(out.float(), expected, rtol=2**-6, atol=2**-6)


@implementations
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(50, 33), (50, 1, 8), (3000, 40)])
def test_rows_of_a_table(kernels: Pointwise, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    table = random(*shape, dtype=dtype)
    index = torch.randint(shape[0], (2 * shape[0],), generator=torch.Generator().manual_seed(1))
    assert torch.equal(kernels.take_rows(table, index), torch.stack([table[row] for row in index.tolist()]))
    assert kernels.take_rows(table, index[:0]).shape == (0, *shape[1:])
