"""Signs of life between processes, of which one may stop or hang without closing a connection.

A process beats on a thread that computes nothing: neither a long step nor loading a model is silence, and a step that
never ends is for the watchdog (``worker/watchdog.py``). Who listens looks often, and counts a silence only as far as it
was awake itself: on a machine that stood still, nobody has heard anybody.
"""

BEAT_SECONDS = 0.25
LOOK_SECONDS = 0.1
SILENCE_SECONDS = 1.5
"""Six beats: a busy machine delays one, and a process that was stopped is noticed within two seconds."""
_LONGEST_LOOK = 0.25


class Silence:
    """How long one process has not been heard. Times are seconds of any one clock."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._looked: float | None = None

    def heard(self) -> None:
        """There was a sign of life. May be called on another thread."""
        self._seconds = 0.0

    def look(self, now: float) -> bool:
        """Whether it is too long by now. To be asked every ``LOOK_SECONDS``."""
        if self._looked is not None:
            self._seconds += min(now - self._looked, _LONGEST_LOOK)
        self._looked = now
        return self._seconds > SILENCE_SECONDS
