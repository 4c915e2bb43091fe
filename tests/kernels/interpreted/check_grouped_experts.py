"""Triton's grouped products against the loop over experts."""

from types import MappingProxyType

import pytest
import torch

from kernels.experts import routed_experts
from kernels.grouped_experts import GroupedExperts
from kernels.pointwise import silu_and_multiply
from kernels.tuning import A100, ExpertTile
from tests.kernels.interpreted.steps import tolerance

SMALL = GroupedExperts(A100, MappingProxyType({(80, size, 1 << 31): ExpertTile(16, 32, 32, 4, 1) for size in (2, 4)}))


def check(
    grouped: GroupedExperts,
    experts: torch.Tensor,
    count: int,
    dtype: torch.dtype = torch.float32,
    hidden_size: int = 40,
    width: int = 24,
) -> None:
    """The rows are part of wider ones, as a model may have them."""
    generator = torch.Generator().manual_seed(0)
    rows, choices = experts.shape
    hidden = torch.randn(rows, hidden_size + 3, generator=generator).to(dtype)[:, 3:]
    gate_up = (torch.randn(count, 2 * width, hidden_size, generator=generator) / hidden_size**0.5).to(dtype)
    down = (torch.randn(count, hidden_size, width, generator=generator) / width**0.5).to(dtype)
    weights = torch.rand(rows, choices, generator=generator)
    arguments = (hidden, gate_up, down, experts, weights, silu_and_multiply)
    out, expected = grouped(*arguments), routed_experts(*arguments)
    assert out.dtype == dtype
    torch.testing.assert_close(out, expected, rtol=tolerance(dtype), atol=tolerance(dtype))


def chosen(rows: int, choices: int, count: int) -> torch.Tensor:
    return torch.rand(rows, count, generator=torch.Generator().manual_seed(1)).topk(choices, dim=1).indices


@pytest.mark.parametrize(("rows", "choices", "count"), [(1, 1, 1), (17, 2, 4), (3, 2, 130)])
def test_rows_go_through_their_experts(rows: int, choices: int, count: int) -> None:
    check(SMALL, chosen(rows, choices, count), count)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_types(dtype: torch.dtype) -> None:
    check(SMALL, chosen(9, 2, 2), 2, dtype)


@pytest.mark.parametrize(("rows", "expert"), [(16, 0), (17, 2), (32, 4)])
def test_all_rows_choose_one_expert(rows: int, expert: int) -> None:
    """The first, a middle or the last one, and the others have none."""
    check(SMALL, torch.full((rows, 1), expert), 5)


@pytest.mark.parametrize(("hidden_size", "width"), [(33, 17), (8, 1)])
def test_matrices_of_any_size(hidden_size: int, width: int) -> None:
    check(SMALL, chosen(5, 2, 3), 3, hidden_size=hidden_size, width=width)


@pytest.mark.parametrize("rows", [2, 40])
def test_default_tiles(rows: int) -> None:
    check(GroupedExperts(A100), chosen(rows, 1, 2), 2)


def test_types_that_do_not_fit_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"hidden is torch.float64.*torch.bfloat16"):
        check(SMALL, chosen(1, 1, 1), 1, torch.float64)
