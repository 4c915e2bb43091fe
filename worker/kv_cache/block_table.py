"""The blocks that one sequence holds in one group.

Made when a sequence is admitted, changed by the cache manager only, gone when the sequence is released.
"""

from dataclasses import dataclass, field

import numpy as np

from kernels.pages import IntArray
from worker.kv_cache.block_pool import BlockId

NO_BLOCK = BlockId(-1)
"""In place of a block that was given back because nothing can see it any more, or of a state that is not there yet."""


@dataclass(slots=True, eq=False)
class BlockTable:
    """Of tokens: entry ``i`` holds ``[i * block_size, (i + 1) * block_size)``. Of a state: the block to read from, then
    the block to write to, which may be the same.

    ``published`` leading entries need not be looked at again for publishing. Slots from ``sinks_filled`` to before
    ``complete_from`` were never filled. Of a transfer, slots from ``lacking_from`` on are received, and all sinks. The
    table is going to have ``planned`` entries; ``reserved`` blocks of the pool are promised to it and not yet taken.
    """

    blocks: list[BlockId] = field(default_factory=list)
    published: int = 0
    complete_from: int = 0
    lacking_from: int = 0
    sinks_filled: int = 0
    planned: int = 0
    reserved: int = 0

    def held(self) -> list[BlockId]:
        """Every block it holds, once, in order."""
        return [block for block in dict.fromkeys(self.blocks) if block != NO_BLOCK]

    def array(self) -> IntArray:
        """Its entries as int64."""
        return np.array(self.blocks, dtype=np.int64)
