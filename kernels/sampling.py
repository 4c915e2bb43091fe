"""Random draws from logits, filtered by top-k, top-p and min-p, as a plain PyTorch reference.

Filters look at a row's tokens from the likeliest down; of equally likely ones the lower ids come first. A draw is the
token at which the probabilities of what is left, summed in the order of ids, exceed a given number.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

LIKELIEST = 256
"""Tokens on which filters are decided at first. Hardly any text needs more, and to sort a vocabulary takes 20 times as
long as to find these."""


@dataclass(frozen=True, slots=True)
class RowFilters:
    """What one row keeps: the ``top_k`` likeliest tokens (0: all), of these as few of the likeliest as have ``top_p``.

    And none that is less than ``min_p`` as likely as the likeliest.
    """

    top_k: int
    top_p: float
    min_p: float

    @property
    def keeps_all(self) -> bool:
        """Whether there is nothing to filter."""
        return self.top_k == 0 and self.top_p == 1.0 and self.min_p == 0.0


def draw_tokens(logits: torch.Tensor, filters: Sequence[RowFilters], numbers: npt.NDArray[np.float64]) -> torch.Tensor:
    """One token per row of float32 ``[rows, vocab]``, int64 ``[rows]``. What filters drop of logits is overwritten.

    ``numbers``, one per row, are uniform in [0, 1). Probabilities are summed in float64.
    """
    filtered = [row for row, wanted in enumerate(filters) if not wanted.keeps_all]
    if filtered:
        index = torch.tensor(filtered, device=logits.device)
        logits[index] = _filter(logits.index_select(0, index), [filters[row] for row in filtered])
    cumulative = torch.softmax(logits, dim=-1, dtype=torch.float64).cumsum(dim=-1)
    # Scaled by the total, which rounding may leave a little off 1, so that the last token can never be overshot.
    targets = torch.from_numpy(numbers).to(logits.device)[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, targets, right=True).clamp_(max=logits.shape[-1] - 1)[:, 0]


def _filter(logits: torch.Tensor, filters: Sequence[RowFilters], count: int = LIKELIEST) -> torch.Tensor:
    """Mask what filters drop of rows ``[rows, vocab]``.

    Decided on a row's ``count`` likeliest tokens, and on all of them where these do not tell.
    """
    vocab = logits.shape[-1]
    if count < vocab:
        tokens = logits.topk(count, dim=-1).indices.sort(dim=-1).values
        values, places = logits.gather(-1, tokens).sort(dim=-1, descending=True, stable=True)
        tokens = tokens.gather(-1, places)
    else:
        values, tokens = logits.sort(dim=-1, descending=True, stable=True)
    kept = _kept(values, logits.logsumexp(dim=-1), filters)
    filtered = torch.full_like(logits, -torch.inf).scatter_(-1, tokens, values.masked_fill(~kept, -torch.inf))
    if count < vocab:
        # What is kept and as unlikely as the last may have company among what was not looked at.
        reaches_last = (kept & (values == values[:, -1:])).any(dim=-1).tolist()
        undecided = [row for row, f in enumerate(filters) if reaches_last[row] or f.top_k > count]
        if undecided:
            filtered[undecided] = _filter(logits[undecided], [filters[row] for row in undecided], vocab)
    return filtered


def _kept(values: torch.Tensor, totals: torch.Tensor, filters: Sequence[RowFilters]) -> torch.Tensor:
    """Which of the likeliest values ``[rows, count]``, most likely first, are left.

    ``totals`` are the logarithms of the summed exponentials of whole rows.
    """
    device = values.device
    top_k = torch.tensor([f.top_k for f in filters], device=device)
    top_p = torch.tensor([f.top_p for f in filters], device=device)[:, None]
    min_p = torch.tensor([f.min_p for f in filters], device=device)[:, None]
    kept = values > -torch.inf
    kept &= (torch.arange(values.shape[1], device=device) < top_k[:, None]) | (top_k == 0)[:, None]
    # What is left by top-k is all that top-p and min-p know.
    left = values.masked_fill(~kept, -torch.inf)
    totals = torch.where(top_k > 0, left.logsumexp(dim=-1), totals)
    probabilities = (left - totals[:, None]).exp()
    before = probabilities.cumsum(dim=-1) - probabilities
    kept &= (before < top_p) | (top_p == 1.0)
    kept &= probabilities >= min_p * probabilities[:, :1]
    kept[:, 0] = True
    return kept
