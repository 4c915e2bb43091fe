"""The prefill side of one pair group: posts sends in order, few at a time, and waits for them on a thread of its own.

Made when a decode replica joins; discarded when it leaves, when its process is gone, or when a send fails. Whoever
waits for a free place learns of that at once; only the group's own thread may still be in Gloo for a while.
"""

import threading
from collections import deque

from kv_transfer.pair_group import GroupLost, PairGroup, PendingTransfer

SENDS_IN_FLIGHT = 8
SEND_SECONDS = 60.0
"""A receiver without room posts nothing, and that may last as long as its engine's longest steps."""


class OutgoingGroup:
    """See the module."""

    def __init__(self, group: PairGroup, generation: int) -> None:
        self.generation = generation
        self.ports = group.ports
        self._group: PairGroup | None = group
        self._changed = threading.Condition()
        self._sends: deque[PendingTransfer] = deque()
        self._next = 0
        self._lost: str | None = None
        threading.Thread(target=self._complete, name="kv-group-out", daemon=True).start()

    def wait_for_room(self) -> None:
        """Return when a send may be posted. Raises ``GroupLost``."""
        with self._changed:
            self._changed.wait_for(lambda: self._lost is not None or len(self._sends) < SENDS_IN_FLIGHT)
            self._require()

    def post(self, payload: memoryview) -> int:
        """Post a send and return its sequence number, which must reach the receiver. Raises ``GroupLost``."""
        with self._changed:
            group = self._require()
            try:
                self._sends.append(group.send(payload, self._next))
            except GroupLost as error:
                self.discard(str(error))
                raise
            self._next += 1
            self._changed.notify_all()
            return self._next - 1

    def discard(self, reason: str) -> None:
        """Give the group up. Can be called from any thread, any number of times; never blocks."""
        with self._changed:
            if self._lost is None:
                self._lost = reason
            self._changed.notify_all()

    def wait_until_lost(self) -> str:
        """Return why it was given up, once it was."""
        with self._changed:
            self._changed.wait_for(lambda: self._lost is not None)
            assert self._lost is not None
            return self._lost

    def _require(self) -> PairGroup:
        if self._lost is not None or self._group is None:
            raise GroupLost(f"the process group was given up: {self._lost}")
        return self._group

    def _complete(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._sends or self._lost is not None)
                if self._lost is not None:
                    break
                first = self._sends[0]
            try:
                first.wait(SEND_SECONDS)
            except GroupLost as error:
                self.discard(str(error))
                break
            with self._changed:
                self._sends.popleft()
                self._changed.notify_all()
        with self._changed:
            self._sends.clear()
            self._group = None
