"""When one request's prompt waited, was computed and arrived, as its decode replica saw it.

Made when a request arrives, told what happens to it, and asked once, for the report that goes with the first token.
"""

from dataclasses import dataclass

from kv_transfer.frame import EndFrame
from worker.wire import engine_pb2 as wire


@dataclass(frozen=True, slots=True)
class _Received:
    """A transfer that is complete since ``at``, and what its sender measured."""

    at: float
    end: EndFrame


class PromptPhases:
    """See the module. Times are seconds of one monotonic clock; ``message`` says how they relate to the sender's."""

    def __init__(self, arrived: float) -> None:
        self._arrived = arrived
        self._left_queue: float | None = None
        self._started = arrived
        self._received: _Received | None = None

    def admitted(self, now: float) -> None:
        """The prompt has blocks, and is computed or transferred from now on; perhaps not for the first time."""
        if self._left_queue is None:
            self._left_queue = now
        self._started = now
        self._received = None

    def received(self, end: EndFrame, now: float) -> None:
        """All that was lacking has come."""
        self._received = _Received(now, end)

    def message(self, now: float) -> wire.Phases:
        """The report, when the first token is there."""
        left_queue = now if self._left_queue is None else self._left_queue
        phases = wire.Phases(
            queue_ms=(left_queue - self._arrived) * 1e3,
            start_ms=(self._started - self._arrived) * 1e3,
            first_token_ms=(now - self._arrived) * 1e3,
        )
        if self._received is None:
            phases.prefill_ms = (now - self._started) * 1e3
        else:
            phases.transfer_ms = (self._received.at - self._started) * 1e3
            phases.prefill_queue_ms = self._received.end.queue_seconds * 1e3
            phases.prefill_ms = self._received.end.compute_seconds * 1e3
        return phases
