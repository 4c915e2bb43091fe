"""The pool of block ids of one engine: who holds which, which cached ones may be evicted, and proof that none is lost.

Made with the engine, owned by its cache manager, used only from the engine's thread. A block is in exactly one of three
conditions: *free* (nobody holds it, its content is nothing), *cached* (nobody holds it, its content can be found by
hash) or *held* (one or more sequences use it; it may be findable by hash as well).
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NewType

BlockId = NewType("BlockId", int)
BlockHash = NewType("BlockHash", bytes)


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """``free + cached + held == total``, always."""

    free: int
    cached: int
    held: int
    total: int


class BlockPool:
    """Reference-counted block ids with a least-recently-used queue of evictable ones."""

    def __init__(self, num_blocks: int) -> None:
        self._references = [0] * num_blocks
        self._hash_of: dict[BlockId, BlockHash] = {}
        self._by_hash: dict[BlockHash, BlockId] = {}
        # Nobody's blocks, next to be taken first: free ones in front, cached ones behind, oldest first.
        self._queue: OrderedDict[BlockId, None] = OrderedDict((BlockId(i), None) for i in range(num_blocks))
        # How many of the queue can be found by hash: load reports want it after every step.
        self._cached = 0
        self._reserved = 0

    @property
    def available(self) -> int:
        """Blocks that can be taken now: free and cached ones that are promised to nobody."""
        return len(self._queue) - self._reserved

    def reserve(self, count: int) -> None:
        """Promise ``count`` blocks to somebody who takes them later."""
        assert count <= self.available, f"{count} blocks reserved, {self.available} available"
        self._reserved += count

    def unreserve(self, count: int) -> None:
        """Take a promise back, or keep it by taking blocks next."""
        self._reserved -= count
        assert self._reserved >= 0, f"{-self._reserved} blocks given back that were not reserved"

    def take(self, count: int) -> list[BlockId]:
        """Take ``count`` blocks, evicting the least recently used cached ones if need be.

        The caller checks ``available`` first: all or nothing is its decision.
        """
        assert count <= self.available, f"{count} blocks taken, {self.available} available"
        taken = []
        for _ in range(count):
            block, _ = self._queue.popitem(last=False)
            self._forget(block)
            self._references[block] = 1
            taken.append(block)
        return taken

    def find(self, block_hash: BlockHash) -> BlockId | None:
        """The block whose content has this hash, held or cached."""
        return self._by_hash.get(block_hash)

    def hold(self, blocks: Iterable[BlockId]) -> None:
        """Add one holder to each block, removing it from the evictable queue if it was there."""
        for block in blocks:
            if self._references[block] == 0:
                del self._queue[block]
                self._cached -= block in self._hash_of
            self._references[block] += 1

    def is_evictable(self, block: BlockId) -> bool:
        """Whether nobody holds the block."""
        return self._references[block] == 0

    def publish(self, block: BlockId, block_hash: BlockHash) -> None:
        """Make a held, complete block findable. The first block with a given content stays the one that is found."""
        assert self._references[block] > 0, f"block {block} published by nobody"
        if block_hash not in self._by_hash and block not in self._hash_of:
            self._by_hash[block_hash] = block
            self._hash_of[block] = block_hash

    def release(self, blocks: Iterable[BlockId]) -> None:
        """Drop one holder of each block. Give a chain from its end, so that its end is evicted first."""
        for block in blocks:
            self._references[block] -= 1
            assert self._references[block] >= 0, f"block {block} released twice"
            if self._references[block] == 0:
                self._queue[block] = None
                if block in self._hash_of:
                    self._cached += 1
                else:
                    self._queue.move_to_end(block, last=False)

    def clear_cache(self) -> None:
        """Forget every hash; held blocks stay held."""
        for block in list(self._hash_of):
            self._forget(block)

    def counts(self) -> BlockCounts:
        """Blocks by condition."""
        total, evictable = len(self._references), len(self._queue)
        return BlockCounts(evictable - self._cached, self._cached, total - evictable, total)

    def check(self) -> None:
        """Raise ``AssertionError`` unless every block is in exactly one condition and both hash maps agree."""
        counts = self.counts()
        assert counts.free + counts.cached + counts.held == counts.total, counts
        assert counts.cached == sum(1 for block in self._queue if block in self._hash_of), counts
        assert counts.held == sum(1 for references in self._references if references > 0), counts
        assert all(self._references[block] == 0 for block in self._queue)
        assert len(self._queue) == sum(1 for references in self._references if references == 0)
        assert 0 <= self._reserved <= len(self._queue), f"{self._reserved} reserved of {len(self._queue)}"
        assert {block: block_hash for block_hash, block in self._by_hash.items()} == self._hash_of

    def _forget(self, block: BlockId) -> None:
        block_hash = self._hash_of.pop(block, None)
        if block_hash is not None:
            del self._by_hash[block_hash]
            self._cached -= self._references[block] == 0
