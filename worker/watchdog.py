"""Looks after one replica from a thread of its own, and hangs up for it when it can go on no longer.

Started with the replica, it ends with its first finding or with ``stop``. Who waits for the replica is told at once,
even if its engine's thread is stuck in a step: front ends and decode replicas turn to others, and the supervisor starts
another in its place.
"""

import logging
import threading
from collections.abc import Callable

from kv_transfer.heartbeat import LOOK_SECONDS

log = logging.getLogger(__name__)


class Watchdog:
    """``look`` returns what is wrong, ``hang_up`` is told, once."""

    def __init__(self, look: Callable[[], str | None], hang_up: Callable[[str], None]) -> None:
        self._look = look
        self._hang_up = hang_up
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """Look no more: the replica ends in an orderly way."""
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopping.wait(LOOK_SECONDS):
            found = self._look()
            if found is not None:
                log.error("%s", found)
                self._hang_up(found)
                return
