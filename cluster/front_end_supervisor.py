"""One front end as Serve sees it: serves HTTP from its own process, and ends with it."""

from cluster.front_end import FrontEnd, FrontEndConfig
from cluster.garbage import made_to_stay

LISTEN_SECONDS = 60.0


class FrontEndSupervisor:
    """It holds the engines' handles so that they belong to one application."""

    def __init__(self, config: FrontEndConfig, *engines: object) -> None:
        self._engines = engines
        with made_to_stay():
            self._front_end = FrontEnd(config)
            # Serve stops the next of several front ends when this one is there.
            self._front_end.wait_until_listening(LISTEN_SECONDS)

    def check_health(self) -> None:
        """Called by Serve; a front end without replicas is alive, only not ready."""
        if not self._front_end.alive:
            raise RuntimeError("the HTTP server has stopped")

    def __del__(self) -> None:
        """Called by Serve before the process ends."""
        self._front_end.stop()
