"""What a decode engine sees of a transfer: a handle to cancel it by, and events that come in order."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kv_transfer.frame import EndFrame, PieceFrame

if TYPE_CHECKING:
    from grpc import _CallIterator


@dataclass(frozen=True, slots=True)
class PieceArrived:
    """A piece from the prefill replica's rank ``sender`` waits in staging; who takes it gives its bytes back."""

    request_id: str
    frame: PieceFrame
    sender: int = 0


@dataclass(frozen=True, slots=True)
class TransferEnded:
    """The stream is over: ``end`` if the sender finished, else why not. ``busy``: the peer had no stream to spare."""

    request_id: str
    epoch: int
    end: EndFrame | None
    error: str
    busy: bool = False
    sender: int = 0


TransferEvent = PieceArrived | TransferEnded


@dataclass(frozen=True, slots=True, eq=False)
class Transfer:
    """A running transfer from rank ``sender``. ``abort`` ends it on both sides without waiting for either."""

    request_id: str
    epoch: int
    sender: int
    call: "_CallIterator[bytes]"
    deliver: Callable[[TransferEvent], None]
    abort: "Callable[[Transfer], None]"
    cancelled: threading.Event = field(default_factory=threading.Event)

    def cancel(self) -> None:
        """Abort on both sides; returns at once."""
        self.cancelled.set()
        self.abort(self)


def rank_incarnation(incarnation: str, rank: int) -> str:
    """What one rank of a replica is called where ranks are told apart."""
    return f"{incarnation}/{rank}"
