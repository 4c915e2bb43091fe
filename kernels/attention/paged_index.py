"""Triton kernel of ``kernels.attention.latent.select_tokens``: the scores of a sparse indexer, straight over pages.

A program loads a tile of index keys once and scores it for some rows of its sequence. Heads are the rows of the matrix
product; what they agree on is summed before it leaves the program, so no scores of single heads exist in memory
(DeepSeek-V3.2, 2025). The best tokens are then chosen without asking the device how many there are.
"""

from typing import Final

import torch
import triton
import triton.language as tl

from kernels.attention.latent import Selection, are_best
from kernels.attention.paged import check_dtypes
from kernels.attention.paged_plan import Batch, PagedPlan
from kernels.launch import INTERPRETED, LEAST_PRODUCT, Kernel, next_power_of_two
from kernels.tuning import INDEX_TILES, Gpu, IndexTable, index_tile

MAX_SCORES: Final = 1 << 24
"""Scores that exist at once: 64 MiB, and as much again for each of a few steps of choosing."""


class PagedIndexer:
    """See the module. Stateless; one instance serves every layer of one device."""

    def __init__(self, gpu: Gpu, tiles: IndexTable = INDEX_TILES, max_scores: int = MAX_SCORES) -> None:
        self._gpu = gpu
        self._tiles = tiles
        self._max_scores = max_scores

    def select_tokens(
        self, query: torch.Tensor, weights: torch.Tensor, index_keys: torch.Tensor, plan: PagedPlan, topk: int
    ) -> Selection | None:
        """The contract of ``kernels.attention.latent.select_tokens``; scores are float32, of equal ones the first win.

        ``query`` is ``[rows, index_heads, index_dim]``, of the type of ``index_keys``
        ``[num_blocks, 1, 1, block_size, index_dim]``: float32, bfloat16 or float16. ``weights`` is
        ``[rows, index_heads]`` with all scales in them. None if no row sees more than ``topk`` tokens.
        """
        if plan.longest_context <= topk:
            return None
        check_dtypes(query, index_keys)
        if query.stride(-1) != 1:
            query = query.contiguous()
        weights = weights.to(torch.float32).contiguous()
        # The last row is nobody's.
        chosen = query.new_full((len(query) + 1, topk), -1, dtype=torch.int64)
        for batch in (plan.decodes, plan.chunks):
            if batch is None:
                continue
            sequences = batch.sequences.long()
            # Of every sequence some rows at a time.
            window = max(1, min(batch.most_rows, self._max_scores // (len(sequences) * batch.longest_context)))
            for skipped in range(0, batch.most_rows, window):
                scores = self._scores(query, weights, index_keys, plan, batch, skipped, window)
                index = skipped + torch.arange(window, device=query.device)
                rows = (sequences[:, :1] + index).where(index < sequences[:, 1:2], len(query))
                chosen[rows.view(-1)] = best_tokens(scores.view(-1, batch.longest_context), topk)
        return Selection(chosen[:-1])

    def _scores(
        self,
        query: torch.Tensor,
        weights: torch.Tensor,
        index_keys: torch.Tensor,
        plan: PagedPlan,
        batch: Batch,
        skipped: int,
        window: int,
    ) -> torch.Tensor:
        """Float32 ``[sequences, window, longest_context]``, minus infinity where a row does not see a token."""
        _, heads, head_dim = query.shape
        tile = index_tile(self._tiles, self._gpu.architecture, query.element_size())
        scores = query.new_full((len(batch.sequences), window, batch.longest_context), -torch.inf, dtype=torch.float32)
        row_tile = min(tile.rows, window)
        score_tokens.launch(
            (len(batch.sequences), triton.cdiv(batch.longest_context, tile.tokens), triton.cdiv(window, row_tile)),
            query,
            query.stride(0),
            query.stride(1),
            weights,
            index_keys,
            index_keys.stride(0),
            batch.sequences,
            batch.sequences.stride(0),
            batch.tables,
            batch.tables.stride(0),
            scores,
            batch.longest_context,
            skipped,
            window,
            row_tile,
            heads=heads,
            head_dim=head_dim,
            block_size=plan.shape.block_size,
            padded_heads=max(LEAST_PRODUCT, next_power_of_two(heads)),
            padded_dim=max(LEAST_PRODUCT, next_power_of_two(head_dim)),
            widen=INTERPRETED,
            token_tile=tile.tokens,
            warps=tile.warps,
            stages=tile.stages,
        )
        return scores


def best_tokens(scores: torch.Tensor, topk: int) -> torch.Tensor:
    """Positions of the highest scores in ascending order, ``[rows, topk]``, -1 where only hidden tokens are left."""
    scores = scores.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    chosen = are_best(scores, min(topk, scores.shape[1]))
    # What is not chosen goes to a last place, which is nobody's.
    places = (chosen.cumsum(dim=1) - 1).where(chosen, topk)
    positions = torch.arange(scores.shape[1], device=scores.device).where(scores > -torch.inf, -1)
    return positions.new_full((len(scores), topk + 1), -1).scatter_(1, places, positions)[:, :topk]


@Kernel
def score_tokens(
    query: tl.tensor,
    query_row_stride: tl.tensor,
    query_head_stride: tl.tensor,
    weights: tl.tensor,
    cache: tl.tensor,
    block_stride: tl.tensor,
    sequences: tl.tensor,
    sequence_stride: int,
    tables: tl.tensor,
    table_stride: int,
    scores: tl.tensor,
    longest_context: int,
    skipped: int,
    window: int,
    row_tile: int,
    heads: tl.constexpr,
    head_dim: tl.constexpr,
    block_size: tl.constexpr,
    padded_heads: tl.constexpr,
    padded_dim: tl.constexpr,
    widen: tl.constexpr,
    token_tile: tl.constexpr,
) -> None:
    """One program per sequence, ``token_tile`` tokens and ``row_tile`` rows of a window of its rows."""
    sequence = tl.program_id(0)
    first_row = tl.load(sequences + sequence * sequence_stride)
    rows = tl.load(sequences + sequence * sequence_stride + 1)
    context = tl.load(sequences + sequence * sequence_stride + 2)
    begin = tl.program_id(2) * row_tile
    end = tl.minimum(tl.minimum(begin + row_tile, window), rows - skipped)
    token = tl.program_id(1) * token_tile + tl.arange(0, token_tile)
    # Tokens that the last row of these sees.
    seen = context - rows + skipped + end
    if (begin >= end) | (tl.program_id(1) * token_tile >= seen):
        return

    head, dim = tl.arange(0, padded_heads), tl.arange(0, padded_dim)
    table = tables + sequence.to(tl.int64) * table_stride
    block = tl.load(table + token // block_size, mask=token < seen, other=0).to(tl.int64)
    in_cache = block * block_stride + (token % block_size) * head_dim
    keys = tl.load(
        cache + in_cache[None, :] + dim[:, None], mask=(token < seen)[None, :] & (dim < head_dim)[:, None], other=0.0
    )
    if widen:
        keys = keys.to(tl.float32)
    is_head = head < heads
    for index in range(begin, end):
        row = (first_row + skipped + index).to(tl.int64)
        in_query = row * query_row_stride + head * query_head_stride
        of_heads = tl.load(
            query + in_query[:, None] + dim[None, :], mask=is_head[:, None] & (dim < head_dim)[None, :], other=0.0
        )
        if widen:
            of_heads = of_heads.to(tl.float32)
        matches = tl.maximum(tl.dot(of_heads, keys, input_precision="ieee"), 0.0)
        shares = tl.load(weights + row * heads + head, mask=is_head, other=0.0)
        place = (sequence.to(tl.int64) * window + index) * longest_context + token
        sees = token < context - rows + skipped + index + 1
        tl.store(scores + place, tl.sum(matches * shares[:, None], 0), mask=sees)
