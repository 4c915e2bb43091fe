"""A bound on what Python code may allocate."""

import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def little_memory(limit: int = 32 << 20) -> Iterator[None]:
    """Fail if what runs inside has ever more than ``limit`` bytes, numpy's arrays included."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < limit
    finally:
        tracemalloc.stop()
