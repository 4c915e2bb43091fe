"""Why a replica does not serve a request to its end, or a transfer does not: what its counters and its log say."""

from enum import StrEnum

from worker.wire import engine_pb2 as wire


class Failure(StrEnum):
    """A request's, on one replica. Front ends may go on with another."""

    INVALID = "invalid"
    """It can never be served, by this replica at least."""
    QUEUE_FULL = "queue_full"
    QUEUE_SLOW = "queue_slow"
    """At the queue's pace its turn would come too late."""
    DISPLACED = "displaced"
    """It was queued, and made room for a caller that has fewer."""
    WAITED = "waited"
    """It was queued, and its turn did not come in time."""
    DRAINING = "draining"
    """The replica takes nothing new."""
    DEADLINE = "deadline"
    STALLED = "stalled"
    """It had no token for too long."""
    STEP = "step"
    """The step that computed it failed."""
    GRAMMAR = "grammar"
    """Its grammar could not be used, which is a defect."""
    STOPPED = "stopped"
    """The replica ended under it."""

    @property
    def kind(self) -> wire.ErrorKind:
        """What front ends are told."""
        return _KINDS[self]

    @property
    def refused(self) -> bool:
        """Whether nothing had been computed for it."""
        return self in _REFUSED


class TransferFailure(StrEnum):
    """Why a transfer did not complete. A request that goes on asks another prefill replica, or computes its prompt."""

    BUSY = "busy"
    """The prefill replica had no stream to spare."""
    BROKEN = "broken"
    """A stream ended early, with an error, or with something that was not expected."""
    DEADLINE = "deadline"
    """The request had no time left."""
    OVERDUE = "overdue"
    """A stream neither went on nor ended."""


_KINDS = {
    Failure.INVALID: wire.ERROR_KIND_INVALID,
    Failure.QUEUE_FULL: wire.ERROR_KIND_OVERLOADED,
    Failure.QUEUE_SLOW: wire.ERROR_KIND_OVERLOADED,
    Failure.DISPLACED: wire.ERROR_KIND_OVERLOADED,
    Failure.WAITED: wire.ERROR_KIND_OVERLOADED,
    Failure.DRAINING: wire.ERROR_KIND_UNAVAILABLE,
    Failure.DEADLINE: wire.ERROR_KIND_TIMEOUT,
    Failure.STALLED: wire.ERROR_KIND_TIMEOUT,
    Failure.STEP: wire.ERROR_KIND_INTERNAL,
    Failure.GRAMMAR: wire.ERROR_KIND_INTERNAL,
    Failure.STOPPED: wire.ERROR_KIND_UNAVAILABLE,
}

_REFUSED = frozenset(
    {
        Failure.INVALID,
        Failure.QUEUE_FULL,
        Failure.QUEUE_SLOW,
        Failure.DISPLACED,
        Failure.WAITED,
        Failure.DRAINING,
    }
)
