"""Windows, sinks and wide values over pages, against softmax attention row by row in float64.

Blocks that no row may see are struck from the tables, so that reading one reads the last block, which is poisoned.
"""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.attention.gather import GatherAttention
from kernels.attention.segments import Segment
from kernels.pages import PageShape

CPU = torch.device("cpu")
POISON = 1.0e4
KV_HEADS, GROUP, HEAD_DIM = 2, 3, 4
SCALE = 0.4


@dataclass(frozen=True)
class Case:
    """``lengths`` are (rows, context) of every sequence."""

    lengths: list[tuple[int, int]]
    window: int | None
    sinks: int
    block_size: int
    value_parts: int

    def sees(self, query: int, key: int) -> bool:
        return key <= query and (self.window is None or query - key < self.window or key < self.sinks)

    def is_needed(self, block: int, first_query: int) -> bool:
        slots = range(block * self.block_size, (block + 1) * self.block_size)
        return any(self.sees(first_query, slot) or slot >= first_query for slot in slots)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    lengths = []
    for _ in range(draw(st.integers(1, 5))):
        context = draw(st.integers(1, 70))
        lengths.append((draw(st.one_of(st.just(1), st.just(context), st.integers(1, context))), context))
    window = draw(st.one_of(st.none(), st.integers(1, 40)))
    sinks = 0 if window is None else draw(st.integers(0, 20))
    return Case(lengths, window, sinks, draw(st.sampled_from([1, 3, 4, 16])), draw(st.integers(1, 3)))


def compute(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """What the gather path gives, and what the definition gives."""
    generator = torch.Generator().manual_seed(3)
    size, parts = case.block_size, 1 + case.value_parts
    tables = [-(-context // size) for _, context in case.lengths]
    cache = torch.full((sum(tables) + 1, parts, KV_HEADS, size, HEAD_DIM), POISON)
    segments, histories, first_row = [], [], 0
    blocks = np.random.default_rng(3).permutation(sum(tables))
    for (rows, context), count in zip(case.lengths, tables, strict=True):
        table, blocks = blocks[:count].copy(), blocks[count:]
        history = torch.randn(context, parts, KV_HEADS, HEAD_DIM, generator=generator)
        for token in range(context - rows):
            cache[table[token // size], :, :, token % size] = history[token]
        table[[not case.is_needed(block, context - rows) for block in range(count)]] = -1
        segments.append(Segment(first_row, rows, context, table))
        histories.append(history)
        first_row += rows
    query = torch.randn(first_row, KV_HEADS * GROUP, HEAD_DIM, generator=generator)

    backend = GatherAttention()
    plan = backend.plan(segments, PageShape.of(cache), case.window, CPU, sinks=case.sinks)
    new = [history[-s.rows :] for s, history in zip(segments, histories, strict=True)]
    backend.write(cache, torch.cat(new), plan)
    out = backend.attend(query, cache, plan, SCALE)

    expected = torch.empty(first_row, KV_HEADS * GROUP, case.value_parts * HEAD_DIM, dtype=torch.float64)
    for s, history in zip(segments, histories, strict=True):
        for row in range(s.rows):
            position = s.context - s.rows + row
            visible = history[[key for key in range(s.context) if case.sees(position, key)]].double()
            for head in range(KV_HEADS * GROUP):
                keys, *values = visible[:, :, head // GROUP].unbind(1)
                weights = (keys @ query[s.first_row + row, head].double() * SCALE).softmax(0)
                expected[s.first_row + row, head] = weights @ torch.cat(values, dim=1)
    return out.double(), expected


@given(case=cases())
@settings(max_examples=80)
def test_equals_softmax_attention_row_by_row(case: Case) -> None:
    out, expected = compute(case)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("context", [5, 6, 20, 21, 24, 60])
@pytest.mark.parametrize("rows", [1, 5])
def test_sinks_that_end_inside_a_block(context: int, rows: int) -> None:
    """The rest of the sinks' last block is behind the window, at its edge, or within it."""
    out, expected = compute(Case([(rows, context)], window=7, sinks=5, block_size=4, value_parts=2))
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
