"""Triton's paged attention against the gather path: same cache afterwards, same results within rounding."""

from types import MappingProxyType

import pytest
import torch

from kernels import tuning
from kernels.attention.gather import GatherAttention
from kernels.attention.paged import PagedAttention
from kernels.tuning import A100, AttentionTile, Gpu
from tests.kernels.interpreted.steps import CPU, Step, make_step, memory_of, tolerance

SCALE = 0.3
# Small tiles, so that short contexts have many; a GPU so large that contexts are split as far as they may.
SMALL = MappingProxyType(
    {(80, size, width): AttentionTile(16, 16, 4, 1) for size in (2, 4) for width in (64, 128, 256, 512)}
)
HUGE = Gpu(80, 10_000)
EDGES = [1, 15, 16, 17, 48]


def check(step: Step, *, window: int | None = None, sinks: int = 0, gpu: Gpu = HUGE) -> None:
    results, written = [], []
    for attention in (GatherAttention(), PagedAttention(gpu, SMALL, SMALL)):
        cache = step.cache.new_empty(0).set_(memory_of(step.cache).clone().untyped_storage())
        cache = cache.as_strided(step.cache.shape, step.cache.stride(), step.cache.storage_offset())
        plan = attention.plan(step.segments, step.shape, window, CPU, sinks=sinks)
        attention.write(cache, step.key_value, plan)
        results.append(attention.attend(step.query, cache, plan, SCALE))
        written.append(memory_of(cache))
    assert torch.equal(written[1], written[0])
    assert results[1].dtype == step.query.dtype
    limit = tolerance(step.query.dtype)
    torch.testing.assert_close(results[1], results[0], rtol=limit, atol=limit)


@pytest.fixture(autouse=True)
def _splits_of_one_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "LEAST_TILES_PER_SPLIT", 1)


@pytest.mark.parametrize(("block_size", "group"), [(1, 3), (3, 8), (16, 1)])
def test_decodes_of_all_lengths_at_once(block_size: int, group: int) -> None:
    check(make_step([(1, context) for context in EDGES], (2, 2, block_size, 8), heads=2 * group, gap=5))


@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_heads_of_any_size_and_type(head_dim: int, dtype: torch.dtype) -> None:
    check(make_step([(1, 40), (5, 23), (1, 16)], (2, 1, 16, head_dim), heads=3, gap=8, dtype=dtype))


@pytest.mark.parametrize("multiprocessors", [1, 2, 5])
def test_splits_of_several_tiles(multiprocessors: int) -> None:
    """A context of 97 has 7 tiles; splits do not divide them, and short contexts have fewer."""
    check(make_step([(1, 97), (1, 1), (1, 33)], (2, 1, 4, 16), heads=2), gpu=Gpu(80, multiprocessors))


@pytest.mark.parametrize(("rows", "group"), [(2, 8), (16, 1), (16, 3), (33, 3), (9, 8)])
def test_chunks_over_a_prefix(rows: int, group: int) -> None:
    contexts = [rows, rows + 1, rows + 31]
    check(make_step([(rows, context) for context in contexts], (2, 1, 16, 16), heads=group))


@pytest.mark.parametrize(("window", "sinks"), [(1, 0), (1, 1), (7, 0), (16, 4), (17, 20), (40, 33), (500, 4)])
def test_windows_and_sinks(window: int, sinks: int) -> None:
    """Blocks that no row sees are gone from the tables, what they held is poisoned."""
    lengths = [(1, 1), (1, 17), (1, 60), (1, 100), (20, 20), (20, 90), (3, 64)]
    step = make_step(lengths, (2, 1, 4, 16), heads=2, window=window, sinks=sinks)
    check(step, window=window, sinks=sinks)


@pytest.mark.parametrize("parts", [3, 4])
def test_values_wider_than_keys(parts: int) -> None:
    check(make_step([(1, 50), (9, 30)], (parts, 2, 5, 8), heads=4))


def test_decodes_beside_chunks_in_any_order() -> None:
    check(make_step([(7, 40), (1, 20), (20, 20), (1, 1), (1, 64), (2, 2)], (2, 2, 16, 16), heads=6, gap=3))


def test_a_group_larger_than_a_tile() -> None:
    check(make_step([(1, 20), (3, 20)], (2, 1, 16, 16), heads=20))


def test_a_step_without_rows() -> None:
    check(make_step([], (2, 1, 16, 16), heads=2))


def test_default_tiles() -> None:
    step = make_step([(1, 150), (5, 70)], (2, 1, 16, 64), heads=3)
    attention = PagedAttention(A100)
    plan = attention.plan(step.segments, step.shape, None, CPU)
    attention.write(step.cache, step.key_value, plan)
    expected = GatherAttention()
    reference = expected.plan(step.segments, step.shape, None, CPU)
    torch.testing.assert_close(
        attention.attend(step.query, step.cache, plan, SCALE),
        expected.attend(step.query, step.cache, reference, SCALE),
        rtol=1e-5,
        atol=1e-5,
    )


def test_types_that_are_not_supported_are_refused_by_name() -> None:
    step = make_step([(1, 5)], (2, 1, 16, 16), heads=2)
    attention = PagedAttention(A100)
    plan = attention.plan(step.segments, step.shape, None, CPU)
    with pytest.raises(ValueError, match=r"torch.float64.*torch.float32"):
        attention.attend(step.query.double(), step.cache, plan, SCALE)
