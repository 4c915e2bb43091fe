"""What the two transports have in common on the decode side, and the one that needs nothing but the stream.

A receiver is made with its peer's connection and lives as long. ``connect`` is called on the discovery thread,
``prepare`` and ``cancel`` on the engine's, everything else on the threads that read streams.
"""

from typing import Protocol

from kv_transfer.frame import FrameError, PieceFrame, SentFrame
from kv_transfer.staging import StagingBudget
from kv_transfer.transfer import PieceArrived, Transfer, TransferEnded


class PieceReceiver(Protocol):
    """Brings pieces from frames into staging and delivers them."""

    name: str
    """What the handshake compares."""

    def connect(self) -> None:
        """Get ready for the first transfer. Raises ``GroupLost``."""
        ...

    def prepare(self) -> None:
        """A transfer is about to begin. Never blocks."""
        ...

    def begin(self, transfer: Transfer) -> None:
        """Its frames will be read from now on."""
        ...

    def take(self, transfer: Transfer, frame: PieceFrame | SentFrame) -> bool:
        """Take a piece, waiting for room; False if the transfer was cancelled. Raises ``FrameError``, ``GroupLost``."""
        ...

    def end(self, transfer: Transfer, ended: TransferEnded, *, every_header: bool) -> None:
        """Deliver the end behind all pieces. ``every_header``: no frame that was sent is missing."""
        ...

    def cancel(self, transfer: Transfer) -> None:
        """Make both sides stop. Never blocks."""
        ...

    def close(self) -> None:
        """The connection is about to be closed."""
        ...


class StreamReceiver:
    """Payloads come in the frames themselves. A ``PieceReceiver``."""

    name = "grpc"

    def __init__(self, staging: StagingBudget) -> None:
        self._staging = staging

    def connect(self) -> None:
        """Nothing: the stream is the connection."""

    def prepare(self) -> None:
        """Nothing."""

    def begin(self, transfer: Transfer) -> None:
        """Nothing."""

    def take(self, transfer: Transfer, frame: PieceFrame | SentFrame) -> bool:
        """Reserve room for a payload that is here already, and deliver it."""
        if isinstance(frame, SentFrame):
            raise FrameError("a piece without its payload")
        if not self._staging.reserve(frame.payload.nbytes, transfer.cancelled):
            return False
        transfer.deliver(PieceArrived(transfer.request_id, frame, transfer.sender))
        return True

    def end(self, transfer: Transfer, ended: TransferEnded, *, every_header: bool) -> None:
        """Deliver it."""
        del every_header
        transfer.deliver(ended)

    def cancel(self, transfer: Transfer) -> None:
        """Cancel the call and wake its reader."""
        transfer.call.cancel()
        self._staging.wake()

    def close(self) -> None:
        """Nothing."""
