"""Triton's draws against the reference: the very same tokens for the same numbers."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from kernels.fused_sampling import draw_tokens
from kernels.sampling import RowFilters
from kernels.sampling import draw_tokens as reference

NUMBERS = np.array([0.37, 0.0, 0.62, 0.9, 1 - 2**-53, 0.1])
FILTERS = [
    RowFilters(0, 1.0, 0.0),
    RowFilters(5, 1.0, 0.0),
    RowFilters(500, 0.99, 0.0),
    RowFilters(0, 0.4, 0.0),
    RowFilters(0, 1.0, 0.2),
    RowFilters(20, 0.7, 0.05),
]


def check(logits: torch.Tensor, filters: Sequence[RowFilters] = FILTERS, tile: int = 128) -> None:
    """The logits with every filter and one of the numbers."""
    # Rows of a wider tensor, as a padded vocabulary has them.
    rows = torch.nn.functional.pad(logits.expand(len(filters), -1), (0, 3))[:, :-3]
    numbers = np.resize(NUMBERS, len(filters))
    drawn = draw_tokens(rows, filters, numbers, tile).tolist()
    assert drawn == reference(rows.clone(), filters, numbers).tolist()


def test_tokens_are_the_same() -> None:
    logits = 3 * torch.randn(100, generator=torch.Generator().manual_seed(0))
    check(logits)
    check(logits, FILTERS[-1:], tile=32)
    check(torch.zeros(1), FILTERS[-1:])


def test_of_equally_likely_tokens_the_lower_ids_are_left() -> None:
    """Both zeros among them; sums of these probabilities are exact."""
    logits = torch.zeros(128)
    logits[::3] = -0.0
    exact = [RowFilters(5, 1.0, 0.0), RowFilters(0, 0.25, 0.0), RowFilters(64, 0.5, 0.5), RowFilters(0, 1.0, 1.0)]
    check(logits, exact)
    logits[[7, 90, 100]] = 9.0
    check(logits, [RowFilters(2, 1.0, 0.0), RowFilters(5, 1.0, 0.0), RowFilters(0, 1.0, 0.9), RowFilters(0, 0.5, 0.0)])


def test_tokens_that_are_forbidden_are_never_drawn() -> None:
    logits = torch.randn(70, generator=torch.Generator().manual_seed(0))
    logits[1::2] = -torch.inf
    check(logits, FILTERS[1:4])
    logits[:] = -torch.inf
    logits[33] = -5.0
    check(logits, FILTERS[2:4])


def test_other_types_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"torch.float32, not torch.float16"):
        draw_tokens(torch.zeros(1, 4, dtype=torch.float16), FILTERS[:1], NUMBERS[:1])
