"""Cores of a machine that the computing threads of one rank have for themselves.

A rank claims them when it starts, by locks on files of its machine that all ranks of a user know, and binds the thread
that loads its model and the one that computes, whose helpers and memory follow them. What else its process does runs
anywhere. The kernel lets go of the locks with the process, however that ends. A rank that finds too few free cores
claims none and runs anywhere, as one does that was told not to.
"""

import fcntl
import logging
import os
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Self

log = logging.getLogger(__name__)

DIRECTORY = Path(tempfile.gettempdir()) / f"crosskv-cores-{os.getuid()}"


class Cores:
    """Those with the ``numbers``; without any, wherever the process may run. ``close`` lets go of them."""

    def __init__(self, numbers: frozenset[int] = frozenset(), locks: ExitStack | None = None) -> None:
        self.numbers = numbers
        self._locks = ExitStack() if locks is None else locks

    @classmethod
    def claim(cls, count: int, directory: Path = DIRECTORY) -> Self:
        """Claim ``count`` of those that this process may use and no other rank has."""
        directory.mkdir(mode=0o700, exist_ok=True)
        if directory.lstat().st_uid != os.getuid():
            log.warning("%s is somebody else's: the threads run anywhere", directory)
            return cls()
        with ExitStack() as locks:
            # Two that claim at once could each get too few.
            _lock(directory / "turn", locks, fcntl.LOCK_EX)
            numbers: list[int] = []
            held = locks.enter_context(ExitStack())
            for core in sorted(os.sched_getaffinity(0)):
                if len(numbers) < count and _lock(directory / str(core), held, fcntl.LOCK_EX | fcntl.LOCK_NB):
                    numbers.append(core)
            if len(numbers) < count:
                log.warning("%d cores are wanted and %d are free: the threads run anywhere", count, len(numbers))
                return cls()
            return cls(frozenset(numbers), held.pop_all())

    def bind(self) -> None:
        """Keep the calling thread, and those that it starts from now on, on these cores."""
        if self.numbers:
            os.sched_setaffinity(0, self.numbers)

    def close(self) -> None:
        """Others may claim them."""
        self._locks.close()


def _lock(path: Path, locks: ExitStack, how: int) -> bool:
    """Lock a file until ``locks`` close; false if that would mean to wait and ``how`` says not to."""
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, how)
    except BlockingIOError:
        os.close(descriptor)
        return False
    locks.callback(os.close, descriptor)
    return True
