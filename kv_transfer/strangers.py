"""Calls of those who do not have the cluster's token, to any server of one process."""

import logging
import threading
import time
from typing import Final

log = logging.getLogger(__name__)

LOG_SECONDS: Final = 10.0
"""Whoever calls without a token may call often."""


class Strangers:
    """Counts them, and logs one of them every ``LOG_SECONDS``. Servers call it from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._logged: float | None = None
        self.calls = 0

    def refused(self, peer: str, problem: str) -> None:
        """Somebody at ``peer``, as gRPC names it, was refused."""
        now = time.monotonic()
        with self._lock:
            self.calls += 1
            if self._logged is not None and now < self._logged + LOG_SECONDS:
                return
            self._logged = now
        log.warning("refused a call from %s: %s", peer, problem)
