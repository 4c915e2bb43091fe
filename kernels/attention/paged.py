"""Triton kernels of ``kernels.attention.gather``: attention straight over pages, nothing is gathered first.

One kernel answers rows of one or many tokens. The query heads of a KV head's group, of one row or of several, are the
rows of its matrix products, so keys and values are read once per group. It walks over tiles of tokens with an online
softmax (FlashAttention-2, Dao 2023) and finds every token through the block table (PagedAttention, Kwon et al. 2023).
Tiles behind a window are not visited, but for the sinks. Where each sequence has one row, contexts are split among
programs, and a second kernel joins the splits (Flash-Decoding, Dao et al. 2023).

Caches, queries and results are float32, bfloat16 or float16, all the same; scores, softmax and sums are float32.
"""

from collections.abc import Sequence
from typing import Final

import torch
import triton.language as tl

from kernels.attention.gather import plan_slots
from kernels.attention.paged_plan import Batch, PagedPlan
from kernels.attention.segments import AttentionPlan, Segment
from kernels.launch import INTERPRETED, LEAST_PRODUCT, SUPPORTED_DTYPES, Kernel, inlined, next_power_of_two
from kernels.page_copies import write_slots
from kernels.pages import PageShape
from kernels.tuning import CHUNK_TILES, DECODE_TILES, AttentionTable, Gpu, attention_tile, split_sizes

LOG2_E: Final = 1.4426950408889634
"""Softmax in powers of two, which the hardware has."""


class PagedAttention:
    """See the module. Stateless; one instance serves every layer of one device."""

    def __init__(
        self, gpu: Gpu, decode_tiles: AttentionTable = DECODE_TILES, chunk_tiles: AttentionTable = CHUNK_TILES
    ) -> None:
        self._gpu = gpu
        self._decode_tiles = decode_tiles
        self._chunk_tiles = chunk_tiles

    def plan(
        self, segments: Sequence[Segment], shape: PageShape, window: int | None, device: torch.device, *, sinks: int = 0
    ) -> PagedPlan:
        """Separate one-row segments from the others, and pack their tables."""
        return PagedPlan(
            shape=shape,
            window=window,
            sinks=0 if window is None else sinks,
            slots=plan_slots(segments, shape.block_size, device),
            decodes=Batch.of([s for s in segments if s.rows == 1], shape.block_size, device),
            chunks=Batch.of([s for s in segments if s.rows > 1], shape.block_size, device),
        )

    def write(self, cache: torch.Tensor, key_value: torch.Tensor, plan: AttentionPlan) -> None:
        """Store every row's key and value."""
        assert isinstance(plan, PagedPlan)
        write_slots(cache, plan.slots, key_value)

    def attend(self, query: torch.Tensor, cache: torch.Tensor, plan: AttentionPlan, scale: float) -> torch.Tensor:
        """Causal grouped-query attention; softmax in float32."""
        assert isinstance(plan, PagedPlan)
        check_dtypes(query, cache)
        if query.stride(-1) != 1:
            query = query.contiguous()
        out = query.new_empty(*query.shape[:2], (plan.shape.parts - 1) * plan.shape.head_dim)
        if plan.decodes is not None:
            self._attend_decodes(query, cache, plan, plan.decodes, scale, out)
        if plan.chunks is not None:
            self._attend_chunks(query, cache, plan, plan.chunks, scale, out)
        return out

    def _attend_decodes(
        self, query: torch.Tensor, cache: torch.Tensor, plan: PagedPlan, batch: Batch, scale: float, out: torch.Tensor
    ) -> None:
        shape, heads = plan.shape, query.shape[1]
        group = heads // shape.kv_heads
        tile = attention_tile(self._decode_tiles, self._gpu.architecture, query.element_size(), _width(shape))
        count = len(batch.sequences)
        most_tiles = plan.most_tiles(batch, tile.tokens)
        splits, tiles_per_split = split_sizes(self._gpu, count * shape.kv_heads, most_tiles)
        partial = query.new_empty(count, heads, splits, out.shape[2], dtype=torch.float32)
        statistics = query.new_empty(2, count, heads, splits, dtype=torch.float32)
        attend_rows.launch(
            (count, shape.kv_heads, splits),
            *_arguments(query, cache, batch, out),
            partial,
            statistics,
            statistics.stride(0),
            tiles_per_split,
            scale * LOG2_E,
            **_constants(plan, group),
            row_tile=max(tile.rows, next_power_of_two(group)),
            token_tile=tile.tokens,
            is_split=True,
            warps=tile.warps,
            stages=tile.stages,
        )
        join_splits.launch(
            (count, heads),
            batch.sequences,
            batch.sequences.stride(0),
            partial,
            statistics,
            statistics.stride(0),
            out,
            splits,
            tiles_per_split,
            window=plan.window or 0,
            sinks=plan.sinks,
            token_tile=tile.tokens,
            value_dim=out.shape[2],
            padded_value=next_power_of_two(out.shape[2]),
            selected=0,
        )

    def _attend_chunks(
        self, query: torch.Tensor, cache: torch.Tensor, plan: PagedPlan, batch: Batch, scale: float, out: torch.Tensor
    ) -> None:
        shape = plan.shape
        group = query.shape[1] // shape.kv_heads
        tile = attention_tile(self._chunk_tiles, self._gpu.architecture, query.element_size(), _width(shape))
        row_tile = max(tile.rows, next_power_of_two(group))
        attend_rows.launch(
            (len(batch.sequences), shape.kv_heads, -(-batch.most_rows // (row_tile // group))),
            *_arguments(query, cache, batch, out),
            out,
            out,
            0,
            0,
            scale * LOG2_E,
            **_constants(plan, group),
            row_tile=row_tile,
            token_tile=tile.tokens,
            is_split=False,
            warps=tile.warps,
            stages=tile.stages,
        )


def check_dtypes(query: torch.Tensor, cache: torch.Tensor) -> None:
    """Raises ``ValueError`` unless both have one type that the kernels calculate with."""
    if query.dtype != cache.dtype or query.dtype not in SUPPORTED_DTYPES:
        raise ValueError(
            f"queries are {query.dtype} and the cache is {cache.dtype}: Triton attention takes "
            f"{', '.join(map(str, SUPPORTED_DTYPES))}, both the same"
        )


def _width(shape: PageShape) -> int:
    return max(1, shape.parts - 1) * shape.head_dim


def _arguments(
    query: torch.Tensor, cache: torch.Tensor, batch: Batch, out: torch.Tensor
) -> tuple[torch.Tensor | int, ...]:
    return (
        query,
        query.stride(0),
        query.stride(1),
        cache,
        cache.stride(0),
        batch.sequences,
        batch.sequences.stride(0),
        batch.tables,
        batch.tables.stride(0),
        out,
    )


def _constants(plan: PagedPlan, group: int) -> dict[str, object]:
    shape = plan.shape
    value_dim = (shape.parts - 1) * shape.head_dim
    return {
        "group": group,
        "kv_heads": shape.kv_heads,
        "block_size": shape.block_size,
        "head_dim": shape.head_dim,
        "value_dim": value_dim,
        "padded_dim": max(LEAST_PRODUCT, next_power_of_two(shape.head_dim)),
        "padded_value": max(LEAST_PRODUCT, next_power_of_two(value_dim)),
        "window": plan.window or 0,
        "sinks": plan.sinks,
        "widen": INTERPRETED,
    }


@inlined
def tiles_of_sinks(
    first_position: tl.tensor, window: tl.constexpr, sinks: tl.constexpr, tile: tl.constexpr
) -> tl.tensor:
    """How many tiles are visited before the window's first."""
    if window == 0:
        return 0
    return tl.minimum((sinks + tile - 1) // tile, first_tile(first_position, window, tile))


@inlined
def first_tile(first_position: tl.tensor, window: tl.constexpr, tile: tl.constexpr) -> tl.tensor:
    """The first tile that the window of a row at this position reaches."""
    if window == 0:
        return 0
    return tl.maximum(first_position - window + 1, 0) // tile


@Kernel
def attend_rows(  # noqa: PLR0915 - one program has no parts
    query: tl.tensor,
    query_row_stride: tl.tensor,
    query_head_stride: tl.tensor,
    cache: tl.tensor,
    block_stride: tl.tensor,
    sequences: tl.tensor,
    sequence_stride: int,
    tables: tl.tensor,
    table_stride: int,
    out: tl.tensor,
    partial: tl.tensor,
    statistics: tl.tensor,
    statistics_stride: int,
    tiles_per_split: int,
    scale: tl.tensor,
    group: tl.constexpr,
    kv_heads: tl.constexpr,
    block_size: tl.constexpr,
    head_dim: tl.constexpr,
    value_dim: tl.constexpr,
    padded_dim: tl.constexpr,
    padded_value: tl.constexpr,
    window: tl.constexpr,
    sinks: tl.constexpr,
    widen: tl.constexpr,
    row_tile: tl.constexpr,
    token_tile: tl.constexpr,
    is_split: tl.constexpr,
) -> None:
    """One program per sequence, KV head, and either split of the context or tile of rows.

    A split leaves its largest score, the sum of its weights and the weighted sum of its values.
    """
    sequence = tl.program_id(0)
    kv_head = tl.program_id(1)
    first_row = tl.load(sequences + sequence * sequence_stride)
    rows = tl.load(sequences + sequence * sequence_stride + 1)
    context = tl.load(sequences + sequence * sequence_stride + 2)
    rows_each: tl.constexpr = row_tile // group
    skipped = 0
    if not is_split:
        skipped = tl.program_id(2) * rows_each
    if skipped >= rows:
        return

    lane = tl.arange(0, row_tile)
    row = skipped + lane // group
    head = kv_head * group + lane % group
    is_row = (lane < rows_each * group) & (row < rows)
    position = context - rows + row
    first_position = context - rows + skipped
    end = tl.minimum(context, first_position + rows_each)

    sink_tiles = tiles_of_sinks(first_position, window, sinks, token_tile)
    window_tile = first_tile(first_position, window, token_tile)
    step = 0
    steps = sink_tiles + (end + token_tile - 1) // token_tile - window_tile
    if is_split:
        step = tl.program_id(2) * tiles_per_split
        steps = tl.minimum(steps, step + tiles_per_split)
        if step >= steps:
            return

    dim = tl.arange(0, padded_dim)
    value = tl.arange(0, padded_value)
    in_query = (first_row + row).to(tl.int64) * query_row_stride + head * query_head_stride
    rows_query = tl.load(
        query + in_query[:, None] + dim[None, :], mask=is_row[:, None] & (dim < head_dim)[None, :], other=0.0
    )
    if widen:
        rows_query = rows_query.to(tl.float32)
    # Where a value's numbers are, from its key's part on.
    in_values = (1 + value // head_dim) * (kv_heads * block_size * head_dim) + value % head_dim

    largest = tl.full([row_tile], float("-inf"), tl.float32)
    total = tl.zeros([row_tile], tl.float32)
    attended = tl.zeros([row_tile, padded_value], tl.float32)
    table = tables + sequence.to(tl.int64) * table_stride
    for index in range(step, steps):
        tile = index
        if window > 0:
            tile = tl.where(index < sink_tiles, index, window_tile + index - sink_tiles)
        token = tile * token_tile + tl.arange(0, token_tile)
        block = tl.load(table + token // block_size, mask=token < end, other=-1).to(tl.int64)
        is_stored = block >= 0
        in_cache = block * block_stride + (kv_head * block_size + token % block_size) * head_dim
        keys = tl.load(
            cache + in_cache[None, :] + dim[:, None], mask=is_stored[None, :] & (dim < head_dim)[:, None], other=0.0
        )
        if widen:
            keys = keys.to(tl.float32)
        scores = tl.dot(rows_query, keys, input_precision="ieee") * scale
        sees = is_stored[None, :] & (token[None, :] <= position[:, None])
        if window > 0:
            sees = sees & ((token[None, :] > position[:, None] - window) | (token < sinks)[None, :])
        scores = tl.where(sees, scores, float("-inf"))

        larger = tl.maximum(largest, tl.max(scores, 1))
        # A row that has seen nothing yet has no largest score to subtract.
        reference = tl.where(larger == float("-inf"), 0.0, larger)
        weights = tl.exp2(scores - reference[:, None])
        shrink = tl.exp2(largest - reference)
        largest = larger
        total = total * shrink + tl.sum(weights, 1)
        values = tl.load(
            cache + in_cache[:, None] + in_values[None, :],
            mask=is_stored[:, None] & (value < value_dim)[None, :],
            other=0.0,
        )
        if widen:
            values = values.to(tl.float32)
        attended = tl.dot(weights.to(values.dtype), values, attended * shrink[:, None], input_precision="ieee")

    if is_split:
        place = (sequence * kv_heads * group + head).to(tl.int64) * tl.num_programs(2) + tl.program_id(2)
        tl.store(statistics + place, largest, mask=is_row)
        tl.store(statistics + statistics_stride + place, total, mask=is_row)
        tl.store(
            partial + place[:, None] * value_dim + value[None, :],
            attended,
            mask=is_row[:, None] & (value < value_dim)[None, :],
        )
    else:
        place = ((first_row + row).to(tl.int64) * (kv_heads * group) + head) * value_dim
        attended = attended / tl.where(is_row, total, 1.0)[:, None]
        tl.store(
            out + place[:, None] + value[None, :],
            attended.to(out.dtype.element_ty),
            mask=is_row[:, None] & (value < value_dim)[None, :],
        )


@Kernel
def join_splits(
    sequences: tl.tensor,
    sequence_stride: int,
    partial: tl.tensor,
    statistics: tl.tensor,
    statistics_stride: int,
    out: tl.tensor,
    splits: int,
    tiles_per_split: int,
    window: tl.constexpr,
    sinks: tl.constexpr,
    token_tile: tl.constexpr,
    value_dim: tl.constexpr,
    padded_value: tl.constexpr,
    selected: tl.constexpr,
) -> None:
    """One program per one-row sequence and head: a softmax over what its splits left, then the sum.

    If not 0, ``selected`` is how many tokens splits were made of, instead of those that are visible.
    """
    sequence, head = tl.program_id(0), tl.program_id(1)
    heads = tl.num_programs(1)
    row = tl.load(sequences + sequence * sequence_stride)
    context = tl.load(sequences + sequence * sequence_stride + 2)
    if selected > 0:
        tiles = (selected + token_tile - 1) // token_tile
    else:
        tiles = (context + token_tile - 1) // token_tile - first_tile(context - 1, window, token_tile)
        tiles += tiles_of_sinks(context - 1, window, sinks, token_tile)
    used = (tiles + tiles_per_split - 1) // tiles_per_split

    value = tl.arange(0, padded_value)
    first = (sequence * heads + head).to(tl.int64) * splits
    largest = float("-inf")
    total = 0.0
    attended = tl.zeros([padded_value], tl.float32)
    for split in range(0, used):
        scored = tl.load(statistics + first + split)
        larger = tl.maximum(largest, scored)
        reference = tl.where(larger == float("-inf"), 0.0, larger)
        shrink, share = tl.exp2(largest - reference), tl.exp2(scored - reference)
        total = total * shrink + tl.load(statistics + statistics_stride + first + split) * share
        part = tl.load(partial + (first + split) * value_dim + value, mask=value < value_dim, other=0.0)
        attended = attended * shrink + part * share
        largest = larger
    place = (row.to(tl.int64) * heads + head) * value_dim
    tl.store(out + place + value, (attended / total).to(out.dtype.element_ty), mask=value < value_dim)
