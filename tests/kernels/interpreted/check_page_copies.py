"""Triton's copies against the references: equal to the bit, gaps and other slots included."""

import numpy as np
import pytest
import torch

from kernels import page_copies, pages
from kernels.pages import Slots
from tests.kernels.interpreted.steps import CPU, memory_of, new_cache

SIZES = [(2, 1, 16, 64), (2, 3, 1, 80), (3, 2, 5, 8), (1, 1, 4, 576)]
FORMATS = [(torch.float32, 0), (torch.bfloat16, 7), (torch.float16, 64), (torch.float64, 1), (torch.int8, 3)]


def random_values(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.randint(-100, 100, shape, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(("dtype", "gap"), FORMATS)
def test_rows_are_written_into_their_slots(sizes: tuple[int, int, int, int], dtype: torch.dtype, gap: int) -> None:
    parts, kv_heads, block_size, head_dim = sizes
    expected, cache = (new_cache(5, sizes, gap=gap, before=3, dtype=dtype) for _ in range(2))
    tokens = min(2 * block_size + 1, 9)
    slots = Slots.of_range(np.array([4, 0, 2]), 0, tokens, block_size, CPU)
    # Part of a wider fused projection.
    values = random_values((tokens, parts * kv_heads * head_dim + 3), dtype)[:, 3:]
    values = values.view(tokens, parts, kv_heads, head_dim)
    pages.write_slots(expected, slots, values)
    page_copies.write_slots(cache, slots, values)
    assert torch.equal(memory_of(cache), memory_of(expected))


def test_rows_without_a_block_are_not_written_and_any_strides_are() -> None:
    sizes = (2, 2, 4, 8)
    expected, cache = (new_cache(3, sizes) for _ in range(2))
    values = random_values((8, 2, 2, 5), torch.float32).permute(3, 1, 2, 0)
    slots = Slots(torch.tensor([2, -1, 0, -1, 2]), torch.tensor([3, 1, 0, 0, 2]))
    kept = slots.blocks >= 0
    pages.write_slots(expected, Slots(slots.blocks[kept], slots.offsets[kept]), values[kept])
    page_copies.write_slots(cache, slots, values)
    assert torch.equal(memory_of(cache), memory_of(expected))


def test_rows_of_another_type_or_shape_are_refused() -> None:
    cache = new_cache(3, (2, 2, 4, 8))
    slots = Slots(torch.tensor([2]), torch.tensor([3]))
    with pytest.raises(ValueError, match=r"torch.float16 \(1, 2, 2, 8\).*torch.float32"):
        page_copies.write_slots(cache, slots, torch.zeros(1, 2, 2, 8, dtype=torch.float16))
    with pytest.raises(ValueError, match=r"\(1, 2, 1, 8\).*\(1, 2, 2, 8\)"):
        page_copies.write_slots(cache, slots, torch.zeros(1, 2, 1, 8))


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(("begin", "end"), [(0, 1), (3, 4), (4, 16), (5, 37)])
@pytest.mark.parametrize(("dtype", "gap"), [(torch.bfloat16, 5)])
def test_tokens_of_all_layers_travel_both_ways(
    sizes: tuple[int, int, int, int], begin: int, end: int, dtype: torch.dtype, gap: int
) -> None:
    parts, kv_heads, block_size, head_dim = sizes
    blocks = np.random.default_rng(0).permutation(40).astype(np.int64)
    # Blocks that hold nothing of the range may have been given back.
    blocks[: begin // block_size] = -1
    sources = [new_cache(40, sizes, gap=gap, before=2, dtype=dtype) for _ in range(3)]
    for layer, source in enumerate(sources):
        source.copy_(random_values(tuple(source.shape), dtype) + layer)
    # Head by head, every layer's payload behind the other's: the wire's order.
    shape = (3, parts, kv_heads, end - begin, head_dim)
    expected, payload = torch.empty(shape, dtype=dtype), torch.empty(shape, dtype=dtype)
    pages.gather_tokens(sources, blocks, begin, end, list(expected))
    page_copies.gather_tokens(sources, blocks, begin, end, list(payload))
    assert torch.equal(payload, expected)

    wanted, received = ([new_cache(40, sizes, gap=gap, before=1, dtype=dtype) for _ in range(3)] for _ in range(2))
    pages.scatter_tokens(wanted, blocks, begin, end, list(payload))
    page_copies.scatter_tokens(received, blocks, begin, end, list(payload))
    for one, other in zip(received, wanted, strict=True):
        assert torch.equal(memory_of(one), memory_of(other))


def test_a_range_of_heads_travels() -> None:
    sizes = (2, 4, 3, 8)
    blocks = np.array([5, 1, 3])
    source, received = new_cache(6, sizes, gap=8), new_cache(6, sizes, gap=8)
    source.copy_(random_values(tuple(source.shape), torch.float32))
    whole, some = torch.empty(2, 4, 7, 8), torch.empty(2, 2, 7, 8)
    pages.gather_tokens([source], blocks, 1, 8, [whole])
    page_copies.gather_tokens([source[:, :, 1:3]], blocks, 1, 8, [some])
    assert torch.equal(some, whole[:, 1:3])

    page_copies.scatter_tokens([received[:, :, 1:3]], blocks, 1, 8, [some])
    back = torch.empty(2, 4, 7, 8)
    pages.gather_tokens([received], blocks, 1, 8, [back])
    assert torch.equal(back[:, 1:3], some)
    untouched = new_cache(6, sizes, gap=8)
    assert torch.equal(received[:, :, ::3], untouched[:, :, ::3])
    assert torch.equal(received[0], untouched[0])


def test_payloads_that_do_not_fit_change_nothing() -> None:
    cache = new_cache(3, (2, 2, 4, 8))
    before = cache.clone()
    with pytest.raises(ValueError, match=r"tokens \[1, 5\)"):
        page_copies.scatter_tokens([cache], np.array([1, 0]), 1, 5, [torch.zeros(2, 2, 3, 8)])
    with pytest.raises(ValueError, match="one dtype, shape and strides"):
        page_copies.scatter_tokens([cache, cache[:2]], np.array([1, 0]), 1, 5, [torch.zeros(2, 2, 4, 8)] * 2)
    with pytest.raises(ValueError, match="same strides"):
        page_copies.scatter_tokens([cache], np.array([1, 0]), 1, 5, [torch.zeros(2, 2, 8, 4).transpose(2, 3)])
    assert torch.equal(cache, before)
