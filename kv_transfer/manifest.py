"""What a decode replica reserved for one transfer. Immutable: a new attempt is a new epoch and a new manifest."""

from dataclasses import dataclass

from kv_transfer.layout import CacheLayout, SlotRange
from kv_transfer.plan import lower_bound


@dataclass(frozen=True, slots=True)
class Manifest:
    """Of every section, the slots in ``ranges`` are expected for ``(request_id, epoch)``.

    ``tables`` are the request's block tables on the decode replica, one per KV cache group; ``deadline`` is in its
    engine's clock, seconds.
    """

    request_id: str
    epoch: int
    ranges: tuple[SlotRange, ...]
    tables: tuple[tuple[int, ...], ...]
    deadline: float
    layout: CacheLayout

    @property
    def expected_bytes(self) -> int:
        """Payload bytes of a complete transfer."""
        return lower_bound(self.layout, self.ranges)
