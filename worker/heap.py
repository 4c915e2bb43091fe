"""The C library's heap of a replica's process, set once when the process starts.

Payloads of pieces are allocated, and freed a few milliseconds later, by PyTorch, gRPC and Python alike. With glibc's
defaults what is freed goes back to the kernel at once, and comes again one page fault after the other: that takes
longer than the copies.
"""

import ctypes
import platform

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_FROM_HEAP = 32 << 20
"""The most that glibc allows."""
_FREE_BYTES = 256 << 20


def keep_freed_memory() -> None:
    """Let the heap hold what is freed, up to 256 MiB per arena, for what is allocated next. Only with glibc."""
    if platform.libc_ver()[0] != "glibc":
        return
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_FROM_HEAP)
    libc.mallopt(_M_TRIM_THRESHOLD, _FREE_BYTES)
