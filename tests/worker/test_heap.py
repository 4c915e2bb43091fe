"""What a process's heap does with memory that is freed."""

import subprocess
import sys

PAGE_FAULTS = """
import resource
from worker.heap import keep_freed_memory

if {kept}:
    keep_freed_memory()

def use():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    payloads = [b"x" * (4 << 20) for _ in range(8)]
    del payloads
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

use()
print(use())
"""


def faults(*, kept: bool) -> int:
    """Of taking 32 MiB in pieces for a second time, in a process of its own."""
    script = PAGE_FAULTS.format(kept=kept)
    return int(subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout)


def test_memory_that_was_freed_is_there_without_page_faults() -> None:
    assert faults(kept=True) < 100
    assert faults(kept=False) > 1000, "the C library does it by itself"
