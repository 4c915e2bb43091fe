"""Memory in huge pages is memory like any other."""

import gc

import psutil
import pytest
import torch

from kernels.huge_pages import HUGE_PAGE, empty_in_huge_pages


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("size", [0, 64, HUGE_PAGE - 4, HUGE_PAGE, 3 * HUGE_PAGE + 1024])
def test_every_element_is_its_own(size: int, dtype: torch.dtype) -> None:
    count = size // dtype.itemsize
    first, second = empty_in_huge_pages(count, dtype), empty_in_huge_pages(count, dtype)
    assert first.shape == second.shape == (count,)
    assert first.dtype is dtype
    assert first.storage_offset() == 0
    first.copy_(torch.arange(count).remainder(100).to(dtype))
    second.zero_()
    assert torch.equal(first, torch.arange(count).remainder(100).to(dtype))
    if size >= HUGE_PAGE:
        assert first.data_ptr() % HUGE_PAGE == 0


def resident(address: int) -> int:
    """Bytes of the mapping at an address that are in memory; the process's own sum changes for other reasons."""
    for mapping in psutil.Process().memory_maps(grouped=False):
        begin, end = (int(bound, 16) for bound in mapping.addr.split("-"))
        if begin <= address < end:
            return int(mapping.rss)
    return 0


def test_it_lives_as_long_as_somebody_sees_it() -> None:
    size = 64 * HUGE_PAGE
    row = empty_in_huge_pages(size, torch.uint8).fill_(7).view(64, -1)[5]
    address = row.data_ptr()
    gc.collect()
    assert resident(address) >= size
    assert int(row.sum()) == 7 * HUGE_PAGE
    del row
    gc.collect()
    assert resident(address) < size // 2
