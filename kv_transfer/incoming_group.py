"""The decode side of one pair group: posts receives in order, and waits for them on a thread of its own.

Made when the replica has joined; discarded when the prefill replica is gone, when a receive fails, or when a send may
have been named that this side never heard of. Readers of streams post; the group's thread delivers, so pieces and ends
come in the order of the sequence numbers. Whoever waits learns of a loss at once; only the group's own thread may still
be in Gloo for a while, and so long the memory of what was posted stays reserved.
"""

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from kv_transfer.frame import FrameError
from kv_transfer.pair_group import GroupLost, PairGroup, PendingTransfer
from kv_transfer.staging import StagingBudget

RECEIVE_SECONDS = 10.0
"""The sender has posted before it names a send: nothing but the network is waited for."""
TURN_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class _Receive:
    pending: PendingTransfer
    size: int
    arrived: Callable[[memoryview], None]


class IncomingGroup:
    """See the module. ``on_lost`` is called once, on whichever thread finds the loss."""

    def __init__(self, group: PairGroup, generation: int, staging: StagingBudget, on_lost: Callable[[], None]) -> None:
        self.generation = generation
        self._group: PairGroup | None = group
        self._staging = staging
        self._on_lost = on_lost
        self._changed = threading.Condition()
        self._queue: deque[_Receive | Callable[[], None]] = deque()
        self._next = 0
        self._lost = threading.Event()
        self._reason = ""
        threading.Thread(target=self._complete, name="kv-group-in", daemon=True).start()

    @property
    def lost(self) -> bool:
        """Whether it was given up."""
        return self._lost.is_set()

    def receive(self, sequence: int, size: int, arrived: Callable[[memoryview], None]) -> None:
        """Receive a send that was named: wait for its turn and for room, post, return.

        ``arrived`` is called with the bytes, for which room stays reserved, unless the group is lost before. Raises
        ``GroupLost``, and ``FrameError`` for a send that was named before.
        """
        with self._changed:
            if sequence < self._next:
                raise FrameError(f"send {sequence} was named before")
            if not self._changed.wait_for(lambda: self.lost or self._next == sequence, TURN_SECONDS):
                raise GroupLost(f"nothing names send {self._next}")
        # Room is reserved in turn, so what waits for room never keeps what has it from being complete.
        if not self._staging.reserve(size, self._lost):
            raise GroupLost(self._reason)
        with self._changed:
            try:
                if self.lost or self._group is None:
                    raise GroupLost(self._reason)
                pending = self._group.receive(size, sequence)
            except GroupLost:
                self._staging.give_back(size)
                raise
            self._queue.append(_Receive(pending, size, arrived))
            self._next += 1
            self._changed.notify_all()

    def then(self, call: Callable[[], None]) -> None:
        """Call something behind everything that was posted, or at once when the group is lost."""
        with self._changed:
            if not self.lost:
                self._queue.append(call)
                self._changed.notify_all()
                return
        call()

    def discard(self, reason: str) -> None:
        """Give the group up. Can be called from any thread, any number of times; never blocks."""
        with self._changed:
            if self.lost:
                return
            self._reason = f"the process group was given up: {reason}"
            self._lost.set()
            calls = [item for item in self._queue if not isinstance(item, _Receive)]
            self._changed.notify_all()
        self._staging.wake()
        for call in calls:
            call()
        self._on_lost()

    def _complete(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self.lost)
                if self.lost:
                    break
                item = self._queue.popleft()
            if not isinstance(item, _Receive):
                item()
                continue
            try:
                item.pending.wait(RECEIVE_SECONDS)
            except GroupLost as error:
                self._staging.give_back(item.size)
                self.discard(str(error))
                break
            if self.lost:
                self._staging.give_back(item.size)
            else:
                item.arrived(item.pending.payload())
        with self._changed:
            self._group = None
            for item in self._queue:
                if isinstance(item, _Receive):
                    self._staging.give_back(item.size)
            self._queue.clear()
