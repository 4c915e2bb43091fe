"""Steps over paged caches with everything in them that a kernel could trip over."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kernels.attention.segments import Segment
from kernels.pages import PageShape

CPU = torch.device("cpu")
# Far from any value that is written: a slot that is read by mistake shows. Sums of many stay finite in float16.
SENTINEL = 100.0


def new_cache(
    num_blocks: int,
    sizes: tuple[int, int, int, int],
    *,
    gap: int = 0,
    before: int = 0,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Pages of ``(parts, kv_heads, block_size, head_dim)``, ``gap`` elements apart, ``before`` elements into memory."""
    parts, kv_heads, block_size, head_dim = sizes
    run = block_size * head_dim
    stride = parts * kv_heads * run + gap
    memory = torch.full((num_blocks * stride + before,), SENTINEL).to(dtype)
    return memory.as_strided((num_blocks, *sizes), (stride, kv_heads * run, run, head_dim, 1), before)


def memory_of(cache: torch.Tensor) -> torch.Tensor:
    """Everything that lies under a view, gaps included."""
    return torch.empty(0, dtype=cache.dtype).set_(cache.untyped_storage())


@dataclass(frozen=True, slots=True)
class Step:
    """Segments over a cache that holds all earlier tokens, and what this step's rows add."""

    segments: tuple[Segment, ...]
    cache: torch.Tensor
    query: torch.Tensor
    key_value: torch.Tensor

    @property
    def shape(self) -> PageShape:
        return PageShape.of(self.cache)


def make_step(
    lengths: Sequence[tuple[int, int]],
    sizes: tuple[int, int, int, int],
    *,
    heads: int,
    window: int | None = None,
    sinks: int = 0,
    gap: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Step:
    """One segment per (rows, context), blocks in random order. Blocks that no row sees are struck from its table."""
    generator = torch.Generator().manual_seed(0)
    parts, kv_heads, block_size, head_dim = sizes
    used = [-(-context // block_size) for _, context in lengths]
    order = np.random.default_rng(0).permutation(sum(used) + 1).astype(np.int64)
    cache = new_cache(len(order), sizes, gap=gap, dtype=dtype)
    segments, first_row = [], 0
    for (rows, context), count in zip(lengths, used, strict=True):
        blocks, order = order[:count].copy(), order[count:]
        for token in range(context - rows):
            content = torch.randn(parts, kv_heads, head_dim, generator=generator)
            cache[blocks[token // block_size], :, :, token % block_size] = content.to(dtype)
        if window is not None:
            lowest = context - rows - window + 1
            for index in range(count):
                if (index + 1) * block_size <= lowest and index * block_size >= sinks:
                    cache[blocks[index]] = SENTINEL
                    blocks[index] = -1
        segments.append(Segment(first_row, rows, context, blocks))
        first_row += rows
    # As a model computes them: parts of one fused projection.
    fused = torch.randn(first_row, heads * head_dim + parts * kv_heads * head_dim, generator=generator).to(dtype)
    query, key_value = fused.split([heads * head_dim, parts * kv_heads * head_dim], dim=1)
    return Step(
        tuple(segments),
        cache,
        query.view(first_row, heads, head_dim),
        key_value.view(first_row, parts, kv_heads, head_dim),
    )


def tolerance(dtype: torch.dtype) -> float:
    """Of results of size 1 that two ways of summing agree on."""
    return {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
