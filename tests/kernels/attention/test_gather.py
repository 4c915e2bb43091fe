from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.attention import gather
from kernels.attention.gather import GatherAttention
from kernels.attention.segments import AttentionBackend, Segment
from kernels.native.attention import NativeAttention
from kernels.pages import PageShape

CPU = torch.device("cpu")
# Large, finite, and far from any value that is written: a slot that is read by mistake shows.
SENTINEL = 1.0e4


@dataclass(frozen=True, slots=True)
class Step:
    """A step as a model runner would present it, and the keys and values that it must see.

    ``history[i]`` is segment i's ``[context, parts, kv_heads, head_dim]``; the last ``rows`` of it are this step's own.
    """

    shape: PageShape
    segments: tuple[Segment, ...]
    query: torch.Tensor
    history: tuple[torch.Tensor, ...]
    cache: torch.Tensor
    window: int | None
    sinks: int

    @property
    def key_value(self) -> torch.Tensor:
        """What this step writes, in row order."""
        return torch.cat([kv[-s.rows :] for s, kv in zip(self.segments, self.history, strict=True)])

    def sees(self, row: int, token: int) -> bool:
        """Whether the row at position ``row`` of a sequence sees a token."""
        return token <= row and (self.window is None or token < self.sinks or token > row - self.window)


def page_shape(kv_heads: int, block_size: int, head_dim: int, *, parts: int = 2, gap: int = 0) -> PageShape:
    """Pages with ``gap`` elements between them."""
    return PageShape(parts, kv_heads, block_size, head_dim, parts * kv_heads * block_size * head_dim + gap)


def make_step(
    lengths: Sequence[tuple[int, int]],
    *,
    shape: PageShape,
    heads: int,
    dtype: torch.dtype,
    seed: int,
    window: int | None = None,
    sinks: int = 0,
) -> Step:
    """One segment per (rows, context), blocks in random order, earlier tokens already in the cache.

    With a window, blocks that no row of a segment sees are struck from its table, and what they held is gone.
    """
    generator = torch.Generator().manual_seed(seed)
    used = [-(-context // shape.block_size) for _, context in lengths]
    order = np.random.default_rng(seed).permutation(sum(used) + 3).astype(np.int64)
    memory = torch.full((len(order) * shape.stride,), SENTINEL, dtype=dtype)
    run = shape.block_size * shape.head_dim
    cache = memory.as_strided(
        (len(order), shape.parts, shape.kv_heads, shape.block_size, shape.head_dim),
        (shape.stride, shape.kv_heads * run, run, shape.head_dim, 1),
    )
    step = Step(shape, (), torch.empty(0), (), cache, window, sinks)
    segments: list[Segment] = []
    history: list[torch.Tensor] = []
    first_row = first_block = 0
    for (rows, context), count in zip(lengths, used, strict=True):
        # A table may already hold a block for tokens to come.
        blocks = order[first_block : first_block + count + len(segments) % 2].copy()
        kv = torch.randn(context, shape.parts, shape.kv_heads, shape.head_dim, generator=generator).to(dtype)
        positions = range(context - rows, context)
        for index in range(count):
            tokens = range(index * shape.block_size, min(context, (index + 1) * shape.block_size))
            if not any(step.sees(row, token) for row in positions for token in tokens):
                blocks[index] = -1
                continue
            for token in tokens:
                if token < context - rows:
                    cache[blocks[index], :, :, token % shape.block_size] = kv[token]
        segments.append(Segment(first_row, rows, context, blocks))
        history.append(kv)
        first_row += rows
        first_block += count
    query = torch.randn(first_row, heads, shape.head_dim, generator=generator).to(dtype)
    return Step(shape, tuple(segments), query, tuple(history), cache, window, sinks)


def run(step: Step, scale: float, attention: AttentionBackend | None = None) -> torch.Tensor:
    attention = attention or GatherAttention()
    plan = attention.plan(step.segments, step.shape, step.window, CPU, sinks=step.sinks)
    attention.write(step.cache, step.key_value, plan)
    return attention.attend(step.query, step.cache, plan, scale)


each_backend = pytest.mark.parametrize(
    "backend", [lambda dtype: GatherAttention(), NativeAttention], ids=["gather", "native"]
)
Backend = Callable[[torch.dtype], AttentionBackend]


def naive(step: Step, scale: float) -> torch.Tensor:
    """Row by row and head by head, in float64."""
    rows, heads, head_dim = step.query.shape
    out = torch.empty(rows, heads, (step.shape.parts - 1) * head_dim, dtype=torch.float64)
    group = heads // step.shape.kv_heads
    for segment, kv in zip(step.segments, step.history, strict=True):
        for row in range(segment.rows):
            position = segment.context - segment.rows + row
            visible = kv[[token for token in range(position + 1) if step.sees(position, token)]].double()
            for head in range(heads):
                query = step.query[segment.first_row + row, head].double()
                keys, values = visible[:, 0, head // group], visible[:, 1:, head // group].flatten(1)
                scores = keys @ query * scale
                weights = (scores - scores.max()).exp()
                out[segment.first_row + row, head] = weights / weights.sum() @ values
    return out


@st.composite
def lengths(draw: st.DrawFn) -> tuple[int, int]:
    """(rows, context): a decode, a chunk in the middle of a prompt, or a prompt's start."""
    context = draw(st.one_of(st.integers(1, 12), st.integers(13, 70)))
    rows = draw(st.one_of(st.just(1), st.just(context), st.integers(1, context)))
    return rows, context


@each_backend
@given(
    steps=st.lists(lengths(), min_size=1, max_size=6),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 4),
    block_size=st.sampled_from([1, 3, 4, 16]),
    parts=st.sampled_from([2, 2, 3]),
    gap=st.sampled_from([0, 3, 8]),
    seed=st.integers(0, 999),
)
@settings(max_examples=60)
def test_equals_softmax_attention_row_by_row(
    backend: Backend,
    steps: list[tuple[int, int]],
    kv_heads: int,
    group: int,
    block_size: int,
    parts: int,
    gap: int,
    seed: int,
) -> None:
    shape = page_shape(kv_heads, block_size, head_dim=8, parts=parts, gap=gap)
    step = make_step(steps, shape=shape, heads=kv_heads * group, dtype=torch.float32, seed=seed)
    expected = naive(step, scale=0.3)
    torch.testing.assert_close(
        run(step, scale=0.3, attention=backend(torch.float32)).double(), expected, rtol=1e-5, atol=1e-5
    )


@each_backend
@given(
    steps=st.lists(lengths(), min_size=1, max_size=6),
    kv_heads=st.integers(1, 2),
    block_size=st.sampled_from([1, 3, 4, 16]),
    window=st.one_of(st.integers(1, 9), st.integers(10, 80)),
    sinks=st.sampled_from([0, 0, 1, 4, 7]),
    gap=st.sampled_from([0, 5]),
    seed=st.integers(0, 999),
)
@settings(max_examples=120)
def test_a_window_sees_the_last_tokens_and_the_sinks_and_reads_no_other_block(
    backend: Backend,
    steps: list[tuple[int, int]],
    kv_heads: int,
    block_size: int,
    window: int,
    sinks: int,
    gap: int,
    seed: int,
) -> None:
    shape = page_shape(kv_heads, block_size, head_dim=4, gap=gap)
    step = make_step(steps, shape=shape, heads=2 * kv_heads, dtype=torch.float32, seed=seed, window=window, sinks=sinks)
    expected = naive(step, scale=0.3)
    torch.testing.assert_close(
        run(step, scale=0.3, attention=backend(torch.float32)).double(), expected, rtol=1e-5, atol=1e-5
    )


def test_a_struck_block_that_is_read_is_an_error_and_not_some_other_block() -> None:
    # The test above rests on it.
    shape = page_shape(1, 4, head_dim=4)
    step = make_step([(1, 20)], shape=shape, heads=2, dtype=torch.float32, seed=0, window=5)
    assert (step.segments[0].blocks == -1).sum() == 3
    blind = GatherAttention().plan(step.segments, shape, None, CPU)
    with pytest.raises(IndexError):
        GatherAttention().attend(step.query, step.cache, blind, 0.3)


@each_backend
def test_bfloat16_stays_within_its_own_precision(backend: Backend) -> None:
    shape = page_shape(kv_heads=2, block_size=16, head_dim=32)
    mixed = [(1, 130), (1, 70), (40, 40), (1, 65), (24, 100), (1, 1)]
    step = make_step(mixed, shape=shape, heads=6, dtype=torch.bfloat16, seed=5)
    expected = naive(step, scale=32**-0.5)
    out = run(step, scale=32**-0.5, attention=backend(torch.bfloat16))
    assert out.dtype == torch.bfloat16
    # Inputs are exact in both; scores, weights and sums are rounded to 8 bits once each.
    torch.testing.assert_close(out.double(), expected, rtol=2**-6, atol=2**-6)


def test_a_bound_on_gathered_memory_only_splits_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = page_shape(kv_heads=2, block_size=4, head_dim=8)
    decodes = [(1, context) for context in (40, 39, 38, 37, 20, 19, 3, 2)]

    def gathered_elements(limit: int) -> tuple[list[int], torch.Tensor]:
        monkeypatch.setattr(gather, "MAX_GATHERED_ELEMENTS", limit)
        step = make_step(decodes, shape=shape, heads=4, dtype=torch.float32, seed=1)
        plan = GatherAttention().plan(step.segments, shape, None, CPU)
        return [batch.runs.numel() * shape.block_size * shape.head_dim for batch in plan.decodes], run(step, 0.5)

    together, expected = gathered_elements(1 << 30)
    # Room for two of the longest (2 parts * 40 tokens * 2 heads * 8 numbers each), not for three.
    split, out = gathered_elements(2 * 2 * 40 * 2 * 8)

    assert max(split) <= 2 * 2 * 40 * 2 * 8 < max(together)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    # Sequences of very different length do not pad each other: never more than twice the blocks that are needed.
    needed = sum(2 * 2 * 8 * 4 * -(-context // 4) for _, context in decodes)
    assert sum(together) <= 2 * needed


def test_a_step_without_rows_plans_nothing() -> None:
    plan = GatherAttention().plan([], page_shape(1, 4, 8), None, CPU)
    assert plan.slots.blocks.numel() == plan.slots.offsets.numel() == 0
    assert not plan.decodes
    assert not plan.chunks
