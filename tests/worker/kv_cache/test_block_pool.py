from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from worker.kv_cache.block_pool import BlockCounts, BlockHash, BlockId, BlockPool

HASHES = [BlockHash(bytes([index])) for index in range(6)]


class BlockPoolMachine(RuleBasedStateMachine):
    """The pool against lists and counters. Free blocks may be taken in any order, cached ones oldest first."""

    @initialize(total=st.integers(1, 8))
    def start(self, total: int) -> None:
        self.pool = BlockPool(total)
        self.total = total
        self.holders: Counter[BlockId] = Counter()
        self.content: dict[BlockId, BlockHash] = {}
        self.cached: list[BlockId] = []  # oldest first
        self.promised = 0

    @property
    def free(self) -> set[BlockId]:
        return {BlockId(i) for i in range(self.total)} - set(self.holders) - set(self.cached)

    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(0, len(self.free) + len(self.cached) - self.promised))
        free = self.free
        evicted = self.cached[: max(0, count - len(free))]

        taken = self.pool.take(count)

        assert len(set(taken)) == count
        if evicted:
            assert set(taken) == free | set(evicted)
        else:
            assert set(taken) <= free
        for block in taken:
            self.content.pop(block, None)
            self.holders[block] = 1
        del self.cached[: len(evicted)]

    @rule(data=st.data())
    def reserve(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(0, len(self.free) + len(self.cached) - self.promised))
        self.pool.reserve(count)
        self.promised += count

    @rule(data=st.data())
    def unreserve(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(0, self.promised))
        self.pool.unreserve(count)
        self.promised -= count

    @precondition(lambda self: self.holders or self.cached)
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        # Whoever holds cached blocks has looked whether they are promised.
        room = len(self.free) + len(self.cached) - self.promised
        blocks = data.draw(st.lists(st.sampled_from([*self.holders, *self.cached]), unique=True))
        cached = [block for block in blocks if block in self.cached]
        blocks = [block for block in blocks if block not in cached[room:]]
        self.pool.hold(blocks)
        self.holders.update(blocks)
        self.cached = [block for block in self.cached if block not in blocks]

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), name=st.sampled_from(HASHES))
    def publish(self, data: st.DataObject, name: BlockHash) -> None:
        block = data.draw(st.sampled_from(list(self.holders)))
        self.pool.publish(block, name)
        if name not in self.content.values():
            self.content.setdefault(block, name)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        held = [block for block, count in self.holders.items() for _ in range(count)]
        blocks = data.draw(st.permutations(held).flatmap(lambda p: st.integers(1, len(p)).map(lambda n: p[:n])))
        self.pool.release(blocks)
        for block in blocks:
            self.holders[block] -= 1
            if not self.holders[block]:
                del self.holders[block]
                if block in self.content:
                    self.cached.append(block)

    @rule()
    def clear_cache(self) -> None:
        self.pool.clear_cache()
        self.content.clear()
        self.cached.clear()

    @invariant()
    def everything_agrees(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check()
        free, cached, held = len(self.free), len(self.cached), len(self.holders)
        assert free + cached + held == self.total
        assert self.pool.counts() == BlockCounts(free, cached, held, self.total)
        assert self.pool.available == free + cached - self.promised
        for block in range(self.total):
            assert self.pool.is_evictable(BlockId(block)) == (block not in self.holders)
        by_content = {name: block for block, name in self.content.items()}
        for name in HASHES:
            assert self.pool.find(name) == by_content.get(name)


TestBlockPool = BlockPoolMachine.TestCase
TestBlockPool.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)


def test_misuse_is_noticed_at_once() -> None:
    pool = BlockPool(2)
    (block,) = pool.take(1)
    with pytest.raises(AssertionError, match="2 blocks taken, 1 available"):
        pool.take(2)
    pool.release([block])
    pool.reserve(1)
    with pytest.raises(AssertionError, match="2 blocks taken, 1 available"):
        pool.take(2)
    with pytest.raises(AssertionError, match="2 blocks reserved, 1 available"):
        pool.reserve(2)
    with pytest.raises(AssertionError, match="1 blocks given back that were not reserved"):
        pool.unreserve(2)
    pool = BlockPool(2)
    (block,) = pool.take(1)
    pool.release([block])
    with pytest.raises(AssertionError, match="published by nobody"):
        pool.publish(block, HASHES[0])
    with pytest.raises(AssertionError, match="released twice"):
        pool.release([block])


def test_more_promises_than_blocks_are_found_by_the_check() -> None:
    pool = BlockPool(3)
    (block,) = pool.take(1)
    pool.publish(block, HASHES[0])
    pool.release([block])
    pool.reserve(3)
    pool.check()
    pool.hold([block])  # without a look at what is available
    with pytest.raises(AssertionError, match="3 reserved of 2"):
        pool.check()


def test_a_lost_block_is_found_by_the_check() -> None:
    pool = BlockPool(3)
    pool.take(2)
    pool._references[0] = 0  # as if somebody had forgotten to give it back
    with pytest.raises(AssertionError):
        pool.check()
