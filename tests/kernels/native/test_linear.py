"""Packed products against float64, over shapes that do not fit tiles, panels or blocks."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.mkldnn_matrix import MkldnnMatrix
from kernels.native.library import has_matrix_unit
from kernels.native.linear import PackedMatrix
from kernels.plain_matrix import PlainMatrix
from kernels.table import gated_matrix, wide_matrix
from kernels.wide_product import WideProduct

# What multiplies weights of a type here: vector registers, and a matrix unit where the processor has one.
FORMS = [(dtype, False) for dtype in (torch.float32, torch.bfloat16, torch.float16)]
FORMS += [(torch.bfloat16, True)] if has_matrix_unit() else []
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-8, torch.float16: 2**-10}


@given(
    rows=st.one_of(st.integers(1, 40), st.sampled_from([383, 385, 800])),
    inputs=st.one_of(st.integers(1, 40), st.sampled_from([2047, 2049, 2300])),
    outputs=st.one_of(st.integers(1, 70), st.just(333)),
    form=st.sampled_from(FORMS),
    has_bias=st.booleans(),
    has_added=st.booleans(),
    wide=st.booleans(),
    padding=st.sampled_from([0, 3]),
    seed=st.integers(0, 99),
)
@settings(max_examples=150)
def test_equals_the_product(
    rows: int,
    inputs: int,
    outputs: int,
    form: tuple[torch.dtype, bool],
    has_bias: bool,
    has_added: bool,
    wide: bool,
    padding: int,
    seed: int,
) -> None:
    dtype, in_matrix_unit = form
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(outputs, inputs, generator=generator).to(dtype)
    hidden = torch.randn(rows, inputs + padding, generator=generator).to(dtype)[:, :inputs]
    bias = torch.randn(outputs, generator=generator).to(dtype) if has_bias else None
    result = torch.float32 if wide else dtype
    # Rows that do not lie one behind the other.
    added = torch.randn(rows, outputs + padding, generator=generator).to(result)[:, :outputs] if has_added else None
    out = PackedMatrix(weight, bias, in_matrix_unit=in_matrix_unit, wide=wide)(hidden, added)
    more = [summand.double() for summand in (bias, added) if summand is not None]
    expected = sum(more, hidden.double() @ weight.double().T)
    # Relative to the sum of the terms' sizes, which is what rounding is relative to.
    size = sum((summand.abs() for summand in more), hidden.double().abs() @ weight.double().abs().T)
    assert out.dtype is result
    # Below the smallest normal number, rounding is relative to that.
    limit = TOLERANCE[result] * size.clamp_min(torch.finfo(dtype).smallest_normal)
    assert ((out.double() - expected).abs() <= limit).all()


@given(
    rows=st.one_of(st.integers(1, 40), st.sampled_from([256, 300])),
    inputs=st.integers(1, 70),
    width=st.one_of(st.integers(1, 40), st.just(333)),
    dtype=st.sampled_from(list(TOLERANCE)),
    has_bias=st.booleans(),
    seed=st.integers(0, 99),
)
def test_a_gated_product_is_that_of_both_halves(
    rows: int, inputs: int, width: int, dtype: torch.dtype, has_bias: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = (torch.randn(2 * width, inputs, generator=generator) * inputs**-0.5).to(dtype)
    hidden = (8 * torch.randn(rows, inputs, generator=generator)).to(dtype)
    bias = torch.randn(2 * width, generator=generator).to(dtype) if has_bias else None
    out = gated_matrix(weight, bias)(hidden)
    gate, factor = (hidden.double() @ weight.double().T + (0 if bias is None else bias.double())).chunk(2, dim=-1)
    # What is rounded before it is multiplied is wrong by a share of both factors.
    scale = (gate.abs() + 1) * (factor.abs() + 1)
    assert out.dtype is dtype
    assert out.shape == (rows, width)
    assert ((out.double() - torch.nn.functional.silu(gate) * factor).abs() <= 4 * TOLERANCE[dtype] * scale).all()


def test_gates_of_any_size() -> None:
    """A gate that is huge or not a number is treated as by the exact function."""
    gates = torch.tensor([-torch.inf, -3e38, -200.0, -88.0, -80.0, -1.0, 0.0, 1.0, 88.0, 3e38, torch.inf, torch.nan])
    weight = torch.cat((gates, torch.ones(12)))[:, None].bfloat16()
    out = gated_matrix(weight, None)(torch.ones(1, 1).bfloat16())[0]
    expected = torch.nn.functional.silu(weight[:12, 0].double())
    torch.testing.assert_close(out.double(), expected, rtol=2**-8, atol=1e-36, equal_nan=True)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("form", FORMS)
def test_threads_share_the_panels(threads: int, form: tuple[torch.dtype, bool]) -> None:
    dtype, in_matrix_unit = form
    weight, hidden = torch.randn(100, 64).to(dtype), torch.randn(30, 64).to(dtype)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        out = PackedMatrix(weight, None, in_matrix_unit=in_matrix_unit)(hidden)
    finally:
        torch.set_num_threads(before)
    limit = TOLERANCE[dtype]
    torch.testing.assert_close(out.double(), hidden.double() @ weight.double().T, rtol=limit, atol=limit)


@pytest.mark.parametrize("form", FORMS)
def test_no_rows_are_no_work(form: tuple[torch.dtype, bool]) -> None:
    dtype, in_matrix_unit = form
    matrix = PackedMatrix(torch.randn(5, 4).to(dtype), None, in_matrix_unit=in_matrix_unit)
    assert matrix(torch.empty(0, 4, dtype=dtype)).shape == (0, 5)


def test_a_transposed_weight_is_packed_as_it_reads() -> None:
    weight, hidden = torch.randn(64, 100).T, torch.randn(3, 64)
    torch.testing.assert_close(PackedMatrix(weight, None)(hidden), hidden @ weight.T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 8, 100])
def test_pytorchs_products_are_the_same(rows: int) -> None:
    weight, bias, hidden = torch.randn(48, 64), torch.randn(48), torch.randn(rows, 64)
    added = torch.randn(rows, 48)
    expected = torch.nn.functional.linear(hidden, weight, bias)
    plain = PlainMatrix(weight, bias)
    for matrix in (MkldnnMatrix(weight, bias), plain, WideProduct(plain)):
        torch.testing.assert_close(matrix(hidden), expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(matrix(hidden, added), expected + added, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_a_wide_result_is_float32_whatever_multiplies(dtype: torch.dtype) -> None:
    weight, hidden = torch.randn(48, 64).to(dtype), torch.randn(3, 64).to(dtype)
    for matrix in (wide_matrix(weight, None), WideProduct(PlainMatrix(weight, None))):
        out = matrix(hidden, torch.ones(3, 48))
        assert out.dtype is torch.float32
        torch.testing.assert_close(out, hidden.float() @ weight.float().T + 1, rtol=2**-7, atol=2**-4)
