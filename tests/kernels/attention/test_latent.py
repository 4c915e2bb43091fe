from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.attention import latent
from kernels.attention.latent import (
    Expansion,
    LatentPlan,
    attend_heads,
    plan_latents,
    select_tokens,
    write_vectors,
)
from kernels.attention.segments import Segment
from kernels.pages import PageShape

CPU = torch.device("cpu")
# Large, finite, and far from any value that is written: a slot that is read by mistake shows.
SENTINEL = 1.0e4
LATENT_DIM, HEAD_DIM, INDEX_DIM = 12, 20, 8
# With few index heads a score is often exactly zero, and equal scores can be chosen among in any way.
HEADS, INDEX_HEADS = 3, 24
SCALE = 0.3
# Every head's key and value is the latent itself: queries are absorbed as they are.
UNEXPANDED = Expansion(*[torch.eye(LATENT_DIM).expand(HEADS, -1, -1)] * 2)


@dataclass(frozen=True, slots=True)
class Step:
    """A step as a model runner would present it; a page holds a block's latents, then its index keys.

    ``latents[i]`` and ``keys[i]`` are all of segment i's context; the last ``rows`` of them are this step's own.
    """

    segments: tuple[Segment, ...]
    query: torch.Tensor
    index_query: torch.Tensor
    index_weights: torch.Tensor
    latents: tuple[torch.Tensor, ...]
    keys: tuple[torch.Tensor, ...]
    latent_cache: torch.Tensor
    key_cache: torch.Tensor

    def plan(self, segments: Sequence[Segment] | None = None) -> LatentPlan:
        shapes = PageShape.of(self.latent_cache), PageShape.of(self.key_cache)
        return plan_latents(segments or self.segments, *shapes, CPU)

    def write(self, plan: LatentPlan) -> None:
        assert plan.index_keys is not None
        own = zip(self.segments, self.latents, self.keys, strict=True)
        latents, keys = zip(*[(vectors[-s.rows :], keys[-s.rows :]) for s, vectors, keys in own], strict=True)
        write_vectors(self.latent_cache, torch.cat(latents), plan.latents)
        write_vectors(self.key_cache, torch.cat(keys), plan.index_keys)


def make_step(lengths: Sequence[tuple[int, int]], *, block_size: int, seed: int) -> Step:
    """One segment per (rows, context), blocks in random order, earlier tokens already in the caches."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    used = [-(-context // block_size) for _, context in lengths]
    order = np.random.default_rng(seed).permutation(sum(used) + 3).astype(np.int64)
    page = block_size * (HEAD_DIM + INDEX_DIM)
    memory = torch.full((len(order) * page,), SENTINEL)

    def view(width: int, offset: int) -> torch.Tensor:
        shape = (len(order), 1, 1, block_size, width)
        return memory.as_strided(shape, (page, block_size * width, block_size * width, width, 1), offset)

    latent_cache, key_cache = view(HEAD_DIM, 0), view(INDEX_DIM, block_size * HEAD_DIM)
    segments: list[Segment] = []
    latents: list[torch.Tensor] = []
    keys: list[torch.Tensor] = []
    first_row = first_block = 0
    for (rows, context), count in zip(lengths, used, strict=True):
        blocks = order[first_block : first_block + count]
        latents.append(random(context, HEAD_DIM))
        keys.append(random(context, INDEX_DIM))
        for token in range(context - rows):
            place = blocks[token // block_size], 0, 0, token % block_size
            latent_cache[place], key_cache[place] = latents[-1][token], keys[-1][token]
        segments.append(Segment(first_row, rows, context, blocks))
        first_row += rows
        first_block += count
    return Step(
        tuple(segments),
        random(first_row, HEADS, HEAD_DIM),
        random(first_row, INDEX_HEADS, INDEX_DIM),
        random(first_row, INDEX_HEADS),
        tuple(latents),
        tuple(keys),
        latent_cache,
        key_cache,
    )


def naive(step: Step, topk: int) -> torch.Tensor:
    """Row by row and head by head, in float64."""
    out = torch.empty(len(step.query), HEADS, LATENT_DIM, dtype=torch.float64)
    for segment, latents, keys in zip(step.segments, step.latents, step.keys, strict=True):
        for index in range(segment.rows):
            row, seen = segment.first_row + index, segment.context - segment.rows + index + 1
            scores = [step.index_weights[row] @ (step.index_query[row] @ key).clamp(min=0) for key in keys[:seen]]
            visible = latents[torch.stack(scores).argsort(descending=True)[:topk]].double()
            for head in range(HEADS):
                weights = (visible @ step.query[row, head].double() * SCALE).softmax(dim=0)
                out[row, head] = weights @ visible[:, :LATENT_DIM]
    return out


def run(step: Step, topk: int | None) -> torch.Tensor:
    plan = step.plan()
    step.write(plan)
    selection = None
    if topk is not None:
        assert plan.index_keys is not None
        selection = select_tokens(step.index_query, step.index_weights, step.key_cache, plan.index_keys, topk)
    return attend_heads(step.query, UNEXPANDED, step.latent_cache, plan.latents, scale=SCALE, selection=selection)


@st.composite
def lengths(draw: st.DrawFn) -> tuple[int, int]:
    """(rows, context): a decode, a chunk in the middle of a prompt, or a prompt's start."""
    context = draw(st.one_of(st.integers(1, 12), st.integers(13, 70)))
    rows = draw(st.one_of(st.just(1), st.just(context), st.integers(1, context)))
    return rows, context


@given(
    steps=st.lists(lengths(), min_size=1, max_size=5),
    block_size=st.sampled_from([1, 3, 4, 16]),
    seed=st.integers(0, 999),
)
@settings(max_examples=20, deadline=None)
def test_equals_softmax_attention_row_by_row(steps: list[tuple[int, int]], block_size: int, seed: int) -> None:
    step = make_step(steps, block_size=block_size, seed=seed)
    torch.testing.assert_close(run(step, None).double(), naive(step, 1000), rtol=1e-5, atol=1e-5)


MIXED = [(1, 70), (5, 70), (1, 33), (20, 20), (1, 3), (3, 9), (1, 31)]
"""Rows that see fewer tokens than are selected, beside others that see more."""


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("topk", [1, 5, 16, 69, 70])
def test_attends_to_the_best_tokens_only(block_size: int, topk: int) -> None:
    step = make_step(MIXED, block_size=block_size, seed=topk)
    torch.testing.assert_close(run(step, topk).double(), naive(step, topk), rtol=1e-5, atol=1e-5)


def test_a_bound_on_scores_in_memory_only_splits_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run(make_step(MIXED, block_size=4, seed=1), 5)
    monkeypatch.setattr(latent, "MAX_GATHERED_ELEMENTS", 3 * INDEX_HEADS * 70)
    torch.testing.assert_close(run(make_step(MIXED, block_size=4, seed=1), 5), expected, rtol=1e-6, atol=1e-6)


def test_rows_of_a_selection_serve_a_plan_of_those_rows() -> None:
    """As later layers do that compute only the rows whose logits are wanted."""
    step = make_step(MIXED, block_size=4, seed=2)
    expected = run(step, 5)
    plan = step.plan()
    assert plan.index_keys is not None
    selection = select_tokens(step.index_query, step.index_weights, step.key_cache, plan.index_keys, 5)
    assert selection is not None
    last = [Segment(i, 1, s.context, s.blocks) for i, s in enumerate(step.segments)]
    rows = torch.tensor([s.first_row + s.rows - 1 for s in step.segments])
    cache, plan = step.latent_cache, step.plan(last)
    out = attend_heads(step.query[rows], UNEXPANDED, cache, plan.latents, scale=SCALE, selection=selection.select(rows))
    torch.testing.assert_close(out, expected[rows], rtol=1e-5, atol=1e-5)


def test_the_earliest_of_equal_scores_win() -> None:
    step = make_step([(1, 40), (4, 24)], block_size=4, seed=4)
    plan = step.plan()
    step.write(plan)
    assert plan.index_keys is not None
    nothing = torch.zeros_like(step.index_weights)
    selection = select_tokens(step.index_query, nothing, step.key_cache, plan.index_keys, 6)
    assert selection is not None
    assert selection.tokens.tolist() == [list(range(6))] * 5


@pytest.mark.parametrize("topk", [None, 5])
@pytest.mark.parametrize("value_dim", [4, 10])
def test_expanded_keys_and_values_are_the_absorbed_form_in_other_words(
    topk: int | None, value_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long chunks are expanded, two heads and then one at a time; decode rows and short chunks absorb the expansion."""
    monkeypatch.setattr(latent, "MAX_GATHERED_ELEMENTS", 2 * 2 * 70 * 10)
    steps = [(1, 70), (60, 60), (2, 40), (30, 70)]
    step = make_step(steps, block_size=4, seed=6)
    generator = torch.Generator().manual_seed(6)
    matrix = torch.randn(HEADS, 2 + value_dim, LATENT_DIM, generator=generator)
    expansion = Expansion(matrix[:, :2], matrix[:, 2:])
    query = torch.randn(len(step.query), HEADS, 2 + HEAD_DIM - LATENT_DIM, generator=generator)
    absorbed = torch.cat([torch.einsum("rhk,hkl->rhl", query[..., :2], matrix[:, :2]), query[..., 2:]], dim=-1)
    attended = naive(replace(step, query=absorbed), topk or 1000).float()
    expected = torch.einsum("rhl,hvl->rhv", attended, matrix[:, 2:])

    plan = step.plan()
    step.write(plan)
    assert plan.index_keys is not None
    selection = None
    if topk is not None:
        selection = select_tokens(step.index_query, step.index_weights, step.key_cache, plan.index_keys, topk)
    out = attend_heads(query, expansion, step.latent_cache, plan.latents, scale=SCALE, selection=selection)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


def test_nothing_is_selected_where_all_fits() -> None:
    step = make_step([(1, 8), (4, 8)], block_size=4, seed=3)
    plan = step.plan()
    step.write(plan)
    assert plan.index_keys is not None
    assert select_tokens(step.index_query, step.index_weights, step.key_cache, plan.index_keys, 8) is None
