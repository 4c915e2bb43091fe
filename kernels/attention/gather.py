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
from kernels.pages import KEY_VALUE, IntArray, PageShape, Slots, locate, write_slots

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
    """Several query rows of one sequence over the last ``span`` tokens of its context.

    ``mask`` is bool ``[rows, span]``, or None for a plain causal start.
    """

    first_row: int
    rows: int
    span: int
    runs: torch.Tensor
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class GatherPlan:
    """Everything that ``GatherAttention`` needs for one step of one kind of page."""

    shape: PageShape
    slots: Slots
    decodes: tuple[DecodeBatch, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True)
class Visible:
    """What a segment's rows see, in whole blocks: the first ``sink_blocks`` of its table, and all from ``first_block``.

    Slots are counted in the order of these blocks. Visible are ``[0, sinks)`` and ``[begin, end)``.
    """

    segment: Segment
    sink_blocks: int
    first_block: int
    sinks: int
    begin: int
    end: int

    @classmethod
    def of(cls, segment: Segment, window: int | None, block_size: int, sinks: int = 0) -> "Visible":
        """All of the context, or the sinks and what the first row's window still reaches."""
        begin = 0 if window is None else max(0, segment.context - segment.rows - window + 1)
        sink_blocks = -(-sinks // block_size)
        first_block = max(sink_blocks, begin // block_size)
        left_out = (first_block - sink_blocks) * block_size
        return cls(segment, sink_blocks, first_block, sinks, begin - left_out, segment.context - left_out)

    def blocks(self, block_size: int) -> IntArray:
        """The blocks that hold it."""
        table = self.segment.blocks[: -(-self.segment.context // block_size)]
        if self.sink_blocks == 0:
            return table[self.first_block :]
        return np.concatenate((table[: self.sink_blocks], table[self.first_block :]))


class GatherAttention:
    """See the module. Stateless; one instance serves every layer."""

    def plan(
        self, segments: Sequence[Segment], shape: PageShape, window: int | None, device: torch.device, *, sinks: int = 0
    ) -> GatherPlan:
        """Group one-row segments by length, leave the others as they are."""
        visible = [Visible.of(segment, window, shape.block_size, sinks) for segment in segments]
        singles = sorted((v for v in visible if v.segment.rows == 1), key=lambda v: -v.end)
        return GatherPlan(
            shape=shape,
            slots=plan_slots(segments, shape.block_size, device),
            decodes=tuple(_decode_batch(group, shape, device) for group in _similar_lengths(singles, shape)),
            chunks=tuple(_chunk(v, shape, window, device) for v in visible if v.segment.rows > 1),
        )

    def write(self, cache: torch.Tensor, key_value: torch.Tensor, plan: AttentionPlan) -> None:
        """Store every row's key and value."""
        assert isinstance(plan, GatherPlan)
        write_slots(cache, plan.slots, key_value)

    def attend(self, query: torch.Tensor, cache: torch.Tensor, plan: AttentionPlan, scale: float) -> torch.Tensor:
        """Causal grouped-query attention; softmax in float32 at least."""
        assert isinstance(plan, GatherPlan)
        shape = plan.shape
        runs = shape.runs(cache)
        out = query.new_empty(*query.shape[:2], (shape.parts - 1) * shape.head_dim)
        for batch in plan.decodes:
            _attend_decodes(query, runs, batch, shape, scale, out)
        for chunk in plan.chunks:
            _attend_chunk(query, runs, chunk, shape, scale, out)
        return out


def plan_slots(segments: Sequence[Segment], block_size: int, device: torch.device) -> Slots:
    """Where every row's own token is stored."""
    blocks, offsets = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.int64)]
    for segment in segments:
        located = locate(segment.blocks, segment.context - segment.rows, segment.context, block_size)
        blocks.append(located[0])
        offsets.append(located[1])
    return Slots.of_positions(np.concatenate(blocks), np.concatenate(offsets), device)


def chunk_mask(rows: int, visible: Visible, window: int | None, device: torch.device) -> torch.Tensor | None:
    """Bool ``[rows, visible.end]``: what each row sees, or None for a plain causal start."""
    if visible.end == rows and (window is None or rows <= window + visible.sinks):
        return None
    causal = torch.ones(rows, visible.end, dtype=torch.bool, device=device).tril(visible.end - rows)
    if window is None:
        return causal
    mask = causal.triu(visible.end - rows - window + 1)
    mask[:, : visible.sinks] = causal[:, : visible.sinks]
    return mask


def _similar_lengths(singles: Sequence[Visible], shape: PageShape) -> Iterator[list[Visible]]:
    """Split segments, longest first, so that padding at most doubles the work and a gather stays bounded."""
    group: list[Visible] = []
    for visible in singles:
        if group:
            longest = group[0].end
            elements = shape.parts * (len(group) + 1) * longest * shape.kv_heads * shape.head_dim
            if visible.end * 2 < longest or elements > MAX_GATHERED_ELEMENTS:
                yield group
                group = []
        group.append(visible)
    if group:
        yield group


def _decode_batch(group: list[Visible], shape: PageShape, device: torch.device) -> DecodeBatch:
    blocks_each = -(-group[0].end // shape.block_size)
    tokens = blocks_each * shape.block_size
    table = np.zeros((len(group), blocks_each), dtype=np.int64)
    for row, visible in enumerate(group):
        blocks = visible.blocks(shape.block_size)
        table[row, : len(blocks)] = blocks
    begins = np.array([visible.begin for visible in group])
    ends = np.array([visible.end for visible in group])
    rows = np.array([visible.segment.first_row for visible in group])
    mask = None
    sinks = group[0].sinks
    if (begins > sinks).any() or (ends != tokens).any():
        slot = np.arange(tokens)[None, :]
        hidden = (slot >= ends[:, None]) | (slot < begins[:, None]) & (slot >= sinks)
        mask = torch.from_numpy(np.where(hidden, -np.inf, 0).astype(np.float32))[:, None, None, :].to(device)
    return DecodeBatch(
        batch=len(group),
        tokens=tokens,
        rows=None if (rows == np.arange(len(group))).all() else torch.from_numpy(rows).to(device),
        runs=torch.from_numpy(shape.run_starts(table).reshape(-1)).to(device),
        mask=mask,
    )


def _chunk(visible: Visible, shape: PageShape, window: int | None, device: torch.device) -> Chunk:
    segment = visible.segment
    return Chunk(
        first_row=segment.first_row,
        rows=segment.rows,
        span=visible.end,
        runs=torch.from_numpy(shape.run_starts(visible.blocks(shape.block_size)).reshape(-1)).to(device),
        mask=chunk_mask(segment.rows, visible, window, device),
    )


def _attend_decodes(
    query: torch.Tensor, runs: torch.Tensor, batch: DecodeBatch, shape: PageShape, scale: float, out: torch.Tensor
) -> None:
    heads = query.shape[1]
    group = heads // shape.kv_heads
    kv = runs.index_select(0, batch.runs).view(shape.parts, batch.batch * shape.kv_heads, batch.tokens, shape.head_dim)
    rows = query[: batch.batch] if batch.rows is None else query.index_select(0, batch.rows)
    scores = torch.bmm(rows.reshape(batch.batch * shape.kv_heads, group, shape.head_dim), kv[0].transpose(1, 2))
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32)).mul_(scale)
    if batch.mask is not None:
        scores.view(batch.batch, shape.kv_heads, group, batch.tokens).add_(batch.mask)
    weights = torch.softmax(scores, dim=-1).to(query.dtype)
    result = torch.bmm(weights, _values(kv)).view(batch.batch, heads, -1)
    if batch.rows is None:
        out[: batch.batch] = result
    else:
        out.index_copy_(0, batch.rows, result)


def _attend_chunk(
    query: torch.Tensor, runs: torch.Tensor, chunk: Chunk, shape: PageShape, scale: float, out: torch.Tensor
) -> None:
    kv = runs.index_select(0, chunk.runs).view(shape.parts, 1, shape.kv_heads, -1, shape.head_dim)
    kv = kv[:, :, :, : chunk.span]
    rows = slice(chunk.first_row, chunk.first_row + chunk.rows)
    result = F.scaled_dot_product_attention(
        query[rows].transpose(0, 1).unsqueeze(0),
        kv[0],
        _values(kv),
        attn_mask=chunk.mask,
        is_causal=chunk.mask is None,
        scale=scale,
        enable_gqa=True,
    )
    out[rows] = result[0].transpose(0, 1)


def _values(parts: torch.Tensor) -> torch.Tensor:
    """All parts but the first, which are the keys, side by side."""
    return parts[1] if len(parts) == KEY_VALUE else torch.cat(tuple(parts[1:]), dim=-1)
