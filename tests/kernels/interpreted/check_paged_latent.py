"""Triton's latent attention against the gather path, with and without a selection of tokens."""

from types import MappingProxyType

import pytest
import torch

from kernels import tuning
from kernels.attention.latent import Expansion, Selection, attend_heads, plan_latents
from kernels.attention.paged_latent import PagedLatentAttention
from kernels.tuning import A100, AttentionTile, Gpu
from tests.kernels.interpreted.steps import CPU, Step, make_step, tolerance

SCALE = 0.3
SMALL = MappingProxyType({(80, size, 512): AttentionTile(16, 16, 4, 1) for size in (2, 4)})
LENGTHS = [(1, 1), (1, 33), (2, 2), (2, 18)]


def choose(step: Step, topk: int) -> Selection:
    """Some tokens of what each row sees, in ascending order; -1 where it sees fewer."""
    generator = torch.Generator().manual_seed(2)
    tokens = torch.full((len(step.query), topk), -1)
    for segment in step.segments:
        for row in range(segment.rows):
            seen = segment.context - segment.rows + row + 1
            chosen = torch.randperm(seen, generator=generator)[:topk].sort().values
            tokens[segment.first_row + row, : len(chosen)] = chosen
    return Selection(tokens)


def check(step: Step, latent_dim: int, selection: Selection | None = None, gpu: Gpu = A100) -> None:
    attention = PagedLatentAttention(gpu, SMALL)
    plan = attention.plan(step.segments, step.shape, CPU)
    attention.write_vectors(step.cache, step.key_value[:, 0, 0], plan)
    out = attention.attend(step.query, step.cache, plan, latent_dim=latent_dim, scale=SCALE, selection=selection)
    # Latents that are their own keys and values.
    same = torch.eye(latent_dim, dtype=step.query.dtype).expand(step.query.shape[1], -1, -1)
    expected = attend_heads(
        step.query,
        Expansion(same, same),
        step.cache,
        plan_latents(step.segments, step.shape, None, CPU).latents,
        scale=SCALE,
        selection=selection,
    )
    assert out.dtype == step.query.dtype
    limit = tolerance(step.query.dtype)
    torch.testing.assert_close(out, expected, rtol=limit, atol=limit)


@pytest.mark.parametrize(("latent_dim", "rotary_dim", "heads"), [(512, 64, 16), (32, 8, 1), (20, 0, 3), (48, 20, 20)])
def test_every_row_sees_all_before_it(latent_dim: int, rotary_dim: int, heads: int) -> None:
    check(make_step(LENGTHS, (1, 1, 4, latent_dim + rotary_dim), heads=heads, gap=12), latent_dim)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_types(dtype: torch.dtype) -> None:
    check(make_step(LENGTHS, (1, 1, 16, 40), heads=8, dtype=dtype), 32)


@pytest.mark.parametrize(("topk", "block_size"), [(1, 16), (5, 1), (20, 16), (40, 4)])
def test_only_selected_tokens_are_seen(topk: int, block_size: int) -> None:
    step = make_step(LENGTHS, (1, 1, block_size, 40), heads=5, gap=3)
    check(step, 32, choose(step, topk))


@pytest.mark.parametrize("topk", [None, 40])
def test_contexts_are_split(topk: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "LEAST_TILES_PER_SPLIT", 1)
    step = make_step([(1, 1), (1, 33), (1, 70)], (1, 1, 4, 40), heads=3)
    check(step, 32, None if topk is None else choose(step, topk), Gpu(80, 1000))


def test_heads_have_keys_and_values_of_their_own() -> None:
    step = make_step(LENGTHS, (1, 1, 4, 40), heads=3)
    generator = torch.Generator().manual_seed(4)
    expansion = Expansion(torch.randn(3, 6, 32, generator=generator), torch.randn(3, 10, 32, generator=generator))
    query = torch.randn(len(step.query), 3, 14, generator=generator)
    attention = PagedLatentAttention(A100, SMALL)
    plan = attention.plan(step.segments, step.shape, CPU)
    attention.write_vectors(step.cache, step.key_value[:, 0, 0], plan)
    reference = plan_latents(step.segments, step.shape, None, CPU).latents
    out = attention.attend_heads(query, expansion, step.cache, plan, scale=0.05)
    assert out.is_contiguous(), "layers view it as rows"
    torch.testing.assert_close(
        out,
        attend_heads(query, expansion, step.cache, reference, scale=0.05),
        rtol=1e-4,
        atol=1e-4,
    )
