"""The cache manager: gives sequences their blocks and finds prefixes that are already there.

One per engine, used by its scheduler only. It does bookkeeping on block ids; tensors are the model runner's. It knows
groups, not layers, and leaves to each group what its kind of slot needs.
"""

import math
from collections.abc import Iterable

from worker.kv_cache.block_pool import BlockCounts, BlockId, BlockPool
from worker.kv_cache.group_blocks import BlockCopy, GroupBlocks, Opening, group_blocks
from worker.kv_cache.groups import CachePlan
from worker.kv_cache.prefix_hash import block_hash, first_parent
from worker.kv_cache.specs import EveryToken, LastState
from worker.sequence import Sequence


class KVCacheManager:
    """Blocks for sequences: all that is needed or none.

    ``max_chunk`` is the most tokens of a sequence that one step computes. A recurrent state is kept for reuse every
    ``checkpoint_blocks`` blocks of tokens.
    """

    def __init__(
        self, plan: CachePlan, num_blocks: int, *, prefix_caching: bool, max_chunk: int, checkpoint_blocks: int
    ) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_size = plan.base_block_size
        self._prefix_caching = prefix_caching
        self._max_chunk = max_chunk
        sizes = [group.block_size for group in plan.groups if not isinstance(group.retention, LastState)]
        # Prefixes end where a block ends in every group and, if there are states, a checkpoint may have been kept.
        self._unit = math.lcm(self.block_size, *sizes)
        self._has_states = len(sizes) < len(plan.groups)
        if self._has_states:
            self._unit *= checkpoint_blocks
        self._groups: list[GroupBlocks] = [
            group_blocks(self.pool, index, group, self.block_size, self._unit)
            for index, group in enumerate(plan.groups)
        ]
        # A block that another kind of layer wrote need not hold numbers.
        self._clears = self._has_states and len(plan.groups) > 1
        self._to_clear: list[BlockId] = []

    def admit(self, sequence: Sequence, *, reusable: int, tokens: int) -> bool:
        """Give a waiting sequence what it needs to be computed to ``tokens`` tokens.

        A cached prefix of at most ``reusable`` tokens is reused; on success ``computed`` is its length. Without room
        nothing changes and False is returned.
        """
        prefix = self.cached_prefix(sequence, reusable)
        # Holding a prefix can take more blocks than computing it again: a checkpoint is held beside the state.
        for length in dict.fromkeys((prefix, 0)):
            openings = [g.open(sequence.hashes, length, tokens, self._max_chunk) for g in self._groups]
            if self._make(sequence, openings):
                sequence.computed = length
                return True
        return False

    def admit_received(self, sequence: Sequence, *, tokens: int) -> bool:
        """Give a waiting sequence blocks for a prompt that is received, all but what is cached, and to ``tokens``.

        On success ``computed`` is how many leading tokens nobody sends, and every table knows what it lacks.
        """
        self._extend_hashes(sequence)
        hashes = sequence.hashes if self._prefix_caching else []
        prompt_len = len(sequence.tokens)
        lacking = [g.received_from(hashes, prompt_len) for g in self._groups]
        openings = []
        for group in self._groups:
            # What moves is decided per kind, so groups of one kind lack the same.
            retention = group.group.retention
            alike = [start for g, start in zip(self._groups, lacking, strict=True) if g.group.retention == retention]
            openings.append(group.open_received(hashes, prompt_len, tokens, min(alike)))
        if not self._make(sequence, openings):
            return False
        # Of what is complete from its beginning: a window or a state says nothing about a prefix.
        whole = [
            table.lacking_from
            for group, table in zip(self._groups, sequence.tables, strict=True)
            if isinstance(group.group.retention, EveryToken)
        ]
        sequence.computed = min(whole, default=0)
        return True

    def lacks_nothing(self, sequence: Sequence) -> bool:
        """Whether there is nothing to receive: all that the last prompt token's step sees of others is cached."""
        self._extend_hashes(sequence)
        hashes = sequence.hashes if self._prefix_caching else []
        return all(group.lacks_nothing(hashes, len(sequence.tokens)) for group in self._groups)

    def cached_prefix(self, sequence: Sequence, reusable: int) -> int:
        """Leading tokens that ``admit`` would find in the prefix cache now."""
        if not self._prefix_caching:
            return 0
        self._extend_hashes(sequence)
        limit = min([reusable, *(group.reach(sequence.hashes, reusable) for group in self._groups)])
        for prefix in range(limit // self._unit * self._unit, 0, -self._unit):
            if all(group.usable(sequence.hashes, prefix) for group in self._groups):
                return prefix
        return 0

    def chunk(self, sequence: Sequence, rows: int) -> int:
        """How many of the next ``rows`` tokens one step may compute: none beyond the next checkpoint."""
        if self._has_states and self._prefix_caching:
            return min(rows, self._unit - sequence.computed % self._unit)
        return rows

    def extend(self, sequence: Sequence, rows: int) -> bool:
        """Make room for the next ``rows`` tokens of a running sequence; False when blocks are lacking."""
        tokens = sequence.computed + rows
        pairs = list(zip(self._groups, sequence.tables, strict=True))
        unpromised = sum(max(0, group.missing(table, tokens) - table.reserved) for group, table in pairs)
        if unpromised > self.pool.available:
            return False
        for group, table in pairs:
            self._note_fresh(group, group.extend(table, tokens))
        return True

    def advance(self, sequence: Sequence) -> None:
        """``sequence.computed`` has grown: publish complete blocks, give back those that nothing will see."""
        if self._prefix_caching:
            self._extend_hashes(sequence)
        for group, table in zip(self._groups, sequence.tables, strict=True):
            group.advance(table, sequence.hashes, sequence.computed, publish=self._prefix_caching)

    def received(self, sequence: Sequence) -> None:
        """Every lacking slot of a prompt has arrived, all but the last token's."""
        sequence.computed = len(sequence.tokens) - 1
        for group, table in zip(self._groups, sequence.tables, strict=True):
            # Only a state that was computed here becomes a checkpoint.
            publish = self._prefix_caching and not isinstance(group.group.retention, LastState)
            group.advance(table, sequence.hashes, sequence.computed, publish=publish)

    def fork(self, parent: Sequence, child: Sequence) -> list[BlockCopy] | None:
        """Let ``child`` share the parent's full blocks and get blocks of its own for what is written next.

        ``child.tokens`` is the parent's computed tokens and one more. Returns the copies that must be made before the
        next step, or None when there is no room.
        """
        tokens = len(child.tokens)
        pairs = list(zip(self._groups, parent.tables, strict=True))
        if sum(group.fork_needs(table, parent.computed, tokens) for group, table in pairs) > self.pool.available:
            return None
        forked = [group.fork(table, parent.computed, tokens) for group, table in pairs]
        child.tables = [table for table, _ in forked]
        child.computed = parent.computed
        copies = [copy for _, copied in forked for copy in copied]
        copied = {copy.destination for copy in copies}
        self._to_clear = [block for block in self._to_clear if block not in copied]
        kept = copied.union(*(table.held() for table in parent.tables))
        for group, table in zip(self._groups, child.tables, strict=True):
            self._note_fresh(group, set(table.held()) - kept)
        return copies

    def release(self, sequence: Sequence) -> None:
        """Take back every block; published ones stay findable until they are evicted."""
        for group, table in zip(self._groups, sequence.tables, strict=True) if sequence.tables else ():
            group.close(table)
        sequence.tables = []
        sequence.computed = 0

    def take_to_clear(self) -> tuple[BlockId, ...]:
        """Blocks that were taken since the last call and must be cleared before anything is written to them."""
        blocks = tuple(self._to_clear)
        self._to_clear.clear()
        return blocks

    def counts(self) -> BlockCounts:
        """Blocks by condition."""
        return self.pool.counts()

    def _make(self, sequence: Sequence, openings: list[Opening]) -> bool:
        assert not sequence.tables
        found = {block for opening in openings for block in opening.found}
        wanted = sum(opening.fresh + opening.promised for opening in openings)
        if wanted > self.pool.available - sum(self.pool.is_evictable(block) for block in found):
            return False
        # What was found is held first: taking evicts.
        for opening in openings:
            self.pool.hold(opening.found)
        for group, opening in zip(self._groups, openings, strict=True):
            table = group.make(opening)
            self._note_fresh(group, set(table.held()) - set(opening.found))
            sequence.tables.append(table)
        for opening in openings:
            self.pool.release(opening.found)
        return True

    def _note_fresh(self, group: GroupBlocks, blocks: Iterable[BlockId]) -> None:
        if self._clears and not isinstance(group.group.retention, LastState):
            self._to_clear += blocks

    def _extend_hashes(self, sequence: Sequence) -> None:
        known = len(sequence.hashes)
        parent = sequence.hashes[-1] if known else first_parent(sequence.salt)
        for index in range(known, len(sequence.tokens) // self.block_size):
            begin = index * self.block_size
            parent = block_hash(parent, sequence.tokens[begin : begin + self.block_size])
            sequence.hashes.append(parent)
