"""The one way into an engine: other threads put events, the engine's thread takes them between steps."""

import queue
from typing import Generic, TypeVar

Event = TypeVar("Event")


class Inbox(Generic[Event]):
    """An unbounded queue; what fills it is bounded by the senders (streams, staging, admission)."""

    def __init__(self) -> None:
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()

    def put(self, event: Event) -> None:
        """Add an event; never blocks."""
        self._events.put(event)

    def wake(self) -> None:
        """Let who waits in ``take`` wait no longer."""
        self._events.put(None)

    def take(self, timeout: float) -> list[Event]:
        """Everything that is there, waiting up to ``timeout`` seconds for the first."""
        events: list[Event] = []
        try:
            event = self._events.get(timeout=timeout) if timeout > 0 else self._events.get_nowait()
            while True:
                if event is not None:
                    events.append(event)
                event = self._events.get_nowait()
        except queue.Empty:
            return events
