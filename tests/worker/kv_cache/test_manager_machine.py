"""Anything that may happen to sequences and their blocks, for every mixture of kinds of layers."""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import ClassVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.worker.kv_cache.plans import small_plans
from tests.worker.kv_cache.sequences import make_sequence
from tests.worker.shadow_pages import ShadowPages, lacking_slots, seen
from worker.kv_cache.block_pool import BlockId
from worker.kv_cache.block_table import NO_BLOCK
from worker.kv_cache.groups import KVCacheGroup
from worker.kv_cache.manager import KVCacheManager
from worker.kv_cache.specs import EveryToken, LastState, LastTokens
from worker.sequence import RequestId, Sequence

Content = tuple[int, str, tuple[int, ...]]
"""Group, salt and leading tokens: what a block that can be found holds the end of."""

TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=14)
SALTS = st.sampled_from(["", "", "tenant"])


class ManagerMachine(RuleBasedStateMachine):
    """Sequences come, are received, computed in chunks, grow, fork and go, in a pool that is too small for all of them.

    ``findable`` is the model of the prefix cache: full contents, not hashes.
    """

    kinds: ClassVar[tuple[str, ...]]

    @initialize(data=st.data())
    def start(self, data: st.DataObject) -> None:
        self.plan = data.draw(small_plans(self.kinds))
        self.max_chunk = data.draw(st.integers(1, 4), "chunk")
        checkpoint_blocks = data.draw(st.integers(1, 2), "checkpoint blocks")
        least = self.plan.blocks_held(3, self.max_chunk)
        self.num_blocks = least + data.draw(st.integers(0, 10), "blocks")
        self.cache = KVCacheManager(
            self.plan,
            self.num_blocks,
            prefix_caching=True,
            max_chunk=self.max_chunk,
            checkpoint_blocks=checkpoint_blocks,
        )
        sizes = [group.block_size for group in self.plan.groups if group.block_size]
        self.unit = math.lcm(self.plan.base_block_size, *sizes) * (checkpoint_blocks if "state" in self.kinds else 1)
        self.pages = ShadowPages(self.plan)
        self.running: list[Sequence] = []
        self.receiving: list[Sequence] = []
        self.findable: dict[BlockId, Content] = {}
        # How many entries of each of a sequence's tables were complete when it was last computed.
        self.passed: dict[Sequence, list[int]] = {}
        self.names = 0

    # What happens

    @rule(tokens=TOKENS, salt=SALTS, computes_last=st.booleans())
    def admit(self, tokens: list[int], salt: str, computes_last: bool) -> None:
        self._admit(self._new(tokens, salt), computes_last)

    @rule(tokens=TOKENS.filter(lambda tokens: len(tokens) > 1), salt=SALTS)
    def admit_received(self, tokens: list[int], salt: str) -> None:
        sequence = self._new(tokens, salt)
        lacking = self._first_lacking(sequence)
        before, free_for_all = (self.cache.counts(), self.cache.pool.available), not self._live()

        admitted = self.cache.admit_received(sequence, tokens=len(tokens) + 1)

        if not admitted:
            assert (sequence.tables, sequence.computed) == ([], 0)
            assert (self.cache.counts(), self.cache.pool.available) == before
            assert not (free_for_all and self._fits(len(tokens) + 1)), "it would wait forever"
            return
        assert [table.lacking_from for table in sequence.tables] == lacking
        whole = [
            start
            for group, start in zip(self.plan.groups, lacking, strict=True)
            if isinstance(group.retention, EveryToken)
        ]
        assert sequence.computed == min(whole, default=0), "only what is held from its beginning is a prefix"
        for group, table in zip(self.plan.groups, sequence.tables, strict=True):
            if not group.block_size:
                self._took(table.blocks)
                continue
            assert len(table.blocks) * group.block_size > len(tokens), "no room for the first generated token"
            found = range(self._window_begin(group, len(tokens) - 1) // group.block_size, len(table.blocks))
            found = found[: max(0, table.lacking_from // group.block_size - found.start)]
            sinks = group.retention.sinks if isinstance(group.retention, LastTokens) else 0
            self._took([b for index, b in enumerate(table.blocks) if b != NO_BLOCK and (sinks or index not in found)])
        self.passed[sequence] = [0] * len(self.plan.groups)
        self.receiving.append(sequence)
        self._clear()

    @precondition(lambda self: self.receiving)
    @rule(data=st.data(), arrives=st.booleans())
    def end_transfer(self, data: st.DataObject, arrives: bool) -> None:
        sequence = data.draw(st.sampled_from(self.receiving))
        self.receiving.remove(sequence)
        lacking = lacking_slots(self.plan, sequence)
        if not arrives:
            self.pages.receive(sequence, [slots[: data.draw(st.integers(0, len(slots)))] for slots in lacking])
            self.cache.release(sequence)
            return
        self.pages.receive(sequence, lacking)
        self._publish_tokens(sequence, len(sequence.tokens) - 1)
        self.cache.received(sequence)
        assert sequence.computed == len(sequence.tokens) - 1
        self.running.append(sequence)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        """Several sequences compute some rows each; only then is anything given back."""
        rows: dict[Sequence, int] = {}
        for sequence in data.draw(st.lists(st.sampled_from(self.running), unique=True, min_size=1, max_size=3)):
            if not sequence.pending:
                sequence.tokens.append(data.draw(st.integers(0, 1)))
            most = self.cache.chunk(sequence, min(sequence.pending, self.max_chunk))
            assert most >= 1
            count = data.draw(st.integers(1, most), "rows")
            if self._extend(sequence, count):
                rows[sequence] = count
        self._clear()
        holders = self._holders()
        for sequence, count in rows.items():
            self._require_writable(sequence, count, holders)
        for sequence, count in rows.items():
            self.pages.write(sequence, sequence.computed, sequence.computed + count)
        for sequence, count in rows.items():
            sequence.computed += count
            self._advance(sequence)

    @precondition(lambda self: any(s.computed for s in self.running))
    @rule(data=st.data(), token=st.integers(0, 1))
    def fork(self, data: st.DataObject, token: int) -> None:
        parent = data.draw(st.sampled_from([s for s in self.running if s.computed]))
        self.names += 1
        child = replace(
            parent,
            request_id=RequestId(f"r{self.names}"),
            tokens=[*parent.tokens[: parent.computed], token],
            tables=[],
            hashes=parent.hashes[: parent.computed // self.plan.base_block_size],
            computed=0,
        )
        room, before = self.cache.pool.available, self.cache.counts()
        copies = self.cache.fork(parent, child)
        # One block of its own per group, to write to.
        assert (copies is None) == (room < len(self.plan.groups))
        if copies is None:
            assert (self.cache.pool.available, self.cache.counts()) == (room, before)
            return
        for group, theirs, ours in zip(self.plan.groups, parent.tables, child.tables, strict=True):
            if isinstance(group.retention, LastState):
                self._took(set(ours.blocks) - set(theirs.blocks))
            else:
                shared = parent.computed // group.block_size
                assert ours.blocks[:shared] == theirs.blocks[:shared]
                assert len(ours.blocks) == shared + 1
                self._took(ours.blocks[shared:])
        for copy in copies:
            self.pages.copy(copy)
        self.passed[child] = [
            min(passed, parent.computed // group.block_size) if group.block_size else 0
            for group, passed in zip(self.plan.groups, self.passed[parent], strict=True)
        ]
        self.running.append(child)

    @precondition(lambda self: self._live())
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self._release(data.draw(st.sampled_from(self._live())))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), computes_last=st.booleans())
    def preempt(self, data: st.DataObject, computes_last: bool) -> None:
        """A preempted sequence comes back with all its tokens."""
        sequence = data.draw(st.sampled_from(self.running))
        self._release(sequence)
        self._admit(sequence, computes_last)

    @rule()
    def clear_cache(self) -> None:
        self.cache.pool.clear_cache()
        self.findable.clear()

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        for sequence in self._live():
            self._release(sequence)
        counts = self.cache.counts()
        assert counts.held == 0
        assert counts.free + counts.cached == counts.total == self.num_blocks
        assert self.cache.pool.available == self.num_blocks, "something is still reserved"

    # What must hold

    @invariant()
    def every_block_is_accounted_for(self) -> None:
        if not hasattr(self, "cache"):
            return
        pool = self.cache.pool
        pool.check()
        holders = self._holders()
        counts = self.cache.counts()
        assert counts.held == len(holders)
        assert counts.cached == len(set(self.findable) - set(holders))
        assert [pool._references[block] for block in range(self.num_blocks)] == [
            holders[BlockId(block)] for block in range(self.num_blocks)
        ]
        promised = sum(table.reserved for sequence in self._live() for table in sequence.tables)
        assert pool.available == self.num_blocks - counts.held - promised >= 0

    @invariant()
    def nobody_lost_what_is_still_needed(self) -> None:
        for sequence in getattr(self, "running", ()):
            self.pages.require(sequence, sequence.computed)
        for sequence in getattr(self, "receiving", ()):
            self.pages.require_held(sequence)

    @invariant()
    def nobody_holds_what_nothing_sees(self) -> None:
        for sequence in getattr(self, "running", ()):
            for group, table in zip(self.plan.groups, sequence.tables, strict=True):
                match group.retention:
                    case LastTokens():
                        useful = {token // group.block_size for token in seen(group, sequence.computed)}
                        for index in range(sequence.computed // group.block_size):
                            assert (table.blocks[index] != NO_BLOCK) == (index in useful)
                        assert len(table.held()) <= group.blocks_held(1000, self.max_chunk)
                    case LastState():
                        assert 1 <= len(table.held()) <= 2

    # The model

    def _new(self, tokens: list[int], salt: str) -> Sequence:
        self.names += 1
        return make_sequence(tokens, salt, f"r{self.names}")

    def _live(self) -> list[Sequence]:
        return [*self.running, *self.receiving]

    def _holders(self) -> Counter[BlockId]:
        return Counter(block for s in self._live() for table in s.tables for block in table.held())

    def _fits(self, tokens: int) -> bool:
        return self.plan.blocks_held(tokens, self.max_chunk) <= self.num_blocks

    def _admit(self, sequence: Sequence, computes_last: bool) -> None:
        reusable = len(sequence.tokens) - computes_last
        tokens = len(sequence.tokens) + computes_last
        prefix = self._longest_prefix(sequence, reusable)
        assert self.cache.cached_prefix(sequence, reusable) == prefix
        pool = self.cache.pool
        before, room, free_for_all = self.cache.counts(), pool.available, not self._live()

        admitted = self.cache.admit(sequence, reusable=reusable, tokens=tokens)

        if self.kinds == ("full",):
            (group,) = self.plan.groups
            hits = prefix // group.block_size
            held = self._holders()
            evictable = len({self._find(sequence, 0, (i + 1) * group.block_size) for i in range(hits)} - set(held))
            needed = -(-tokens // group.block_size)
            # Computing the prefix again needs room for it, but none of its blocks to stay.
            assert admitted == (needed - hits <= room - evictable or needed <= room)
        if not admitted:
            assert (self.cache.counts(), pool.available) == (before, room)
            assert (sequence.tables, sequence.computed) == ([], 0)
            assert not (free_for_all and self._fits(tokens)), "it would wait forever"
            return
        assert sequence.computed in (prefix, 0)
        if room >= 2 * self.plan.blocks_held(tokens, self.max_chunk):
            assert sequence.computed == prefix, "a prefix is computed again although there is room to keep it"
        for group, table in zip(self.plan.groups, sequence.tables, strict=True):
            if isinstance(group.retention, LastState):
                self._took(table.blocks[1:])
            else:
                self._took(table.blocks[sequence.computed // group.block_size :])
            if isinstance(group.retention, EveryToken):
                assert len(table.blocks) == -(-tokens // group.block_size)
        self.passed[sequence] = [0] * len(self.plan.groups)
        self.running.append(sequence)
        self._clear()
        self.pages.require(sequence, sequence.computed)

    def _extend(self, sequence: Sequence, rows: int) -> bool:
        old = [list(table.blocks) for table in sequence.tables]
        before, room = self.cache.counts(), self.cache.pool.available
        missing = unpromised = 0
        for group, table in zip(self.plan.groups, sequence.tables, strict=True):
            if group.block_size:
                lack = max(0, -(-(sequence.computed + rows) // group.block_size) - len(table.blocks))
                missing += lack
                unpromised += max(0, lack - table.reserved)
        extended = self.cache.extend(sequence, rows)
        assert extended == (unpromised <= room)
        new = [table.blocks[len(was) :] for table, was in zip(sequence.tables, old, strict=True)]
        assert [table.blocks[: len(was)] for table, was in zip(sequence.tables, old, strict=True)] == old
        assert sum(map(len, new)) == (missing if extended else 0)
        assert extended or (self.cache.counts(), self.cache.pool.available) == (before, room)
        for blocks in new:
            self._took(blocks)
        return extended

    def _require_writable(self, sequence: Sequence, rows: int, holders: Counter[BlockId]) -> None:
        for group, table in zip(self.plan.groups, sequence.tables, strict=True):
            if isinstance(group.retention, LastState):
                written = {table.blocks[1]}
            else:
                tokens = range(sequence.computed, sequence.computed + rows)
                written = {table.blocks[token // group.block_size] for token in tokens}
            for block in written:
                assert block != NO_BLOCK
                assert holders[block] == 1, "a block that others use is written to"
                assert block not in self.findable, "a block that can be found is written to"

    def _advance(self, sequence: Sequence) -> None:
        room = self.cache.pool.available
        self._publish_tokens(sequence, sequence.computed)
        self.cache.advance(sequence)
        for index, (group, table) in enumerate(zip(self.plan.groups, sequence.tables, strict=True)):
            if not isinstance(group.retention, LastState):
                continue
            source, current = table.blocks
            content = (index, sequence.salt, tuple(sequence.tokens[: sequence.computed]))
            new = content not in self.findable.values()
            if source != current:
                assert new
                assert sequence.computed % self.unit == 0
                self._took([current])
                self.findable[source] = content
            else:
                assert not (new and sequence.computed % self.unit == 0 and room >= len(self.plan.groups))

    def _publish_tokens(self, sequence: Sequence, computed: int) -> None:
        for index, group in enumerate(self.plan.groups):
            passed = self.passed[sequence]
            entries = range(passed[index], computed // group.block_size) if group.block_size else range(0)
            passed[index] = max(passed[index], entries.stop)
            for entry in entries:
                block = sequence.tables[index].blocks[entry]
                if self.pages.complete(sequence, index, entry):
                    content = (index, sequence.salt, tuple(sequence.tokens[: (entry + 1) * group.block_size]))
                    if content not in self.findable.values():
                        self.findable.setdefault(block, content)

    def _took(self, blocks: Iterable[BlockId]) -> None:
        for block in blocks:
            self.findable.pop(block, None)
        self.pages.taken(blocks)

    def _clear(self) -> None:
        self.pages.clear(self.cache.take_to_clear())

    def _release(self, sequence: Sequence) -> None:
        (self.running if sequence in self.running else self.receiving).remove(sequence)
        self.cache.release(sequence)
        assert (sequence.tables, sequence.computed) == ([], 0)

    def _find(self, sequence: Sequence, group: int, tokens: int) -> BlockId | None:
        content = (group, sequence.salt, tuple(sequence.tokens[:tokens]))
        return next((block for block, found in self.findable.items() if found == content), None)

    def _seen_is_found(self, sequence: Sequence, index: int, prefix: int) -> bool:
        """Whether all that the row after a prefix sees of one group can be found."""
        group = self.plan.groups[index]
        if isinstance(group.retention, LastState):
            return self._find(sequence, index, prefix) is not None
        ends = {(token // group.block_size + 1) * group.block_size for token in seen(group, prefix)}
        return all(self._find(sequence, index, end) is not None for end in ends)

    def _longest_prefix(self, sequence: Sequence, reusable: int) -> int:
        return max(
            prefix
            for prefix in range(0, reusable + 1, self.unit)
            if not prefix or all(self._seen_is_found(sequence, i, prefix) for i in range(len(self.plan.groups)))
        )

    def _window_begin(self, group: KVCacheGroup, last: int) -> int:
        """The first token, sinks aside, that the row at position ``last`` sees of the tokens before."""
        sinks = group.retention.sinks if isinstance(group.retention, LastTokens) else 0
        return min((token for token in seen(group, last) if token >= sinks), default=last)

    def _first_lacking(self, sequence: Sequence) -> list[int]:
        """Of every group: the end of what is found from the first token that the last one's step sees. Of a kind, the
        least.
        """
        last = len(sequence.tokens) - 1
        starts = []
        for index, group in enumerate(self.plan.groups):
            if isinstance(group.retention, LastState):
                starts.append(0)
                continue
            begin = self._window_begin(group, last)
            end = begin // group.block_size * group.block_size
            if isinstance(group.retention, LastTokens) and group.retention.sinks:
                starts.append(begin)  # beside sinks, which are always sent, nothing held is used
                continue
            while end + group.block_size <= last and self._find(sequence, index, end + group.block_size) is not None:
                end += group.block_size
            starts.append(max(begin, end))
        kinds = [group.retention for group in self.plan.groups]
        return [min(s for s, other in zip(starts, kinds, strict=True) if other == kind) for kind in kinds]


class _Full(ManagerMachine):
    kinds = ("full",)


class _Window(ManagerMachine):
    kinds = ("window",)


class _FullAndWindow(ManagerMachine):
    kinds = ("full", "window")


class _FullAndSinks(ManagerMachine):
    kinds = ("full", "sinks")


class _FullAndState(ManagerMachine):
    kinds = ("full", "state")


class _FullWindowAndState(ManagerMachine):
    kinds = ("full", "window", "state")


TestFull = _Full.TestCase
TestWindow = _Window.TestCase
TestFullAndWindow = _FullAndWindow.TestCase
TestFullAndSinks = _FullAndSinks.TestCase
TestFullAndState = _FullAndState.TestCase
TestFullWindowAndState = _FullWindowAndState.TestCase
_SETTINGS = settings(max_examples=80, stateful_step_count=30, deadline=None)
TestFull.settings = TestWindow.settings = TestFullAndWindow.settings = _SETTINGS
TestFullAndSinks.settings = TestFullAndState.settings = TestFullWindowAndState.settings = _SETTINGS
