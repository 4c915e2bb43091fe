"""Triton's delta rule against the reference, which is tested against the recurrence as it is written."""

from types import MappingProxyType

import pytest
import torch

from kernels.delta_rule import DeltaRows, delta_rule_chunk, delta_rule_row, unit_vectors
from kernels.fused_delta_rule import FusedDeltaRule
from kernels.tuning import A100, DeltaTile

SMALL = FusedDeltaRule(A100, MappingProxyType({80: DeltaTile(4, 1, 16, 16, 16, 4)}))


def random_rows(count: int, key_dim: int, value_dim: int, strength: float = 0.1) -> DeltaRows:
    """Two key heads, six value heads; keys, values and betas are parts of wider tensors."""
    generator = torch.Generator().manual_seed(count)
    query, key = (torch.randn(count, 2, key_dim + 1, generator=generator)[..., 1:] for _ in range(2))
    return DeltaRows(
        query / key_dim,
        unit_vectors(key),
        torch.randn(count, 7, value_dim, generator=generator)[:, 1:],
        -strength * torch.rand(count, 6, generator=generator),
        torch.rand(count, 8, generator=generator)[:, 2:],
    )


def random_state(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(99))


def check(ours: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> None:
    for one, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(("count", "key_dim", "value_dim"), [(1, 16, 4), (3, 5, 7)])
def test_one_row_of_each_of_many_sequences(count: int, key_dim: int, value_dim: int) -> None:
    rows, state = random_rows(count, key_dim, value_dim), random_state(count, 6, key_dim, value_dim)
    before = state.clone()
    check(SMALL.delta_rule_row(rows, state), delta_rule_row(rows, state))
    assert torch.equal(state, before)


@pytest.mark.parametrize(
    ("count", "key_dim", "value_dim", "strength"),
    [(1, 16, 16, 0.1), (15, 5, 7, 0.1), (16, 8, 20, 8.0), (37, 8, 5, 1.0)],
)
def test_blocks_of_rows(count: int, key_dim: int, value_dim: int, strength: float) -> None:
    """At a strength of 8 a block forgets all that came before it."""
    rows, state = random_rows(count, key_dim, value_dim, strength), random_state(6, key_dim, value_dim)
    before = state.clone()
    check(SMALL.delta_rule_chunk(rows, state), delta_rule_chunk(rows, state))
    assert torch.equal(state, before)


def test_equal_keys_in_whole_default_blocks() -> None:
    """Nothing decays and every row replaces all: what powers of the whole system would lose precision on."""
    key, scalars = unit_vectors(torch.ones(70, 1, 16)), torch.ones(70, 1)
    value = torch.randn(70, 1, 16, generator=torch.Generator().manual_seed(0))
    rows, state = DeltaRows(key, key, value, 0 * scalars, scalars), random_state(1, 16, 16)
    out, new_state = FusedDeltaRule(A100).delta_rule_chunk(rows, state)
    check((out, new_state), delta_rule_chunk(rows, state))
    torch.testing.assert_close(out, value, atol=2e-5, rtol=2e-5)


def test_other_types_are_refused_by_name() -> None:
    rows, state = random_rows(1, 4, 4), random_state(1, 6, 4, 4)
    with pytest.raises(ValueError, match=r"torch.float32, not torch.bfloat16"):
        SMALL.delta_rule_row(rows, state.bfloat16())
