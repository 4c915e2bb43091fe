"""Time that passes only when nothing is left to do at a moment: a heap of actions, in one order for one seed."""

import heapq
from collections.abc import Callable

Trace = Callable[[str], None]
"""Takes a line about what happens; who replays a schedule reads it."""


class VirtualTime:
    """``now`` is in seconds. Actions of one moment run in the order in which they were planned."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        self._planned = 0
        self._actions: list[tuple[float, int, Callable[[], None]]] = []

    def at(self, when: float, action: Callable[[], None]) -> None:
        """Plan an action; of the past, for now."""
        self._planned += 1
        heapq.heappush(self._actions, (max(when, self.now), self._planned, action))

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Plan an action that many seconds from now."""
        self.at(self.now + seconds, action)

    def advance(self) -> bool:
        """Run the next action; False when there is none."""
        if not self._actions:
            return False
        self.now, _, action = heapq.heappop(self._actions)
        self.events += 1
        action()
        return True
