"""Memory for what every step reads from end to end: weights and KV caches on a CPU.

Linux gives out pages of 4 KB unless it is asked for others, and a processor reads ahead no further than to the end of
one. From pages of 2 MB the same thread reads a fifth to a quarter faster.
"""

import mmap
import sys
from contextlib import suppress

import torch

HUGE_PAGE = 2 << 20


def empty_in_huge_pages(count: int, dtype: torch.dtype) -> torch.Tensor:
    """``[count]`` of ``dtype`` on the CPU, of any content, in huge pages where the kernel has them to give.

    What is not a whole one lies in ordinary pages, so nothing is wasted. Freed with the last tensor that sees it.
    """
    size = count * dtype.itemsize
    if sys.platform != "linux" or size < HUGE_PAGE:
        return torch.empty(count, dtype=dtype)
    memory = mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    begin = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % HUGE_PAGE
    with suppress(OSError):
        # A kernel that was built without them says no.
        memory.madvise(mmap.MADV_HUGEPAGE, begin, size // HUGE_PAGE * HUGE_PAGE)
    # Its storage begins with it, unlike that of a part of something larger: views are taken at offsets of the storage.
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=begin)
