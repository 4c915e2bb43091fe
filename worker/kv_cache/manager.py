"""The cache manager: gives sequences their blocks and finds prefixes that are already there.

One per engine, used by its scheduler only. It does bookkeeping on block ids; tensors are the model runner's.
"""

from dataclasses import dataclass

from worker.kv_cache.block_pool import BlockCounts, BlockId, BlockPool
from worker.kv_cache.prefix_hash import block_hash, first_parent
from worker.sequence import Sequence


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """A block whose content must be copied to another, in every layer."""

    source: BlockId
    destination: BlockId


class KVCacheManager:
    """Blocks for sequences: all that is needed or none."""

    def __init__(self, num_blocks: int, block_size: int, *, prefix_caching: bool) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self._prefix_caching = prefix_caching

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold ``tokens`` tokens."""
        return -(-tokens // self.block_size)

    def admit(self, sequence: Sequence, *, reusable: int, reserve: int) -> bool:
        """Give a waiting sequence blocks for ``reserve`` tokens, reusing a cached prefix of at most ``reusable``.

        On success ``computed`` is the length of that prefix. Without room nothing changes and False is returned.
        """
        assert not sequence.blocks
        prefix = self._find_prefix(sequence, reusable)
        fresh = self.blocks_for(reserve) - len(prefix)
        if fresh > self.pool.available - sum(self.pool.is_evictable(block) for block in prefix):
            return False
        self.pool.hold(prefix)
        sequence.blocks = prefix + self.pool.take(fresh)
        sequence.computed = len(prefix) * self.block_size
        sequence.published = len(prefix)
        return True

    def cached_prefix(self, sequence: Sequence, reusable: int) -> int:
        """Tokens that ``admit`` would find in the prefix cache now."""
        return len(self._find_prefix(sequence, reusable)) * self.block_size

    def grow(self, sequence: Sequence) -> bool:
        """Make room for every known token of a running sequence; False when no block can be taken."""
        missing = self.blocks_for(len(sequence.tokens)) - len(sequence.blocks)
        if missing > self.pool.available:
            return False
        if missing > 0:
            sequence.blocks += self.pool.take(missing)
        return True

    def publish(self, sequence: Sequence) -> None:
        """Make full blocks whose every slot is computed findable."""
        if not self._prefix_caching:
            return
        full = sequence.computed // self.block_size
        if full > sequence.published:
            self._extend_hashes(sequence)
            for index in range(sequence.published, full):
                self.pool.publish(sequence.blocks[index], sequence.hashes[index])
            sequence.published = full

    def fork(self, parent: Sequence, child: Sequence) -> BlockCopy | None:
        """Let ``child`` share the parent's full blocks and get a block of its own for the partly filled one.

        ``child.tokens`` is the parent's computed tokens and one more. Returns the copy that must be made before the
        next step, source equal to destination when none is needed, or None when there is no room.
        """
        shared = parent.computed // self.block_size
        fresh = self.blocks_for(len(child.tokens)) - shared
        if fresh > self.pool.available:
            return None
        self.pool.hold(parent.blocks[:shared])
        child.blocks = parent.blocks[:shared] + self.pool.take(fresh)
        child.computed = parent.computed
        child.published = min(parent.published, shared)
        if parent.computed % self.block_size:
            return BlockCopy(parent.blocks[shared], child.blocks[shared])
        return BlockCopy(child.blocks[shared], child.blocks[shared])

    def release(self, sequence: Sequence) -> None:
        """Take back every block; published ones stay findable until they are evicted."""
        self.pool.release(reversed(sequence.blocks))
        sequence.blocks = []
        sequence.computed = 0
        sequence.published = 0

    def counts(self) -> BlockCounts:
        """Blocks by condition."""
        return self.pool.counts()

    def _find_prefix(self, sequence: Sequence, reusable: int) -> list[BlockId]:
        prefix: list[BlockId] = []
        if self._prefix_caching:
            self._extend_hashes(sequence)
            for name in sequence.hashes[: reusable // self.block_size]:
                block = self.pool.find(name)
                if block is None:
                    break
                prefix.append(block)
        return prefix

    def _extend_hashes(self, sequence: Sequence) -> None:
        known = len(sequence.hashes)
        parent = sequence.hashes[-1] if known else first_parent(sequence.salt)
        for index in range(known, len(sequence.tokens) // self.block_size):
            begin = index * self.block_size
            parent = block_hash(parent, sequence.tokens[begin : begin + self.block_size])
            sequence.hashes.append(parent)
