"""A bound on received bytes that wait to be written into pages.

One per decode engine. Threads that read streams reserve before they hand a piece over; the engine gives back when it
has written or dropped it. A reader that must wait stops reading, and gRPC's flow control then stops the sender.
"""

import threading


class StagingBudget:
    """At most ``limit`` bytes at a time; a single larger reservation is let through when nothing else is staged."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._used = 0
        self._changed = threading.Condition()

    def reserve(self, size: int, cancelled: threading.Event) -> bool:
        """Wait for room; False as soon as ``cancelled`` is set (its setter calls ``wake``)."""
        with self._changed:
            while not cancelled.is_set():
                if self._used == 0 or self._used + size <= self._limit:
                    self._used += size
                    return True
                self._changed.wait()
        return False

    def give_back(self, size: int) -> None:
        """Return a reservation."""
        with self._changed:
            self._used -= size
            self._changed.notify_all()

    def wake(self) -> None:
        """Let every waiting reader look at its ``cancelled`` again."""
        with self._changed:
            self._changed.notify_all()

    @property
    def used(self) -> int:
        """Bytes that are reserved now."""
        return self._used
