"""How fast a queue moves, and what follows from it: when a refused client may come back, who would come too late.

Pure: the scheduler says what it took and when. The rate is measured while somebody waits, over about the last
``WINDOW`` seconds of it; a queue that nobody stood in says nothing about how fast it would be.
"""

import math

WINDOW = 20.0
FIRST_GUESS = 1.0
"""Seconds after which to come back as long as nothing was measured."""
LONGEST_WAIT = 600.0


class QueuePace:
    """Sequences per second that are taken from a queue."""

    def __init__(self) -> None:
        self._taken = 0.0
        self._seconds = 0.0
        self._since: float | None = None

    def observe(self, taken: int, *, waiting: bool, now: float) -> None:
        """So many were taken now; ``waiting`` says whether others are left."""
        if self._since is not None:
            elapsed = max(0.0, now - self._since)
            kept = math.exp(-elapsed / WINDOW)
            self._seconds = self._seconds * kept + elapsed
            self._taken = self._taken * kept + taken
        self._since = now if waiting else None

    def wait(self, ahead: int) -> float | None:
        """Seconds until ``ahead`` others have been taken; None as long as nothing was measured."""
        if ahead == 0:
            return 0.0
        if not self._seconds:
            return None
        # Nobody was taken yet: whoever waited so long waits at least as long again.
        return min(LONGEST_WAIT, ahead * self._seconds / max(self._taken, 1.0))

    def retry_after(self, waiting: int) -> float:
        """Seconds after which a refused client may come back: those who wait now will have been taken."""
        wait = self.wait(waiting)
        return FIRST_GUESS if wait is None else wait
