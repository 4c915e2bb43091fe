"""Paged attention in plain PyTorch: the reference for every kernel, and the CPU path.

Decode rows of many sequences are answered together: their pages are gathered into ``[batch, kv_heads, tokens,
head_dim]`` and the query heads of one group become the rows of a batched matrix product, so keys and values are never
expanded to the number of query heads. Prompt chunks go through PyTorch's fused attention, one sequence at a time.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from kernels.attention.segments import AttentionPlan, Segment
from kernels.pages import PARTS, PageShape, write_slots

# One gather holds at most this many elements, so that memory stays bounded whatever the batch and context.
MAX_GATHERED_ELEMENTS = 16 << 20


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """Sequences of similar length with one query row each.

    ``rows`` int64 ``[batch]`` or None when they are rows ``[0, batch)``; ``runs`` int64, flat, the pages' runs;
    ``mask`` float32 ``[batch, 1, 1, tokens]``, 0 where visible and -inf elsewhere, or None when all slots are visible.
    """

    batch: int
    tokens: int
    rows: torch.Tensor | None
    runs: torch.Tensor
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Chunk:
    """Several query rows of one sequence; ``mask`` is bool ``[rows, context]``, or None for a plain causal start."""

    first_row: int
    rows: int
    context: int
    runs: torch.Tensor
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class GatherPlan:
    """Everything that ``GatherAttention`` needs for one step of one group."""

    shape: PageShape
    slots: torch.Tensor
    decodes: tuple[DecodeBatch, ...]
    chunks: tuple[Chunk, ...]


class GatherAttention:
    """See the module. Stateless; one instance serves every layer."""

    def plan(self, segments: Sequence[Segment], shape: PageShape, device: torch.device) -> GatherPlan:
        """Group one-row segments by length, leave the others as they are."""
        slots = [shape.slot_rows(s.blocks, s.context - s.rows, s.context).reshape(-1) for s in segments]
        singles = sorted((s for s in segments if s.rows == 1), key=lambda s: -s.context)
        return GatherPlan(
            shape=shape,
            slots=torch.from_numpy(np.concatenate(slots)).to(device) if slots else torch.empty(0, dtype=torch.int64),
            decodes=tuple(_decode_batch(group, shape, device) for group in _similar_lengths(singles, shape)),
            chunks=tuple(_chunk(s, shape, device) for s in segments if s.rows > 1),
        )

    def write(self, cache: torch.Tensor, key_value: torch.Tensor, plan: AttentionPlan) -> None:
        """Store every row's key and value."""
        assert isinstance(plan, GatherPlan)
        write_slots(cache, plan.slots, key_value)

    def attend(self, query: torch.Tensor, cache: torch.Tensor, plan: AttentionPlan, scale: float) -> torch.Tensor:
        """Causal grouped-query attention; softmax in float32."""
        assert isinstance(plan, GatherPlan)
        shape = plan.shape
        runs = cache.view(-1, shape.block_size * shape.head_dim)
        out = torch.empty_like(query)
        for batch in plan.decodes:
            _attend_decodes(query, runs, batch, shape, scale, out)
        for chunk in plan.chunks:
            _attend_chunk(query, runs, chunk, shape, scale, out)
        return out


def _similar_lengths(singles: Sequence[Segment], shape: PageShape) -> Iterator[list[Segment]]:
    """Split segments, longest first, so that padding at most doubles the work and a gather stays bounded."""
    group: list[Segment] = []
    for segment in singles:
        if group:
            longest = group[0].context
            elements = PARTS * (len(group) + 1) * longest * shape.kv_heads * shape.head_dim
            if segment.context * 2 < longest or elements > MAX_GATHERED_ELEMENTS:
                yield group
                group = []
        group.append(segment)
    if group:
        yield group


def _decode_batch(group: list[Segment], shape: PageShape, device: torch.device) -> DecodeBatch:
    blocks_each = -(-group[0].context // shape.block_size)
    tokens = blocks_each * shape.block_size
    table = np.zeros((len(group), blocks_each), dtype=np.int64)
    for row, segment in enumerate(group):
        used = -(-segment.context // shape.block_size)
        table[row, :used] = segment.blocks[:used]
    contexts = np.array([segment.context for segment in group])
    rows = np.array([segment.first_row for segment in group])
    mask = None
    if (contexts != tokens).any():
        hidden = np.arange(tokens)[None, :] >= contexts[:, None]
        mask = torch.from_numpy(np.where(hidden, -np.inf, 0).astype(np.float32))[:, None, None, :].to(device)
    return DecodeBatch(
        batch=len(group),
        tokens=tokens,
        rows=None if (rows == np.arange(len(group))).all() else torch.from_numpy(rows).to(device),
        runs=torch.from_numpy(shape.run_rows(table).reshape(-1)).to(device),
        mask=mask,
    )


def _chunk(segment: Segment, shape: PageShape, device: torch.device) -> Chunk:
    used = -(-segment.context // shape.block_size)
    mask = None
    if segment.rows != segment.context:
        visible = torch.ones(segment.rows, segment.context, dtype=torch.bool, device=device)
        mask = visible.tril(segment.context - segment.rows)
    return Chunk(
        first_row=segment.first_row,
        rows=segment.rows,
        context=segment.context,
        runs=torch.from_numpy(shape.run_rows(segment.blocks[:used]).reshape(-1)).to(device),
        mask=mask,
    )


def _attend_decodes(
    query: torch.Tensor, runs: torch.Tensor, batch: DecodeBatch, shape: PageShape, scale: float, out: torch.Tensor
) -> None:
    heads = query.shape[1]
    group = heads // shape.kv_heads
    kv = runs.index_select(0, batch.runs).view(PARTS, batch.batch * shape.kv_heads, batch.tokens, shape.head_dim)
    rows = query[: batch.batch] if batch.rows is None else query.index_select(0, batch.rows)
    scores = torch.bmm(rows.reshape(batch.batch * shape.kv_heads, group, shape.head_dim), kv[0].transpose(1, 2))
    scores = scores.float().mul_(scale)
    if batch.mask is not None:
        scores.view(batch.batch, shape.kv_heads, group, batch.tokens).add_(batch.mask)
    weights = torch.softmax(scores, dim=-1).to(query.dtype)
    result = torch.bmm(weights, kv[1]).view(batch.batch, heads, shape.head_dim)
    if batch.rows is None:
        out[: batch.batch] = result
    else:
        out.index_copy_(0, batch.rows, result)


def _attend_chunk(
    query: torch.Tensor, runs: torch.Tensor, chunk: Chunk, shape: PageShape, scale: float, out: torch.Tensor
) -> None:
    kv = runs.index_select(0, chunk.runs).view(PARTS, 1, shape.kv_heads, -1, shape.head_dim)[:, :, :, : chunk.context]
    rows = slice(chunk.first_row, chunk.first_row + chunk.rows)
    result = F.scaled_dot_product_attention(
        query[rows].transpose(0, 1).unsqueeze(0),
        kv[0],
        kv[1],
        attn_mask=chunk.mask,
        is_causal=chunk.mask is None,
        scale=scale,
        enable_gqa=True,
    )
    out[rows] = result[0].transpose(0, 1)
