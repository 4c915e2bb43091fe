"""Triton kernel of ``kernels.sampling``: one launch filters all rows and draws from them.

Nothing is sorted. Filters keep what is likelier than a threshold, and of what is exactly as likely the lower ids, so a
program finds its row's threshold: the highest value such that the values from it up are enough, in number for top-k and
in probability for top-p. Floats are taken as integers of the same order, and three bits of the threshold are decided in
one pass over the row (the radix selection of Alabi et al. 2012, with probabilities beside counts). A row is read from
the cache some 30 times with both filters, three times without any.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
import triton.language as tl

from kernels.launch import Kernel, inlined
from kernels.sampling import RowFilters
from kernels.tuning import VOCABULARY_TILE, VOCABULARY_WARPS

LOWEST: tl.constexpr = tl.constexpr(-(1 << 31))
"""Below every float as an integer."""

HIGHEST: tl.constexpr = tl.constexpr((1 << 31) - 1)
"""Above every float as an integer."""


def draw_tokens(
    logits: torch.Tensor,
    filters: Sequence[RowFilters],
    numbers: npt.NDArray[np.float64],
    tile: int = VOCABULARY_TILE,
) -> torch.Tensor:
    """The contract of ``kernels.sampling.draw_tokens``: float32 ``[rows, vocab]`` to int64 ``[rows]``.

    Thresholds of top-p and min-p are of sums in another order than the reference's: where a sum hits a threshold to the
    last bits, one token more or less may be left. All else is the same, and so is the token.
    """
    if logits.dtype != torch.float32:
        raise ValueError(f"tokens are drawn from torch.float32, not {logits.dtype}")
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    rows, vocab = logits.shape
    # As float32, which the reference compares with.
    fractions = np.array([(f.top_p, f.min_p) for f in filters], dtype=np.float32).reshape(-1, 2)
    settings = np.stack([np.array([f.top_k for f in filters], dtype=np.float64), *fractions.T, numbers])
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    draw_from_rows.launch(
        (rows,),
        logits,
        logits.stride(0),
        torch.from_numpy(settings).to(logits.device),
        rows,
        out,
        vocab,
        tile=tile,
        warps=VOCABULARY_WARPS,
    )
    return out


@inlined
def load_values(line: tl.tensor, begin: tl.tensor, vocab: tl.tensor, tile: tl.constexpr) -> tl.tensor:
    """Some of a row's logits; minus infinity beyond its end."""
    token = begin + tl.arange(0, tile)
    values = tl.load(line + token, mask=token < vocab, other=float("-inf"))
    # There are two zeros, which are equal.
    return tl.where(values == 0.0, 0.0, values)


@inlined
def as_ordered(values: tl.tensor) -> tl.tensor:
    """Float32 as int32 of the same order."""
    bits = values.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@inlined
def sizes_of(values: tl.tensor, largest: tl.tensor, is_mass: tl.constexpr) -> tl.tensor:
    """What each value counts for: its probability, of which the likeliest has 1, or one."""
    if is_mass:
        return tl.exp(values - largest)
    return tl.where(values > float("-inf"), 1.0, 0.0)


@inlined
def highest_that_reaches(
    target: tl.tensor,
    line: tl.tensor,
    largest: tl.tensor,
    floor: tl.tensor,
    at_floor: tl.tensor,
    is_mass: tl.constexpr,
    vocab: tl.tensor,
    tile: tl.constexpr,
) -> tl.tensor:
    """The highest threshold such that what is at it or above adds up to ``target``; ``LOWEST`` if nothing does.

    Above ``floor`` values count, at it ``at_floor`` does, and below nothing.
    """
    nth = tl.arange(0, 8).to(tl.int64) + 1
    found = tl.full([], LOWEST, tl.int64)
    for step in range(0, 11):
        shift = 30 - 3 * step
        candidates = tl.minimum(found + (nth << shift), HIGHEST)
        reached = tl.where(candidates <= floor, at_floor, 0.0)
        for begin in range(0, vocab, tile):
            values = load_values(line, begin, vocab, tile)
            keys = as_ordered(values)
            sizes = tl.where(keys > floor, sizes_of(values, largest, is_mass), 0.0)
            above = keys[None, :] >= candidates.to(tl.int32)[:, None]
            reached += tl.sum(tl.where(above, sizes[None, :], 0.0), 1).to(tl.float64)
        found += tl.sum((reached >= target).to(tl.int64), 0) << shift
    return found


@inlined
def above_and_at(
    threshold: tl.tensor,
    line: tl.tensor,
    largest: tl.tensor,
    is_mass: tl.constexpr,
    vocab: tl.tensor,
    tile: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """What all above a threshold add up to, and what a single value at it counts for."""
    above = tl.full([], 0.0, tl.float64)
    single = tl.full([], 0.0, tl.float64)
    for begin in range(0, vocab, tile):
        values = load_values(line, begin, vocab, tile)
        keys = as_ordered(values)
        sizes = sizes_of(values, largest, is_mass)
        above += tl.sum(tl.where(keys > threshold, sizes, 0.0), 0).to(tl.float64)
        single = tl.maximum(single, tl.max(tl.where(keys == threshold, sizes, 0.0), 0).to(tl.float64))
    return above, single


@Kernel
def draw_from_rows(
    logits: tl.tensor,
    row_stride: tl.tensor,
    settings: tl.tensor,
    rows: int,
    out: tl.tensor,
    vocab: tl.tensor,
    tile: tl.constexpr,
) -> None:
    """One program per row. ``settings`` is float64 ``[4, rows]``: top-k, top-p, min-p and the uniform number."""
    row = tl.program_id(0)
    line = logits + row.to(tl.int64) * row_stride
    top_k = tl.load(settings + row)
    top_p = tl.load(settings + rows + row)
    min_p = tl.load(settings + 2 * rows + row)
    number = tl.load(settings + 3 * rows + row)

    largest = tl.full([], float("-inf"), tl.float32)
    for begin in range(0, vocab, tile):
        largest = tl.maximum(largest, tl.max(load_values(line, begin, vocab, tile), 0))

    # All above the threshold is left, and so are the first ``ties`` that are at it.
    threshold = tl.full([], LOWEST, tl.int64)
    ties = vocab.to(tl.float64)
    nothing = tl.full([], 0.0, tl.float64)
    if top_k > 0:
        threshold = highest_that_reaches(top_k, line, largest, threshold, nothing, False, vocab, tile)
        above, _ = above_and_at(threshold, line, largest, False, vocab, tile)
        ties = top_k - above
    if top_p < 1:
        above, single = above_and_at(threshold, line, largest, True, vocab, tile)
        tied = tl.where(top_k > 0, single * ties, 0.0)
        target = top_p * (above + tied)
        found = highest_that_reaches(target, line, largest, threshold, tied, True, vocab, tile)
        if found >= threshold:
            above, single = above_and_at(found, line, largest, True, vocab, tile)
            needed = tl.where(single > 0.0, tl.ceil((target - above) / single), ties)
            ties = tl.where(found > threshold, needed, tl.minimum(ties, needed))
            threshold = found

    total = tl.full([], 0.0, tl.float64)
    for is_drawing in tl.static_range(2):
        target = number * total
        sum_before = tl.full([], 0.0, tl.float64)
        ties_before = tl.full([], 0, tl.int32)
        drawn = vocab
        last = tl.full([], 0, tl.int32)
        for begin in range(0, vocab, tile):
            values = load_values(line, begin, vocab, tile)
            keys = as_ordered(values)
            is_tie = (keys == threshold).to(tl.int32)
            tie = ties_before + tl.cumsum(is_tie, 0)
            left = (keys > threshold) | ((is_tie > 0) & (tie <= ties))
            left = left & (values > float("-inf")) & (tl.exp(values - largest) >= min_p)
            sizes = tl.where(left, tl.exp(values.to(tl.float64) - largest.to(tl.float64)), 0.0)
            if is_drawing:
                token = begin + tl.arange(0, tile)
                sums = sum_before + tl.cumsum(sizes, 0)
                drawn = tl.minimum(drawn, tl.min(tl.where(left & (sums > target), token, vocab), 0))
                last = tl.maximum(last, tl.max(tl.where(left, token, 0), 0))
            sum_before += tl.sum(sizes, 0)
            ties_before += tl.sum(is_tie, 0)
        total = sum_before
        if is_drawing:
            # Rounding must not overshoot the last.
            tl.store(out + row, tl.where(drawn < vocab, drawn, last).to(tl.int64))
