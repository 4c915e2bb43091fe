"""What a decode replica reserved for one transfer. Immutable: a new attempt is a new epoch and a new manifest."""

from dataclasses import dataclass

from kv_transfer.layout import CacheLayout


@dataclass(frozen=True, slots=True)
class Manifest:
    """Tokens ``[held, end)`` of every owner layer are expected for ``(request_id, epoch)``.

    ``blocks`` is the request's block table on the decode replica; ``deadline`` is in its engine's clock, seconds.
    """

    request_id: str
    epoch: int
    held: int
    end: int
    blocks: tuple[int, ...]
    deadline: float
    layout: CacheLayout

    @property
    def expected_bytes(self) -> int:
        """Payload bytes of a complete transfer."""
        return (self.end - self.held) * self.layout.bytes_per_token
