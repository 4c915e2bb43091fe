"""Cases of attention for ``benchmarks.gpu``: over pages of keys and values, and of latents."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu_case import Call, Case, Other, Place, size_of
from kernels.attention.gather import GatherAttention
from kernels.attention.latent import Expansion, Selection, attend_heads, plan_latents
from kernels.attention.paged import PagedAttention
from kernels.attention.paged_latent import PagedLatentAttention
from kernels.attention.segments import AttentionBackend, Segment
from kernels.pages import KEY_VALUE, IntArray, PageShape

SDPA = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
"""PyTorch's attentions, over keys and values that lie side by side."""


@dataclass(frozen=True, slots=True)
class Attended:
    """Sequences of equal length in pages that lie in no order: the last ``rows`` tokens of each attend."""

    place: Place
    sequences: int
    rows: int
    context: int
    query: torch.Tensor
    cache: torch.Tensor
    table: IntArray
    window: int | None = None

    @classmethod
    def of(
        cls, place: Place, sequences: int, rows: int, context: int, heads: tuple[int, int, int], window: int | None
    ) -> "Attended":
        """``heads``: query heads, heads of keys and values, numbers in each."""
        query_heads, kv_heads, head_dim = heads
        blocks = -(-context // 16)
        table = np.random.default_rng(0).permutation(sequences * blocks).reshape(sequences, blocks)
        cache = place.random(sequences * blocks, KEY_VALUE, kv_heads, 16, head_dim)
        query = place.random(sequences * rows, query_heads, head_dim)
        return cls(place, sequences, rows, context, query, cache, table, window)

    @property
    def scale(self) -> float:
        """Of scores."""
        return float(self.query.shape[2] ** -0.5)

    @property
    def seen(self) -> int:
        """Pairs of a row and a token that it sees, of one sequence."""
        contexts = range(self.context - self.rows + 1, self.context + 1)
        return sum(seen if self.window is None else min(seen, self.window) for seen in contexts)

    @property
    def moved(self) -> int:
        """Queries, results, and every key and value that somebody sees once."""
        tokens = self.context if self.window is None else min(self.context, self.window + self.rows - 1)
        return 2 * size_of(self.query) + self.sequences * tokens * size_of(self.cache[0]) // 16

    def call(self, backend: AttentionBackend, *, wide: bool = False) -> Call:
        """Planned beforehand, as once per step."""
        segments = [Segment(i * self.rows, self.rows, self.context, blocks) for i, blocks in enumerate(self.table)]
        plan = backend.plan(segments, PageShape.of(self.cache), self.window, self.place.device)
        query, cache = (self.query.float(), self.cache.float()) if wide else (self.query, self.cache)
        return partial(backend.attend, query, cache, plan, self.scale)

    def without_pages(self) -> dict[str, Other]:
        """PyTorch's attentions; a prompt's part and a window take a mask, which some of them refuse."""
        kv_heads, head_dim = self.cache.shape[2], self.cache.shape[4]
        lying = self.cache[torch.from_numpy(self.table).to(self.place.device)].permute(2, 0, 3, 1, 4, 5)
        keys, values = lying.reshape(KEY_VALUE, self.sequences, kv_heads, -1, head_dim)[:, :, :, : self.context]
        query = self.query.view(self.sequences, self.rows, -1, head_dim).transpose(1, 2)
        is_causal = self.rows == self.context and self.window is None
        mask = None
        if not is_causal and (self.rows > 1 or self.window is not None):
            mask = torch.ones(self.rows, self.context, dtype=torch.bool, device=self.place.device)
            mask = mask.tril(self.context - self.rows)
            if self.window is not None:
                mask = mask.triu(self.context - self.rows - self.window + 1)

        def attend(backend: SDPBackend, query: torch.Tensor) -> torch.Tensor:
            with sdpa_kernel([backend]):
                return F.scaled_dot_product_attention(
                    query,
                    keys,
                    values,
                    mask,
                    is_causal=is_causal,
                    scale=self.scale,
                    enable_gqa=query.shape[1] > kv_heads,
                )

        found: dict[str, Other] = {name: partial(attend, backend, query) for name, backend in SDPA.items()}
        if self.rows == 1:
            # A group's query heads as rows: what a caller can do to read keys and values once.
            folded = query.reshape(self.sequences, kv_heads, -1, head_dim)
            found |= {f"{name}, folded": partial(attend, backend, folded) for name, backend in SDPA.items()}
        return found


LLAMA_8B, SMOLLM2, GEMMA = (32, 8, 128), (9, 3, 64), (8, 4, 256)
"""Query heads, heads of keys and values, numbers in each."""


def attention(place: Place) -> Iterator[Case]:
    """Grouped-query attention over pages, of one row of many sequences and of many rows."""
    wanted: list[tuple[str, int, int, int, tuple[int, int, int], int | None]]
    if place.small:
        small = (6, 2, 16)
        wanted = [("decode", 2, 1, 40, small, None), ("prompt", 1, 20, 40, small, None), ("window", 2, 1, 40, small, 9)]
    else:
        wanted = [
            ("decode", batch, 1, context, LLAMA_8B, None) for batch in (1, 8, 64) for context in (256, 2000, 8000)
        ]
        wanted += [("decode", 8, 1, 2000, SMOLLM2, None), ("decode", 8, 1, 2000, GEMMA, None)]
        wanted += [("window", 8, 1, 8000, GEMMA, 1024), ("window", 1, 2000, 8000, GEMMA, 1024)]
        wanted += [("prompt", 1, rows, context, LLAMA_8B, None) for rows, context in ((512, 512), (2000, 2000))]
        wanted += [("prompt", 1, 2000, 2000, SMOLLM2, None), ("prompt", 1, 1024, 8000, LLAMA_8B, None)]
    for name, sequences, rows, context, heads, window in wanted:
        step = Attended.of(place, sequences, rows, context, heads, window)
        yield Case(
            f"{name} attention",
            f"{sequences} × {rows} of {context}, {heads[0]}/{heads[1]} × {heads[2]}",
            step.call(PagedAttention(place.gpu)),
            step.call(GatherAttention(), wide=True),
            moved=step.moved,
            operations=4 * sequences * step.seen * heads[0] * heads[2],
            others=step.without_pages(),
        )


def latent_attention(place: Place) -> Iterator[Case]:
    """Latent attention in the absorbed form, to all tokens or to those that an index has selected."""
    latent_dim, rotary_dim, key_dim = (32, 16, 16) if place.small else (512, 64, 128)
    block_size, scale = 16 if place.small else 64, 0.1
    sizes: tuple[tuple[int, int, int, int, int | None], ...] = (
        ((2, 1, 40, 3, None), (2, 1, 40, 3, 8), (1, 18, 40, 3, None))
        if place.small
        else ((8, 1, 2000, 128, None), (64, 1, 8000, 16, None), (8, 1, 8000, 128, 2048), (1, 512, 2000, 16, None))
    )
    for sequences, rows, context, heads, topk in sizes:
        blocks = -(-context // block_size)
        table = np.random.default_rng(0).permutation(sequences * blocks).reshape(sequences, blocks)
        segments = [Segment(i * rows, rows, context, own) for i, own in enumerate(table)]
        cache = place.random(sequences * blocks, 1, 1, block_size, latent_dim + rotary_dim)
        query = place.random(sequences * rows, heads, key_dim + rotary_dim)
        expansion = Expansion(*(place.random(heads, key_dim, latent_dim) / latent_dim**0.5 for _ in range(2)))
        selection = None
        if topk is not None:
            chosen = torch.rand(sequences * rows, context - rows + 1, device=place.device).topk(topk).indices
            selection = Selection(chosen.sort().values)
        kernel = PagedLatentAttention(place.gpu)
        paged = kernel.plan(segments, PageShape.of(cache), place.device)
        gathered = plan_latents(segments, PageShape.of(cache), None, place.device).latents
        wide = Expansion(expansion.keys.float(), expansion.values.float())
        # For each of several rows some tokens of its own could be selected.
        tokens = context if topk is None else min(context, topk * rows)
        yield Case(
            "latent attention" if topk is None else "selected latents",
            f"{sequences} × {rows} of {topk or context}, {heads} heads",
            partial(kernel.attend_heads, query, expansion, cache, paged, scale=scale, selection=selection),
            partial(attend_heads, query.float(), wide, cache.float(), gathered, scale=scale, selection=selection),
            moved=size_of(query, query, expansion.keys, expansion.values)
            + sequences * tokens * (latent_dim + rotary_dim) * cache.element_size(),
            others={
                "gathered": partial(attend_heads, query, expansion, cache, gathered, scale=scale, selection=selection)
            },
        )
