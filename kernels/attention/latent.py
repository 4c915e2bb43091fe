"""Multi-head latent attention over pages in plain PyTorch: the reference for every kernel, and the CPU path.

A token's page slot holds one latent for all heads: ``latent_dim`` numbers that are key and value at once, then the
rotary part of the key (DeepSeek-V2, 2024, section 2.1). In the *absorbed* form queries are multiplied with the matrix
that would expand a latent into a head's key; heads are then merely rows of one product with the latents. That suits few
rows over many tokens. For many rows it takes fewer operations to expand the latents, whose heads are narrower.

A sparse indexer (DeepSeek-V3.2, 2025) lets every row attend to ``topk`` tokens only. It scores them with small keys of
its own, which lie in pages too. What it chose is a ``Selection``: positions, which know neither pages nor batches, so
that later layers of the same step can use it, or some of its rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from kernels.attention.gather import MAX_GATHERED_ELEMENTS, Chunk, DecodeBatch, GatherAttention, GatherPlan
from kernels.attention.segments import AttentionPlan, Segment
from kernels.pages import PageShape, write_slots


@dataclass(frozen=True, slots=True)
class LatentPlan:
    """One step over pages of latents, and over pages of index keys if the layer has an indexer."""

    latents: AttentionPlan
    index_keys: AttentionPlan | None


@dataclass(frozen=True, slots=True)
class Selection:
    """Positions of the tokens that each row attends to, int64 ``[rows, k]``; -1 where a row sees fewer than ``k``."""

    tokens: torch.Tensor

    def select(self, rows: torch.Tensor) -> "Selection":
        """The selection of some of the rows, given by index."""
        return Selection(self.tokens.index_select(0, rows))


@dataclass(frozen=True, slots=True)
class Expansion:
    """Makes every head's key and value of a latent: ``[heads, key_dim or value_dim, latent_dim]``, any strides."""

    keys: torch.Tensor
    values: torch.Tensor

    @property
    def key_dim(self) -> int:
        """Of a key without its rotary part."""
        return self.keys.shape[1]

    @property
    def value_dim(self) -> int:
        """Of a value."""
        return self.values.shape[1]

    def absorb(self, query: torch.Tensor) -> torch.Tensor:
        """``[rows, heads, key_dim + rotary_dim]`` to ``[rows, heads, latent_dim + rotary_dim]``.

        Because ``query · (keys latent) = (keys^T query) · latent``. The rotary part stays as it is.
        """
        absorbed = torch.bmm(query[..., : self.key_dim].transpose(0, 1), self.keys).transpose(0, 1)
        return torch.cat([absorbed, query[..., self.key_dim :]], dim=-1)

    def expand_values(self, attended: torch.Tensor) -> torch.Tensor:
        """``[rows, heads, latent_dim or more]`` to ``[rows, heads, value_dim]``."""
        latents = attended[..., : self.values.shape[2]].transpose(0, 1)
        return torch.bmm(latents, self.values.transpose(1, 2)).transpose(0, 1)


def plan_latents(
    segments: Sequence[Segment], latents: PageShape, index_keys: PageShape | None, device: torch.device
) -> LatentPlan:
    """Prepare one step; both pages have the same block size."""
    gather = GatherAttention()
    return LatentPlan(
        gather.plan(segments, latents, None, device),
        None if index_keys is None else gather.plan(segments, index_keys, None, device),
    )


def write_vectors(cache: torch.Tensor, vectors: torch.Tensor, plan: AttentionPlan) -> None:
    """Store every row's latent or index key, ``[rows, head_dim]``."""
    assert isinstance(plan, GatherPlan)
    write_slots(cache, plan.slots, vectors[:, None, None])


def longest_context(plan: AttentionPlan) -> int:
    """Tokens that the row which sees most may see, rounded up to blocks."""
    assert isinstance(plan, GatherPlan)
    return max([batch.tokens for batch in plan.decodes] + [chunk.span for chunk in plan.chunks])


def select_tokens(
    query: torch.Tensor, weights: torch.Tensor, index_keys: torch.Tensor, plan: AttentionPlan, topk: int
) -> Selection | None:
    """The ``topk`` tokens with the highest ``sum over heads of weight * relu(query · key)`` among those a row sees.

    ``query`` is ``[rows, index_heads, index_dim]``, ``weights`` ``[rows, index_heads]`` with all scales in them; scores
    are float32 at least. None if no row sees more than ``topk`` tokens: there is nothing to choose.
    """
    if longest_context(plan) <= topk:
        return None
    assert isinstance(plan, GatherPlan)
    precision = torch.promote_types(query.dtype, torch.float32)
    query, weights = query.to(precision), weights.to(precision)
    chosen = query.new_full((len(query), topk), -1, dtype=torch.int64)
    for batch in plan.decodes:
        keys = _gathered(index_keys, batch.runs, plan.shape).view(batch.batch, batch.tokens, -1).to(precision)
        scores = torch.bmm(_rows(query, batch), keys.transpose(1, 2)).relu_()
        scores = torch.bmm(_rows(weights, batch)[:, None], scores)[:, 0]
        if batch.mask is not None:
            scores += batch.mask.view(batch.batch, batch.tokens)
        _put_rows(chosen, batch, _best(scores, topk))
    for chunk in plan.chunks:
        keys = _gathered(index_keys, chunk.runs, plan.shape)[: chunk.span].to(precision)
        # Scores of every head exist for some rows at a time only.
        step = max(1, MAX_GATHERED_ELEMENTS // (query.shape[1] * chunk.span))
        for begin in range(0, chunk.rows, step):
            end = min(begin + step, chunk.rows)
            rows = slice(chunk.first_row + begin, chunk.first_row + end)
            scores = torch.matmul(query[rows], keys.T).relu_()
            scores = torch.bmm(weights[rows, None], scores)[:, 0]
            scores.masked_fill_(~_visible(chunk, begin, end, scores), -torch.inf)
            chosen[rows] = _best(scores, topk)
    return Selection(chosen)


def attend_heads(
    query: torch.Tensor,
    expansion: Expansion,
    cache: torch.Tensor,
    plan: AttentionPlan,
    *,
    scale: float,
    selection: Selection | None = None,
) -> torch.Tensor:
    """Causal attention, to the selected tokens only if there is a selection; softmax in float32 at least.

    ``query`` is ``[rows, heads, key_dim + rotary_dim]``; returns ``[rows, heads, value_dim]``. Every batch of rows is
    answered in the form that costs it less.
    """
    assert isinstance(plan, GatherPlan)
    out = query.new_empty(*query.shape[:2], expansion.value_dim)
    for batch in plan.decodes:
        absorbed = expansion.absorb(_rows(query, batch))
        attended = _decode(absorbed, cache, batch, plan, scale, selection)
        _put_rows(out, batch, expansion.expand_values(attended))
    for chunk in plan.chunks:
        rows = _chunk_rows(chunk)
        if _expanding_costs_less(chunk, query.shape[2], cache.shape[-1], expansion):
            _expanded_chunk(query[rows], expansion, cache, chunk, plan, scale, selection, out[rows])
        else:
            attended = _chunk(expansion.absorb(query[rows]), cache, chunk, plan, scale, selection)
            out[rows] = expansion.expand_values(attended)
    return out


def _decode(
    query: torch.Tensor,
    cache: torch.Tensor,
    batch: DecodeBatch,
    plan: GatherPlan,
    scale: float,
    selection: Selection | None,
) -> torch.Tensor:
    """One absorbed row per sequence, ``[batch, heads, head_dim]`` in and out; whole latents serve as values."""
    if selection is None or batch.tokens <= selection.tokens.shape[1]:
        latents = _gathered(cache, batch.runs, plan.shape).view(batch.batch, batch.tokens, -1)
        mask = None if batch.mask is None else batch.mask.view(batch.batch, 1, batch.tokens)
    else:
        tokens = _rows(selection.tokens, batch)
        latents = _selected(cache, batch, tokens.clamp(min=0), plan.shape)
        mask = torch.zeros_like(tokens, dtype=torch.float32).masked_fill_(tokens < 0, -torch.inf)[:, None]
    scores = torch.bmm(query, latents.transpose(1, 2))
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32)).mul_(scale)
    if mask is not None:
        scores += mask
    return torch.bmm(torch.softmax(scores, dim=-1).to(query.dtype), latents)


def _chunk(
    query: torch.Tensor, cache: torch.Tensor, chunk: Chunk, plan: GatherPlan, scale: float, selection: Selection | None
) -> torch.Tensor:
    """Absorbed rows of one sequence, ``[rows, heads, head_dim]`` in and out; whole latents serve as values.

    Fused attention wants values as wide as keys.
    """
    latents = _gathered(cache, chunk.runs, plan.shape)[None, : chunk.span]
    return _fused(query, latents, latents, _chunk_mask(chunk, selection), scale)


def _expanded_chunk(
    query: torch.Tensor,
    expansion: Expansion,
    cache: torch.Tensor,
    chunk: Chunk,
    plan: GatherPlan,
    scale: float,
    selection: Selection | None,
    out: torch.Tensor,
) -> None:
    """Rows of one sequence over keys and values of every head, expanded for some heads at a time."""
    latents = _gathered(cache, chunk.runs, plan.shape)[: chunk.span]
    latent_dim, width = expansion.keys.shape[2], max(query.shape[2], expansion.value_dim)
    mask = _chunk_mask(chunk, selection)
    step = max(1, MAX_GATHERED_ELEMENTS // (2 * chunk.span * width))
    for begin in range(0, query.shape[1], step):
        heads = slice(begin, min(begin + step, query.shape[1]))
        # As wide as each other, for the sake of fused attention.
        padded = F.pad(query[:, heads], (0, width - query.shape[2]))
        keys, values = latents.new_zeros(2, padded.shape[1], chunk.span, width)
        keys[..., : expansion.key_dim] = latents[:, :latent_dim] @ expansion.keys[heads].transpose(1, 2)
        keys[..., expansion.key_dim : query.shape[2]] = latents[:, latent_dim:]
        values[..., : expansion.value_dim] = latents[:, :latent_dim] @ expansion.values[heads].transpose(1, 2)
        out[:, heads] = _fused(padded, keys, values, mask, scale)[..., : expansion.value_dim]


def _expanding_costs_less(chunk: Chunk, head_dim: int, stored_dim: int, expansion: Expansion) -> bool:
    """Multiply-adds of one head: either form transforms something, then multiplies rows with tokens twice."""
    transformed = expansion.keys.shape[2] * (expansion.key_dim + expansion.value_dim)
    absorbed = chunk.rows * (transformed + 2 * stored_dim * chunk.span)
    expanded = chunk.span * (transformed + 2 * max(head_dim, expansion.value_dim) * chunk.rows)
    return expanded < absorbed


def _fused(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """``query`` is ``[rows, heads, width]``, keys and values ``[heads or 1, span, width]``; returns like ``query``."""
    result = F.scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        keys[None],
        values[None],
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=True,
    )
    return result[0].transpose(0, 1)


def _chunk_mask(chunk: Chunk, selection: Selection | None) -> torch.Tensor | None:
    """Bool ``[rows, span]``: what a chunk's rows attend to, or None for a plain causal start."""
    if selection is None or chunk.span <= selection.tokens.shape[1]:
        return chunk.mask
    tokens = selection.tokens[_chunk_rows(chunk)]
    mask = torch.zeros(chunk.rows, chunk.span + 1, dtype=torch.bool, device=tokens.device)
    return mask.scatter_(1, tokens.where(tokens >= 0, chunk.span), value=True)[:, : chunk.span]


def _chunk_rows(chunk: Chunk) -> slice:
    return slice(chunk.first_row, chunk.first_row + chunk.rows)


def _gathered(cache: torch.Tensor, starts: torch.Tensor, shape: PageShape) -> torch.Tensor:
    """Whole blocks as ``[tokens, head_dim]``."""
    return shape.runs(cache).index_select(0, starts).view(-1, shape.head_dim)


def _selected(cache: torch.Tensor, batch: DecodeBatch, tokens: torch.Tensor, shape: PageShape) -> torch.Tensor:
    """Single tokens of every sequence of a batch, ``[batch, k]`` to ``[batch, k, head_dim]``."""
    starts = batch.runs.view(batch.batch, -1).gather(1, tokens // shape.block_size)
    index = starts + tokens % shape.block_size * (shape.head_dim // shape.unit)
    last = (cache.shape[0] - 1) * shape.stride + (shape.block_size - 1) * shape.head_dim
    vectors = cache.as_strided((last // shape.unit + 1, shape.head_dim), (shape.unit, 1))
    return vectors.index_select(0, index.view(-1)).view(*tokens.shape, shape.head_dim)


def _visible(chunk: Chunk, begin: int, end: int, like: torch.Tensor) -> torch.Tensor:
    """Bool ``[end - begin, span]``: what some of a chunk's rows see."""
    if chunk.mask is not None:
        return chunk.mask[begin:end]
    return torch.ones_like(like, dtype=torch.bool).tril(begin)


def _best(scores: torch.Tensor, topk: int) -> torch.Tensor:
    """Positions of the highest scores in ascending order, ``[rows, topk]``, -1 where only hidden tokens are left.

    Of equal scores, zero above all, the earliest win: a choice must not depend on how rows were batched.
    """
    # A row of a model that overflowed must not end the step of all others.
    scores = scores.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    count = min(topk, scores.shape[1])
    chosen = are_best(scores, count)
    # Meta tensors hold no numbers, so nothing is chosen; the shape is the same.
    found = chosen.new_empty(len(scores) * count, 2, dtype=torch.int64) if chosen.is_meta else chosen.nonzero()
    positions = found[:, 1].view(len(scores), count)
    positions = positions.masked_fill(scores.gather(1, positions) == -torch.inf, -1)
    return F.pad(positions, (0, topk - count), value=-1)


def are_best(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Bool like ``scores`` ``[rows, tokens]``: the ``count`` highest of every row, the earliest of equal ones."""
    lowest = scores.topk(count, sorted=False).values.amin(dim=1, keepdim=True)
    above, equal = scores > lowest, scores == lowest
    return above | (equal & (equal.cumsum(dim=1) <= count - above.sum(dim=1, keepdim=True)))


def _rows(values: torch.Tensor, batch: DecodeBatch) -> torch.Tensor:
    return values[: batch.batch] if batch.rows is None else values.index_select(0, batch.rows)


def _put_rows(out: torch.Tensor, batch: DecodeBatch, values: torch.Tensor) -> None:
    if batch.rows is None:
        out[: batch.batch] = values
    else:
        out.index_copy_(0, batch.rows, values)
