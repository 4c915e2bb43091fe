"""How one group's blocks are found, taken, published and given back: one class per retention.

One object per group, made with the cache manager, which asks all groups before it changes anything. Everything here is
bookkeeping on block ids.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence as ListOf
from dataclasses import dataclass

from worker.kv_cache.block_pool import BlockHash, BlockId, BlockPool
from worker.kv_cache.block_table import NO_BLOCK, BlockTable
from worker.kv_cache.groups import KVCacheGroup
from worker.kv_cache.specs import EveryToken, LastState, LastTokens

FRESH = BlockId(-2)
"""In an opening: a block that is still to be taken."""


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """A block whose content must be copied to another."""

    source: BlockId
    destination: BlockId


@dataclass(frozen=True, slots=True)
class Opening:
    """What a table is going to be made of: cached blocks, ``FRESH`` ones, ``NO_BLOCK`` where nothing will look.

    ``promised`` blocks are taken later. The other numbers are the table's.
    """

    entries: tuple[BlockId, ...]
    promised: int = 0
    complete_from: int = 0
    lacking_from: int = 0
    sinks_filled: int = 0
    planned: int = 0

    @property
    def found(self) -> list[BlockId]:
        """The cached blocks."""
        return [entry for entry in self.entries if entry not in (FRESH, NO_BLOCK)]

    @property
    def fresh(self) -> int:
        """How many blocks are taken at once."""
        return self.entries.count(FRESH)


class GroupBlocks(ABC):
    """``index`` is the group's; hashes name blocks of ``base`` tokens, of which every group block is a multiple."""

    def __init__(self, pool: BlockPool, index: int, group: KVCacheGroup, base: int) -> None:
        self._pool = pool
        self._index = index
        self._base = base
        self.group = group
        self.block_size = group.block_size

    @abstractmethod
    def reach(self, hashes: ListOf[BlockHash], limit: int) -> int:
        """No prefix longer than this many tokens, at most ``limit``, can be continued from what is cached."""

    @abstractmethod
    def usable(self, hashes: ListOf[BlockHash], prefix: int) -> bool:
        """Whether what is cached lets a sequence continue after ``prefix`` tokens, a multiple of every block size."""

    @abstractmethod
    def open(self, hashes: ListOf[BlockHash], prefix: int, tokens: int, chunk: int) -> Opening:
        """For a sequence that continues after a usable ``prefix``, to ``tokens`` in all, in steps of ``chunk``."""

    @abstractmethod
    def received_from(self, hashes: ListOf[BlockHash], prompt_len: int) -> int:
        """The first slot, sinks aside, that must be received for a prompt, given what is cached."""

    @abstractmethod
    def open_received(self, hashes: ListOf[BlockHash], prompt_len: int, tokens: int, lacking_from: int) -> Opening:
        """For a sequence whose slots from ``lacking_from`` to the last prompt token's are received."""

    def lacks_nothing(self, hashes: ListOf[BlockHash], prompt_len: int) -> bool:
        """Whether the last of several prompt tokens sees nothing of those before it that is not cached."""
        return self.received_from(hashes, prompt_len) >= prompt_len - 1

    def make(self, opening: Opening) -> BlockTable:
        """Take what an opening needs."""
        self._pool.hold(opening.found)
        taken = iter(self._pool.take(opening.fresh))
        self._pool.reserve(opening.promised)
        return BlockTable(
            [next(taken) if entry == FRESH else entry for entry in opening.entries],
            complete_from=opening.complete_from,
            lacking_from=opening.lacking_from,
            sinks_filled=opening.sinks_filled,
            planned=opening.planned,
            reserved=opening.promised,
        )

    @abstractmethod
    def missing(self, table: BlockTable, tokens: int) -> int:
        """Blocks that must be taken before slots of ``tokens`` tokens exist."""

    def extend(self, table: BlockTable, tokens: int) -> list[BlockId]:
        """Take them, promised ones first."""
        count = self.missing(table, tokens)
        promised = min(count, table.reserved)
        self._pool.unreserve(promised)
        table.reserved -= promised
        taken = self._pool.take(count)
        table.blocks += taken
        return taken

    @abstractmethod
    def advance(self, table: BlockTable, hashes: ListOf[BlockHash], computed: int, *, publish: bool) -> None:
        """``computed`` tokens are in the cache: publish what is complete, give back what nothing will see."""

    @abstractmethod
    def fork_needs(self, table: BlockTable, computed: int, tokens: int) -> int:
        """Blocks that ``fork`` takes."""

    @abstractmethod
    def fork(self, table: BlockTable, computed: int, tokens: int) -> tuple[BlockTable, list[BlockCopy]]:
        """A table for another sequence with the same ``computed`` tokens, and what must be copied for it."""

    def close(self, table: BlockTable) -> None:
        """Give everything back; a chain from its end, so that its end is evicted first."""
        self._pool.release(reversed(table.held()))
        self._pool.unreserve(table.reserved)

    def key(self, hashes: ListOf[BlockHash], tokens: int) -> BlockHash:
        """The name of what this group stores at the end of ``tokens`` tokens."""
        name = hashes[tokens // self._base - 1]
        return BlockHash(name + self._index.to_bytes(2, "little")) if self._index else name


class TokenBlocks(GroupBlocks):
    """What full attention and sliding windows have in common: a table with one entry per block of tokens."""

    def find(self, hashes: ListOf[BlockHash], index: int) -> BlockId | None:
        """The cached block ``index`` of a sequence."""
        end = (index + 1) * self.block_size
        return self._pool.find(self.key(hashes, end)) if end // self._base <= len(hashes) else None

    def run(self, hashes: ListOf[BlockHash], first: int, limit: int) -> list[BlockId]:
        """Consecutive cached blocks from entry ``first`` on, none reaching beyond ``limit`` tokens."""
        found: list[BlockId] = []
        for index in range(first, limit // self.block_size):
            block = self.find(hashes, index)
            if block is None:
                break
            found.append(block)
        return found

    def entries(self, tokens: int) -> int:
        """Table entries that ``tokens`` tokens take."""
        return -(-tokens // self.block_size)

    def missing(self, table: BlockTable, tokens: int) -> int:
        """See ``GroupBlocks``."""
        return max(0, self.entries(tokens) - len(table.blocks))

    def publish(self, table: BlockTable, hashes: ListOf[BlockHash], computed: int) -> None:
        """Make full blocks whose every slot is filled findable."""
        full = computed // self.block_size
        for index in range(table.published, full):
            begin, end = index * self.block_size, (index + 1) * self.block_size
            filled = begin >= table.complete_from or end <= table.sinks_filled
            if filled and table.blocks[index] != NO_BLOCK:
                self._pool.publish(table.blocks[index], self.key(hashes, end))
        table.published = max(table.published, full)

    def fork_needs(self, table: BlockTable, computed: int, tokens: int) -> int:
        """See ``GroupBlocks``."""
        del table
        return self.entries(tokens) - computed // self.block_size

    def fork(self, table: BlockTable, computed: int, tokens: int) -> tuple[BlockTable, list[BlockCopy]]:
        """Full blocks are shared, a partly filled one is copied."""
        shared = computed // self.block_size
        kept = table.blocks[:shared]
        self._pool.hold(block for block in kept if block != NO_BLOCK)
        blocks = kept + self._pool.take(self.fork_needs(table, computed, tokens))
        copies = [BlockCopy(table.blocks[shared], blocks[shared])] if computed % self.block_size else []
        child = BlockTable(
            blocks,
            min(table.published, shared),
            table.complete_from,
            sinks_filled=table.sinks_filled,
            planned=len(blocks),
        )
        return child, copies


class EveryTokenBlocks(TokenBlocks):
    """Full attention, plain or latent: every block is kept, and taken when the sequence is admitted."""

    def reach(self, hashes: ListOf[BlockHash], limit: int) -> int:
        """The cached prefix."""
        return len(self.run(hashes, 0, limit)) * self.block_size

    def usable(self, hashes: ListOf[BlockHash], prefix: int) -> bool:
        """Whatever ``reach`` allows."""
        del hashes, prefix
        return True

    def open(self, hashes: ListOf[BlockHash], prefix: int, tokens: int, chunk: int) -> Opening:
        """Everything at once: a prompt that has begun never waits for a block."""
        del chunk
        return self._opening(hashes, prefix, tokens)

    def received_from(self, hashes: ListOf[BlockHash], prompt_len: int) -> int:
        """The end of the cached prefix."""
        return self.reach(hashes, prompt_len - 1)

    def open_received(self, hashes: ListOf[BlockHash], prompt_len: int, tokens: int, lacking_from: int) -> Opening:
        """The same."""
        del prompt_len
        return self._opening(hashes, lacking_from, tokens)

    def advance(self, table: BlockTable, hashes: ListOf[BlockHash], computed: int, *, publish: bool) -> None:
        """Publish."""
        if publish:
            self.publish(table, hashes, computed)

    def _opening(self, hashes: ListOf[BlockHash], prefix: int, tokens: int) -> Opening:
        found = self.run(hashes, 0, prefix)
        planned = self.entries(tokens)
        return Opening((*found, *[FRESH] * (planned - len(found))), lacking_from=prefix, planned=planned)


class WindowBlocks(TokenBlocks):
    """A sliding window: blocks are taken chunk by chunk, and given back once no later row can see them.

    They are given back after a step, when every layer of it has run: a layer that shares this group's cache may see
    in the same chunk what the next chunk no longer will. The blocks of the first ``sinks`` tokens are kept.
    """

    def __init__(self, pool: BlockPool, index: int, group: KVCacheGroup, base: int, kept: LastTokens) -> None:
        super().__init__(pool, index, group, base)
        self._window = kept.window
        self._sinks = kept.sinks

    def reach(self, hashes: ListOf[BlockHash], limit: int) -> int:
        """Anything: only the sinks and the end of a prefix matter."""
        del hashes
        return limit

    def usable(self, hashes: ListOf[BlockHash], prefix: int) -> bool:
        """Whether all that the next row sees is there."""
        return all(self.find(hashes, index) is not None for index in self._seen(prefix))

    def open(self, hashes: ListOf[BlockHash], prefix: int, tokens: int, chunk: int) -> Opening:
        """What is seen now; window and chunk are promised."""
        entries = [NO_BLOCK] * (prefix // self.block_size)
        for index in self._seen(prefix):
            found = self.find(hashes, index)
            assert found is not None, f"block {index} of a usable prefix of {prefix} tokens is not cached"
            entries[index] = found
        planned = self.entries(tokens)
        promised = min(planned - len(entries), self.group.blocks_held(tokens, chunk))
        return Opening(tuple(entries), promised, planned=planned)

    def received_from(self, hashes: ListOf[BlockHash], prompt_len: int) -> int:
        """The window of the last prompt token, less what is cached of it from its beginning.

        After sinks nothing cached is used: the sinks would have to be cached as well, and they are few.
        """
        seen = self._window_of(prompt_len)
        first = seen // self.block_size
        found = [] if self._sinks else self.run(hashes, first, prompt_len - 1)
        return max(seen, (first + len(found)) * self.block_size)

    def lacks_nothing(self, hashes: ListOf[BlockHash], prompt_len: int) -> bool:
        """See ``GroupBlocks``; sinks are always received."""
        return not self._sinks and super().lacks_nothing(hashes, prompt_len)

    def open_received(self, hashes: ListOf[BlockHash], prompt_len: int, tokens: int, lacking_from: int) -> Opening:
        """The blocks of the sinks and of the last window only."""
        planned = self.entries(tokens)
        sinks = min(self._sinks, prompt_len - 1)
        seen = self._window_of(prompt_len)
        first = seen // self.block_size
        found = [] if self._sinks else self.run(hashes, first, lacking_from)
        entries = [NO_BLOCK] * first + found + [FRESH] * (planned - first - len(found))
        for index in range(self.entries(sinks)):
            entries[index] = FRESH
        return Opening(
            tuple(entries),
            complete_from=first * self.block_size if found else seen if seen > sinks else 0,
            lacking_from=lacking_from,
            sinks_filled=sinks,
            planned=planned,
        )

    def advance(self, table: BlockTable, hashes: ListOf[BlockHash], computed: int, *, publish: bool) -> None:
        """Publish, then give back what is between the sinks and the next row's window."""
        if publish:
            self.publish(table, hashes, computed)
        for index in range(self.entries(self._sinks), min(self._first_seen(computed), len(table.blocks))):
            block = table.blocks[index]
            if block == NO_BLOCK:
                continue
            table.blocks[index] = NO_BLOCK
            self._pool.release([block])
            # What this table still has to take stays promised, unless somebody else holds the block on.
            if self._pool.is_evictable(block) and len(table.blocks) + table.reserved < table.planned:
                self._pool.reserve(1)
                table.reserved += 1

    def _first_seen(self, computed: int) -> int:
        """The entry of the first token that the window of the row at position ``computed`` reaches."""
        return max(0, computed - self._window + 1) // self.block_size

    def _seen(self, computed: int) -> list[int]:
        """The entries of a prefix of ``computed`` tokens, in whole blocks, that the next row sees."""
        end, first = computed // self.block_size, self._first_seen(computed)
        return [*range(min(self.entries(self._sinks), first, end)), *range(first, end)]

    def _window_of(self, prompt_len: int) -> int:
        """The first token, sinks aside, that the last prompt token sees."""
        return max(min(self._sinks, prompt_len - 1), prompt_len - self._window)


class StateBlocks(GroupBlocks):
    """A recurrent state: one block that every step overwrites, and checkpoints every ``stride`` tokens.

    A checkpoint is the block itself: it is published, and the next step reads it and writes to another.
    """

    def __init__(self, pool: BlockPool, index: int, group: KVCacheGroup, base: int, stride: int) -> None:
        super().__init__(pool, index, group, base)
        self._stride = stride

    def reach(self, hashes: ListOf[BlockHash], limit: int) -> int:
        """Anything: ``usable`` looks."""
        del hashes
        return limit

    def usable(self, hashes: ListOf[BlockHash], prefix: int) -> bool:
        """Whether a checkpoint was kept exactly there."""
        return self._pool.find(self.key(hashes, prefix)) is not None

    def open(self, hashes: ListOf[BlockHash], prefix: int, tokens: int, chunk: int) -> Opening:
        """The checkpoint to read, if there is a prefix, and a block to write."""
        del tokens, chunk
        found = self._pool.find(self.key(hashes, prefix)) if prefix else None
        return Opening((NO_BLOCK if found is None else found, FRESH))

    def received_from(self, hashes: ListOf[BlockHash], prompt_len: int) -> int:
        """All of it: the state before the last prompt token is nobody's checkpoint."""
        del hashes, prompt_len
        return 0

    def open_received(self, hashes: ListOf[BlockHash], prompt_len: int, tokens: int, lacking_from: int) -> Opening:
        """A block to receive it in, which the first step then overwrites."""
        del hashes, prompt_len, tokens, lacking_from
        return Opening((NO_BLOCK, FRESH))

    def missing(self, table: BlockTable, tokens: int) -> int:
        """None: the block to write to is always there."""
        del table, tokens
        return 0

    def advance(self, table: BlockTable, hashes: ListOf[BlockHash], computed: int, *, publish: bool) -> None:
        """Let go of what was read; keep a checkpoint where one is due and a block is left to go on in."""
        source, current = table.blocks
        if source not in (NO_BLOCK, current):
            self._pool.release([source])
        table.blocks = [current, current]
        if publish and computed % self._stride == 0 and self._pool.available > 0:
            name = self.key(hashes, computed)
            if self._pool.find(name) is None:
                self._pool.publish(current, name)
                table.blocks = [current, *self._pool.take(1)]

    def fork_needs(self, table: BlockTable, computed: int, tokens: int) -> int:
        """One."""
        del table, computed, tokens
        return 1

    def fork(self, table: BlockTable, computed: int, tokens: int) -> tuple[BlockTable, list[BlockCopy]]:
        """A checkpoint is shared; a state that is overwritten in place is copied."""
        del computed, tokens
        source, current = table.blocks
        (own,) = self._pool.take(1)
        if source != current:
            self._pool.hold([source])
            return BlockTable([source, own]), []
        return BlockTable([own, own]), [BlockCopy(current, own)]


def group_blocks(pool: BlockPool, index: int, group: KVCacheGroup, base: int, stride: int) -> GroupBlocks:
    """The class for a group's retention. ``stride`` is the distance of state checkpoints in tokens."""
    match group.retention:
        case EveryToken():
            return EveryTokenBlocks(pool, index, group, base)
        case LastTokens():
            return WindowBlocks(pool, index, group, base, group.retention)
        case LastState():
            return StateBlocks(pool, index, group, base, stride)
