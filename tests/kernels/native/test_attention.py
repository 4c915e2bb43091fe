"""Contexts of many tiles and chunks of many rows, against the gather path in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.attention.gather import GatherAttention
from kernels.native.attention import NativeAttention
from tests.kernels.attention.test_gather import lengths, make_step, page_shape, run

# Everything is calculated in float32 and rounded once, at the end.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-8, torch.float16: 2**-11}


@given(
    steps=st.lists(st.one_of(lengths(), st.integers(100, 400).map(lambda n: (n - 90, n))), min_size=1, max_size=3),
    kv_heads=st.integers(1, 2),
    group=st.sampled_from([1, 3, 5]),
    head_dim=st.sampled_from([16, 24, 32, 64, 70, 96]),
    block_size=st.sampled_from([5, 16, 64]),
    parts=st.sampled_from([2, 3]),
    window=st.sampled_from([None, 1, 33, 150]),
    sinks=st.sampled_from([0, 3]),
    dtype=st.sampled_from(list(TOLERANCE)),
    seed=st.integers(0, 99),
)
@settings(max_examples=60)
def test_equals_the_gather_path(
    steps: list[tuple[int, int]],
    kv_heads: int,
    group: int,
    head_dim: int,
    block_size: int,
    parts: int,
    window: int | None,
    sinks: int,
    dtype: torch.dtype,
    seed: int,
) -> None:
    shape = page_shape(kv_heads, block_size, head_dim, parts=parts, gap=4)
    sinks = sinks if window is not None else 0
    heads = kv_heads * group
    step, exact = (
        make_step(steps, shape=shape, heads=heads, dtype=kind, seed=seed, window=window, sinks=sinks)
        for kind in (dtype, torch.float64)
    )
    for tensor in (exact.query, exact.cache, *exact.history):
        tensor.copy_(tensor.to(dtype))
    torch.set_num_threads(2)
    try:
        out = run(step, 0.2, NativeAttention(dtype))
    finally:
        torch.set_num_threads(1)
    expected = run(exact, 0.2, GatherAttention())
    assert torch.equal(step.cache, exact.cache.to(dtype)), "both store the same"
    torch.testing.assert_close(out.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_queries_of_any_size_keep_the_softmax_finite() -> None:
    step = make_step([(1, 300), (40, 300)], shape=page_shape(1, 16, 32), heads=2, dtype=torch.float32, seed=0)
    step.query.mul_(1e4)
    out = run(step, 1.0, NativeAttention(torch.float32))
    expected = run(step, 1.0, GatherAttention())
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


def test_what_is_not_a_number_stays_visible() -> None:
    step = make_step([(1, 40), (20, 40)], shape=page_shape(1, 16, 32), heads=2, dtype=torch.float32, seed=0)
    step.query[0, 0, 3] = float("nan")
    out = run(step, 1.0, NativeAttention(torch.float32))
    assert out[0, 0].isnan().all()
    assert not out[0, 1].isnan().any()
    assert not out[1:].isnan().any()


def test_it_refuses_another_device() -> None:
    with pytest.raises(AssertionError, match="run on the CPU"):
        NativeAttention(torch.float32).plan([], page_shape(1, 4, 8), None, torch.device("meta"))
