"""KV memory without tensors: every slot holds what its content would depend on.

A token's keys and values are a function of that token and all before it, and so is the state after it. Here a slot
remembers exactly those, and which group wrote them, so a block that was reused, shared, copied, given back too early or
filled wrongly shows as a slot that remembers something else.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from worker.kv_cache.block_pool import BlockId
from worker.kv_cache.block_table import NO_BLOCK, BlockTable
from worker.kv_cache.group_blocks import BlockCopy
from worker.kv_cache.groups import CachePlan, KVCacheGroup
from worker.kv_cache.specs import LastState, LastTokens
from worker.sequence import Sequence

Slot = tuple[str, tuple[int, ...]]
"""Salt and leading tokens."""


@dataclass(slots=True)
class _Page:
    """The slots of one block that ``group`` wrote."""

    group: int
    slots: dict[int, Slot] = field(default_factory=dict)


def seen(group: KVCacheGroup, position: int) -> list[int]:
    """The tokens before a position that the row there sees."""
    match group.retention:
        case LastTokens(window, sinks):
            return [token for token in range(position) if token < sinks or position - token < window]
        case _:
            return list(range(position))


def lacking_slots(plan: CachePlan, sequence: Sequence) -> list[list[int]]:
    """What a sequence that is being received lacks of each group for the step of its last token."""
    last = len(sequence.tokens) - 1
    slots = []
    for group, table in zip(plan.groups, sequence.tables, strict=True):
        if isinstance(group.retention, LastState):
            slots.append([0])
        else:
            sinks = group.retention.sinks if isinstance(group.retention, LastTokens) else 0
            slots.append([t for t in seen(group, last) if t < sinks or t >= table.lacking_from])
    return slots


class ShadowPages:
    """Slots of an engine's blocks."""

    def __init__(self, plan: CachePlan) -> None:
        self._plan = plan
        self._groups = plan.groups
        self._has_states = any(isinstance(group.retention, LastState) for group in plan.groups)
        self._pages: dict[BlockId, _Page] = {}

    def write(self, sequence: Sequence, begin: int, end: int) -> None:
        """Compute tokens ``[begin, end)``: a layer stores what they give and reads what every one of them sees."""
        for index, (group, table) in enumerate(zip(self._groups, sequence.tables, strict=True)):
            if isinstance(group.retention, LastState):
                if begin:
                    self.require_state(sequence, index, begin)
                else:
                    assert table.blocks[0] == NO_BLOCK, "a sequence begins from somebody's state"
                self._page(table.blocks[1], index).slots[0] = _content(sequence, end)
                continue
            for token in range(begin, end):
                self._store(sequence, index, token)
            # Layers run one after the other, and the last of them still reads what the first row sees.
            self.require_tokens(sequence, index, [*seen(group, begin), *range(begin, end)])

    def receive(self, sequence: Sequence, lacking: Iterable[Iterable[int]]) -> None:
        """Write what was sent: of every group the given slots, or its state after all but the last prompt token."""
        for index, (group, slots) in enumerate(zip(self._groups, lacking, strict=True)):
            if isinstance(group.retention, LastState):
                for slot in slots:
                    block = sequence.tables[index].blocks[-1]
                    self._page(block, index).slots[slot] = _content(sequence, len(sequence.tokens) - 1)
            else:
                for token in slots:
                    self._store(sequence, index, token)

    def copy(self, copy: BlockCopy) -> None:
        source = self._pages.get(copy.source)
        if source is not None:
            self._pages[copy.destination] = _Page(source.group, dict(source.slots))

    def clear(self, blocks: Iterable[BlockId]) -> None:
        """Zero blocks: nobody's content any more, but numbers to everybody."""
        for block in blocks:
            self._pages.pop(block, None)

    def taken(self, blocks: Iterable[BlockId]) -> None:
        """Somebody else has these blocks now: what they hold is nobody's, whatever it is."""
        for block in blocks:
            if block in self._pages:
                self._pages[block].slots.clear()

    def complete(self, sequence: Sequence, group: int, index: int) -> bool:
        """Whether entry ``index`` of a table of tokens is a block in which every slot is filled."""
        table, size = sequence.tables[group], self._groups[group].block_size
        if table.blocks[index] == NO_BLOCK:
            return False
        tokens = range(index * size, (index + 1) * size)
        return all(self._slot(table, size, group, token) == _content(sequence, token + 1) for token in tokens)

    def require(self, sequence: Sequence, end: int) -> None:
        """All that the row at position ``end`` needs of the tokens before it is there."""
        for index, group in enumerate(self._groups):
            if isinstance(group.retention, LastState):
                if end:
                    self.require_state(sequence, index, end)
            else:
                self.require_tokens(sequence, index, seen(group, end))

    def require_held(self, sequence: Sequence) -> None:
        """What a sequence that is being received need not receive is there."""
        lacking = lacking_slots(self._plan, sequence)
        for index, (group, slots) in enumerate(zip(self._groups, lacking, strict=True)):
            if not isinstance(group.retention, LastState):
                needed = set(seen(group, len(sequence.tokens) - 1))
                self.require_tokens(sequence, index, sorted(needed - set(slots)))

    def require_tokens(self, sequence: Sequence, group: int, tokens: Iterable[int]) -> None:
        """A group of tokens holds these of a sequence."""
        table, size = sequence.tables[group], self._groups[group].block_size
        for token in tokens:
            assert table.blocks[token // size] != NO_BLOCK, (
                f"token {token} of {sequence.request_id} was given back in group {group}, and is still seen"
            )
            assert self._slot(table, size, group, token) == _content(sequence, token + 1), (
                f"token {token} of {sequence.request_id} is not in block {table.blocks[token // size]} of group {group}"
            )

    def require_state(self, sequence: Sequence, group: int, tokens: int) -> None:
        """A group of states holds what a sequence's next step reads: the state after ``tokens`` tokens."""
        block = sequence.tables[group].blocks[0]
        page = self._pages.get(block)
        assert page is not None, f"{sequence.request_id} reads no state in group {group}"
        assert (page.group, page.slots.get(0)) == (group, _content(sequence, tokens)), (
            f"block {block} does not hold the state of {sequence.request_id} after {tokens} tokens in group {group}"
        )

    def _store(self, sequence: Sequence, group: int, token: int) -> None:
        size = self._groups[group].block_size
        block = sequence.tables[group].blocks[token // size]
        assert block != NO_BLOCK, f"token {token} of {sequence.request_id} has no block in group {group}"
        self._page(block, group).slots[token % size] = _content(sequence, token + 1)

    def _slot(self, table: BlockTable, size: int, group: int, token: int) -> Slot | None:
        page = self._pages.get(table.blocks[token // size])
        return page.slots.get(token % size) if page is not None and page.group == group else None

    def _page(self, block: BlockId, group: int) -> _Page:
        """The page to write to. What another group left in it is lost, and must be numbers to this one."""
        page = self._pages.get(block)
        if page is None or page.group != group:
            if page is not None and self._has_states and not isinstance(self._groups[group].retention, LastState):
                assert not isinstance(self._groups[page.group].retention, LastState), (
                    f"block {block} still holds a state, and group {group} reads it as tokens"
                )
            page = self._pages[block] = _Page(group)
        return page


def _content(sequence: Sequence, tokens: int) -> Slot:
    return sequence.salt, tuple(sequence.tokens[:tokens])
