"""Triton's indexer against the gather path: the very same tokens, the earliest of equal scores above all."""

from collections.abc import Sequence
from types import MappingProxyType

import pytest
import torch

from kernels.attention.latent import plan_latents, select_tokens
from kernels.attention.paged import PagedAttention
from kernels.attention.paged_index import MAX_SCORES, PagedIndexer
from kernels.tuning import A100, IndexTile
from tests.kernels.interpreted.steps import CPU, Step, make_step

SMALL = MappingProxyType({(80, size): IndexTile(2, 16, 4, 1) for size in (2, 4)})
LENGTHS = [(1, 1), (1, 33), (5, 5), (3, 18), (1, 20)]


def step_of(lengths: Sequence[tuple[int, int]], heads: int, dtype: torch.dtype = torch.float32) -> Step:
    """Small whole numbers, so that every way of summing gives the same and many scores are equal."""
    step = make_step(lengths, (1, 1, 4, 20), heads=heads, gap=12, dtype=dtype)
    step.cache.round_()
    step.query.round_()
    return step


def check(step: Step, topk: int, weights: torch.Tensor | None = None, max_scores: int = MAX_SCORES) -> None:
    rows, heads, _ = step.query.shape
    if weights is None:
        weights = torch.randint(-2, 4, (rows, heads), generator=torch.Generator().manual_seed(1)).float()
    reference = plan_latents(step.segments, step.shape, None, CPU).latents
    expected = select_tokens(step.query, weights, step.cache, reference, topk)
    plan = PagedAttention(A100).plan(step.segments, step.shape, None, CPU)
    selection = PagedIndexer(A100, SMALL, max_scores).select_tokens(step.query, weights, step.cache, plan, topk)
    assert expected is not None
    assert selection is not None
    assert torch.equal(selection.tokens, expected.tokens)


@pytest.mark.parametrize("topk", [1, 7, 19])
@pytest.mark.parametrize("heads", [1, 20])
def test_the_same_tokens_are_chosen(topk: int, heads: int) -> None:
    check(step_of(LENGTHS, heads), topk)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_types(dtype: torch.dtype) -> None:
    check(step_of(LENGTHS, 3, dtype), 5)


def test_a_few_rows_at_a_time() -> None:
    check(step_of([(7, 9), (2, 30), (1, 12)], 2), 4, max_scores=3 * 2 * 30)


def test_scores_that_are_not_numbers_are_chosen_last() -> None:
    step = step_of([(1, 20), (2, 20)], 2)
    check(step, 6, torch.full((3, 2), torch.nan))


def test_nothing_is_selected_where_all_fits() -> None:
    step = step_of([(1, 8), (4, 8)], 2)
    plan = PagedAttention(A100).plan(step.segments, step.shape, None, CPU)
    assert PagedIndexer(A100).select_tokens(step.query, torch.ones(5, 2), step.cache, plan, 8) is None
