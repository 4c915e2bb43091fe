"""Triton kernels of ``kernels.attention.latent``: multi-head latent attention in the absorbed form, over pages.

All heads attend to the same latents, so heads are the rows of the matrix products (DeepSeek-V2, 2024, section 2.1). A
tile of latents is loaded once and serves as keys and as values. Otherwise it is what ``kernels.attention.paged`` does:
an online softmax, and contexts of sequences with one row split among programs. Instead of all visible tokens it visits
those of a ``Selection``, if there is one (DeepSeek-V3.2, 2025).
"""

from collections.abc import Sequence

import torch
import triton.language as tl

from kernels.attention.latent import Expansion, LatentPlan, Selection
from kernels.attention.paged import LOG2_E, PagedAttention, check_dtypes, join_splits
from kernels.attention.paged_index import PagedIndexer
from kernels.attention.paged_plan import Batch, PagedPlan
from kernels.attention.segments import AttentionPlan, Segment
from kernels.launch import INTERPRETED, LEAST_PRODUCT, Kernel, next_power_of_two
from kernels.page_copies import write_slots
from kernels.pages import PageShape
from kernels.tuning import LATENT_TILES, AttentionTable, Gpu, attention_tile, split_sizes


class PagedLatentAttention:
    """See the module. Stateless; one instance serves every layer of one device.

    ``cache`` is ``[num_blocks, 1, 1, block_size, latent_dim + rotary_dim]``, of float32, bfloat16 or float16.
    """

    def __init__(self, gpu: Gpu, tiles: AttentionTable = LATENT_TILES) -> None:
        self._gpu = gpu
        self._tiles = tiles
        self._pages = PagedAttention(gpu)
        self._indexer = PagedIndexer(gpu)

    def plan(self, segments: Sequence[Segment], shape: PageShape, device: torch.device) -> PagedPlan:
        """Index tensors for one step, of latents or of index keys."""
        return self._pages.plan(segments, shape, None, device)

    def plan_latents(
        self, segments: Sequence[Segment], latents: PageShape, index_keys: PageShape | None, device: torch.device
    ) -> LatentPlan:
        """Both plans of a layer with an indexer, or one."""
        return LatentPlan(
            self.plan(segments, latents, device),
            None if index_keys is None else self.plan(segments, index_keys, device),
        )

    def write_vectors(self, cache: torch.Tensor, vectors: torch.Tensor, plan: AttentionPlan) -> None:
        """Store every row's latent or index key, ``[rows, head_dim]``."""
        assert isinstance(plan, PagedPlan)
        write_slots(cache, plan.slots, vectors[:, None, None])

    def longest_context(self, plan: AttentionPlan) -> int:
        """Tokens that the row which sees most may see."""
        assert isinstance(plan, PagedPlan)
        return plan.longest_context

    def select_tokens(
        self, query: torch.Tensor, weights: torch.Tensor, index_keys: torch.Tensor, plan: AttentionPlan, topk: int
    ) -> Selection | None:
        """See ``PagedIndexer``."""
        assert isinstance(plan, PagedPlan)
        return self._indexer.select_tokens(query, weights, index_keys, plan, topk)

    def attend_heads(
        self,
        query: torch.Tensor,
        expansion: Expansion,
        cache: torch.Tensor,
        plan: AttentionPlan,
        *,
        scale: float,
        selection: Selection | None = None,
    ) -> torch.Tensor:
        """From heads' own queries to heads' own values: the contract of ``kernels.attention.latent.attend_heads``.

        ``query`` is ``[rows, heads, key_dim + rotary_dim]``; returns ``[rows, heads, value_dim]``. The absorbed form
        for all rows, decode and prompt alike.
        """
        assert isinstance(plan, PagedPlan)
        latent_dim = expansion.keys.shape[2]
        attended = self.attend(
            expansion.absorb(query), cache, plan, latent_dim=latent_dim, scale=scale, selection=selection
        )
        return expansion.expand_values(attended).contiguous()

    def attend(
        self,
        query: torch.Tensor,
        cache: torch.Tensor,
        plan: PagedPlan,
        *,
        latent_dim: int,
        scale: float,
        selection: Selection | None = None,
    ) -> torch.Tensor:
        """Causal attention, to the selected tokens only if there is a selection; softmax in float32.

        ``query`` is ``[rows, heads, latent_dim + rotary_dim]`` in the absorbed form, of the cache's type; returns
        ``[rows, heads, latent_dim]``.
        """
        check_dtypes(query, cache)
        if query.stride(-1) != 1:
            query = query.contiguous()
        out = query.new_empty(*query.shape[:2], latent_dim)
        tokens = None if selection is None else selection.tokens.contiguous()
        if plan.decodes is not None:
            self._attend_decodes(query, cache, plan, plan.decodes, scale, tokens, out)
        if plan.chunks is not None:
            self._launch(query, cache, plan, plan.chunks, scale, tokens, out, plan.chunks.most_rows)
        return out

    def _attend_decodes(
        self,
        query: torch.Tensor,
        cache: torch.Tensor,
        plan: PagedPlan,
        batch: Batch,
        scale: float,
        selection: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:
        _, heads, latent_dim = out.shape
        tile = attention_tile(self._tiles, self._gpu.architecture, query.element_size(), latent_dim)
        count = len(batch.sequences)
        selected = 0 if selection is None else selection.shape[1]
        most_tiles = -(-(selected or batch.longest_context) // tile.tokens)
        splits, tiles_per_split = split_sizes(self._gpu, count * -(-heads // tile.rows), most_tiles)
        partial = query.new_empty(count, heads, splits, latent_dim, dtype=torch.float32)
        statistics = query.new_empty(2, count, heads, splits, dtype=torch.float32)
        self._launch(query, cache, plan, batch, scale, selection, out, splits, (partial, statistics, tiles_per_split))
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
            window=0,
            sinks=0,
            token_tile=tile.tokens,
            value_dim=latent_dim,
            padded_value=next_power_of_two(latent_dim),
            selected=selected,
        )

    def _launch(
        self,
        query: torch.Tensor,
        cache: torch.Tensor,
        plan: PagedPlan,
        batch: Batch,
        scale: float,
        selection: torch.Tensor | None,
        out: torch.Tensor,
        depth: int,
        splits: tuple[torch.Tensor, torch.Tensor, int] | None = None,
    ) -> None:
        _, heads, latent_dim = out.shape
        rotary_dim = plan.shape.head_dim - latent_dim
        tile = attention_tile(self._tiles, self._gpu.architecture, query.element_size(), latent_dim)
        partial, statistics, tiles_per_split = splits or (out, out, 0)
        attend_latent_rows.launch(
            (len(batch.sequences), -(-heads // tile.rows), depth),
            query,
            query.stride(0),
            query.stride(1),
            cache,
            cache.stride(0),
            batch.sequences,
            batch.sequences.stride(0),
            batch.tables,
            batch.tables.stride(0),
            out if selection is None else selection,
            out,
            partial,
            statistics,
            statistics.stride(0),
            tiles_per_split,
            scale * LOG2_E,
            heads=heads,
            block_size=plan.shape.block_size,
            latent_dim=latent_dim,
            rotary_dim=rotary_dim,
            padded_latent=max(LEAST_PRODUCT, next_power_of_two(latent_dim)),
            padded_rotary=max(LEAST_PRODUCT, next_power_of_two(max(1, rotary_dim))),
            selected=0 if selection is None else selection.shape[1],
            widen=INTERPRETED,
            head_tile=tile.rows,
            token_tile=tile.tokens,
            is_split=splits is not None,
            warps=tile.warps,
            stages=tile.stages,
        )


@Kernel
def attend_latent_rows(  # noqa: PLR0915 - one program has no parts
    query: tl.tensor,
    query_row_stride: tl.tensor,
    query_head_stride: tl.tensor,
    cache: tl.tensor,
    block_stride: tl.tensor,
    sequences: tl.tensor,
    sequence_stride: int,
    tables: tl.tensor,
    table_stride: int,
    selection: tl.tensor,
    out: tl.tensor,
    partial: tl.tensor,
    statistics: tl.tensor,
    statistics_stride: int,
    tiles_per_split: int,
    scale: tl.tensor,
    heads: tl.constexpr,
    block_size: tl.constexpr,
    latent_dim: tl.constexpr,
    rotary_dim: tl.constexpr,
    padded_latent: tl.constexpr,
    padded_rotary: tl.constexpr,
    selected: tl.constexpr,
    widen: tl.constexpr,
    head_tile: tl.constexpr,
    token_tile: tl.constexpr,
    is_split: tl.constexpr,
) -> None:
    """One program per sequence, ``head_tile`` heads, and either split of the context or row.

    A split leaves what one of ``attend_rows`` leaves.
    """
    sequence = tl.program_id(0)
    first_row = tl.load(sequences + sequence * sequence_stride)
    rows = tl.load(sequences + sequence * sequence_stride + 1)
    context = tl.load(sequences + sequence * sequence_stride + 2)
    skipped = 0
    if not is_split:
        skipped = tl.program_id(2)
    if skipped >= rows:
        return
    row = (first_row + skipped).to(tl.int64)
    end = context - rows + skipped + 1
    steps = ((selected if selected > 0 else end) + token_tile - 1) // token_tile
    step = 0
    if is_split:
        step = tl.program_id(2) * tiles_per_split
        steps = tl.minimum(steps, step + tiles_per_split)
        if step >= steps:
            return

    head = tl.program_id(1) * head_tile + tl.arange(0, head_tile)
    is_head = head < heads
    latent = tl.arange(0, padded_latent)
    rotary = tl.arange(0, padded_rotary)
    in_query = row * query_row_stride + head * query_head_stride
    query_latent = tl.load(
        query + in_query[:, None] + latent[None, :], mask=is_head[:, None] & (latent < latent_dim)[None, :], other=0.0
    )
    query_rotary = tl.load(
        query + in_query[:, None] + latent_dim + rotary[None, :],
        mask=is_head[:, None] & (rotary < rotary_dim)[None, :],
        other=0.0,
    )
    if widen:
        query_latent = query_latent.to(tl.float32)
        query_rotary = query_rotary.to(tl.float32)

    largest = tl.full([head_tile], float("-inf"), tl.float32)
    total = tl.zeros([head_tile], tl.float32)
    attended = tl.zeros([head_tile, padded_latent], tl.float32)
    table = tables + sequence.to(tl.int64) * table_stride
    for tile in range(step, steps):
        index = tile * token_tile + tl.arange(0, token_tile)
        if selected > 0:
            token = tl.load(selection + row * selected + index, mask=index < selected, other=-1).to(tl.int32)
        else:
            token = index
        block = tl.load(table + token // block_size, mask=(token >= 0) & (token < end), other=-1).to(tl.int64)
        sees = block >= 0
        in_cache = block * block_stride + (token % block_size) * (latent_dim + rotary_dim)
        latents = tl.load(
            cache + in_cache[:, None] + latent[None, :], mask=sees[:, None] & (latent < latent_dim)[None, :], other=0.0
        )
        rotaries = tl.load(
            cache + in_cache[None, :] + latent_dim + rotary[:, None],
            mask=sees[None, :] & (rotary < rotary_dim)[:, None],
            other=0.0,
        )
        if widen:
            latents = latents.to(tl.float32)
            rotaries = rotaries.to(tl.float32)
        scores = tl.dot(query_latent, tl.trans(latents), input_precision="ieee")
        scores = tl.dot(query_rotary, rotaries, scores, input_precision="ieee") * scale
        scores = tl.where(sees[None, :], scores, float("-inf"))

        larger = tl.maximum(largest, tl.max(scores, 1))
        # A row that has seen nothing yet has no largest score to subtract.
        reference = tl.where(larger == float("-inf"), 0.0, larger)
        weights = tl.exp2(scores - reference[:, None])
        shrink = tl.exp2(largest - reference)
        largest = larger
        total = total * shrink + tl.sum(weights, 1)
        attended = tl.dot(weights.to(latents.dtype), latents, attended * shrink[:, None], input_precision="ieee")

    inside = is_head[:, None] & (latent < latent_dim)[None, :]
    if is_split:
        place = (sequence * heads + head).to(tl.int64) * tl.num_programs(2) + tl.program_id(2)
        tl.store(statistics + place, largest, mask=is_head)
        tl.store(statistics + statistics_stride + place, total, mask=is_head)
        tl.store(partial + place[:, None] * latent_dim + latent[None, :], attended, mask=inside)
    else:
        attended = attended / tl.where(is_head, total, 1.0)[:, None]
        place = (row * heads + head) * latent_dim
        tl.store(out + place[:, None] + latent[None, :], attended.to(out.dtype.element_ty), mask=inside)
