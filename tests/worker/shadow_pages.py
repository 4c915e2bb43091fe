"""KV memory without tensors: every slot holds what its keys and values would depend on.

A token's KV is a function of that token and all before it. Here a slot remembers exactly those, so a block that was
reused, shared, copied or filled wrongly shows as a slot that remembers something else.
"""

from worker.kv_cache.manager import BlockCopy
from worker.sequence import Sequence

Slot = tuple[str, tuple[int, ...]]


class ShadowPages:
    """Slots of an engine's blocks."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._slots: dict[tuple[int, int], Slot] = {}

    def write(self, sequence: Sequence, begin: int, end: int) -> None:
        """Compute tokens ``[begin, end)``, which read everything before them."""
        self.require(sequence, begin)
        for index in range(begin, end):
            self._slots[self._place(sequence, index)] = _content(sequence, index)

    def copy(self, copy: BlockCopy) -> None:
        for offset in range(self._block_size):
            slot = self._slots.get((copy.source, offset))
            if slot is not None:
                self._slots[copy.destination, offset] = slot

    def require(self, sequence: Sequence, end: int) -> None:
        """Tokens ``[0, end)`` have their KV in the sequence's blocks."""
        for index in range(end):
            assert self._slots.get(self._place(sequence, index)) == _content(sequence, index), (
                f"token {index} of {sequence.request_id} is not in block {sequence.blocks[index // self._block_size]}"
            )

    def _place(self, sequence: Sequence, index: int) -> tuple[int, int]:
        return sequence.blocks[index // self._block_size], index % self._block_size


def _content(sequence: Sequence, index: int) -> Slot:
    return sequence.salt, tuple(sequence.tokens[: index + 1])
