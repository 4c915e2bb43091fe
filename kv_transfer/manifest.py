"""What a decode rank expects of one stream. Immutable: a new attempt is a new epoch and a new manifest."""

from dataclasses import dataclass

from kv_transfer.layout import CacheLayout, SlotRange
from kv_transfer.plan import lower_bound


@dataclass(frozen=True, slots=True)
class Manifest:
    """Of every section of ``layout``, which is the pair's, the slots in ``ranges`` for ``(request_id, epoch)``."""

    request_id: str
    epoch: int
    ranges: tuple[SlotRange, ...]
    layout: CacheLayout

    @property
    def expected_bytes(self) -> int:
        """Payload bytes of a complete stream."""
        return lower_bound(self.layout, self.ranges)
