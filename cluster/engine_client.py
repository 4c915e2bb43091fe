"""What the front end needs of the decode replicas, whoever reaches them: gRPC in a cluster, a script in a test.

One ``EngineClient`` serves a front end for its whole life. It routes requests; it knows no text.
"""

from collections.abc import AsyncGenerator, Callable
from enum import StrEnum
from typing import Protocol

from worker.wire.engine_pb2 import Output, StatusReply, Submit


class Retry(StrEnum):
    """Why a request is given to one more replica."""

    LOST = "lost"
    SENT_AWAY = "sent_away"
    NO_ROOM = "no_room"


class EngineError(Exception):
    """A request cannot be served by the cluster. The message may be shown to the client."""


class EngineUnavailable(EngineError):
    """No replica can take the request now, or the one that had it is gone."""


class EngineTimeout(EngineError):
    """The request's deadline has passed."""


class PoisonRequest(EngineError):
    """Replicas died while they had the request, so that it is not given to another one."""


class EngineOverloaded(EngineError):
    """Every queue is full. ``retry_after`` is in seconds."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


def nobody_asks(replica: str) -> None:
    """Which replica has the request is of no interest."""


class EngineClient(Protocol):
    """The decode replicas of one cluster as one engine."""

    def generate(
        self, submit: Submit, placed: Callable[[str], None] = nobody_asks
    ) -> AsyncGenerator[list[Output], None]:
        """Send one request and yield its outputs, a list per message of the replica.

        ``placed`` is told each replica's name when that is asked.
        Ends after every choice has a finish reason; a choice that fails has ``FINISH_REASON_ERROR`` and an error.
        Raises an ``EngineError`` when no replica has the request. A request that was continued by another replica has a
        ``prompt_info`` of that one as well, and nothing else twice. Closing the generator, or cancelling the task that
        waits for it, before every choice has its finish reason aborts the request on the replica.
        """

    def require_room(self, caller: str) -> None:
        """Raise ``EngineOverloaded`` if every replica's queue is full for a new request of ``caller``."""

    async def statuses(self) -> list[StatusReply]:
        """Return every replica's report; replicas that do not answer are left out."""

    def ready(self) -> bool:
        """Return whether a request could be served: a decode replica and, if disaggregated, a prefill replica."""
