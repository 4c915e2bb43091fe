from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.worker.shadow_pages import ShadowPages
from worker.kv_cache.block_pool import BlockId
from worker.kv_cache.manager import BlockCopy, KVCacheManager
from worker.kv_cache.prefix_hash import chain
from worker.sampling_params import SamplingParams
from worker.sequence import RequestId, Sequence

Content = tuple[str, tuple[int, ...]]


def make_sequence(tokens: list[int], salt: str = "", name: str = "r") -> Sequence:
    return Sequence(
        request_id=RequestId(name),
        choice=0,
        tokens=list(tokens),
        prompt_len=len(tokens),
        sampling=SamplingParams(),
        salt=salt,
        arrival=0.0,
        deadline=1e9,
    )


def compute(cache: KVCacheManager, sequence: Sequence, tokens: int) -> None:
    sequence.computed += tokens
    cache.publish(sequence)


class ManagerMachine(RuleBasedStateMachine):
    """Sequences come, are computed in chunks, grow, fork and go, in a pool that is too small for all of them.

    ``findable`` is the model of the prefix cache: full contents, not hashes.
    """

    @initialize(num_blocks=st.integers(2, 9), block_size=st.integers(1, 3))
    def start(self, num_blocks: int, block_size: int) -> None:
        self.cache = KVCacheManager(num_blocks, block_size, prefix_caching=True)
        self.pages = ShadowPages(block_size)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.live: list[Sequence] = []
        self.findable: dict[BlockId, Content] = {}
        self.names = 0

    # What happens

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=10),
        salt=st.sampled_from(["", "", "tenant"]),
        computes_last=st.booleans(),
    )
    def admit(self, tokens: list[int], salt: str, computes_last: bool) -> None:
        self.names += 1
        sequence = make_sequence(tokens, salt, f"r{self.names}")
        reusable = len(tokens) - computes_last
        reserve = len(tokens) + computes_last
        prefix = self._longest_prefix(sequence, reusable)
        needed = -(-reserve // self.block_size) - len(prefix)
        held = self._held()
        available = self.num_blocks - len(held) - len(set(prefix) - held)
        before = self.cache.counts()

        admitted = self.cache.admit(sequence, reusable=reusable, reserve=reserve)

        assert admitted == (needed <= available)
        if not admitted:
            assert self.cache.counts() == before
            assert (sequence.blocks, sequence.computed, sequence.published) == ([], 0, 0)
            return
        assert sequence.blocks[: len(prefix)] == prefix
        assert sequence.computed == len(prefix) * self.block_size <= reusable
        assert len(sequence.blocks) == -(-reserve // self.block_size)
        self._took(sequence.blocks[len(prefix) :])
        self.live.append(sequence)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def compute(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.live))
        room = len(sequence.blocks) * self.block_size
        rows = data.draw(st.integers(0, min(sequence.pending, room - sequence.computed)))
        self.pages.write(sequence, sequence.computed, sequence.computed + rows)
        compute(self.cache, sequence, rows)
        contents = set(self.findable.values())
        for index in range(sequence.computed // self.block_size):
            content = sequence.salt, tuple(sequence.tokens[: (index + 1) * self.block_size])
            if content not in contents:
                self.findable[sequence.blocks[index]] = content

    @precondition(lambda self: self.live)
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=4))
    def grow(self, data: st.DataObject, tokens: list[int]) -> None:
        sequence = data.draw(st.sampled_from(self.live))
        needed = max(0, -(-(len(sequence.tokens) + len(tokens)) // self.block_size) - len(sequence.blocks))
        room = self.num_blocks - len(self._held())
        old, before = list(sequence.blocks), self.cache.counts()
        sequence.tokens += tokens
        grown = self.cache.grow(sequence)
        assert grown == (needed <= room)
        if grown:
            assert sequence.blocks[: len(old)] == old
            assert len(sequence.blocks) == len(old) + needed
            self._took(sequence.blocks[len(old) :])
        else:
            assert (sequence.blocks, self.cache.counts()) == (old, before)
            del sequence.tokens[-len(tokens) :]

    @precondition(lambda self: any(s.computed for s in self.live))
    @rule(data=st.data(), token=st.integers(0, 1))
    def fork(self, data: st.DataObject, token: int) -> None:
        parent = data.draw(st.sampled_from([s for s in self.live if s.computed]))
        shared = parent.computed // self.block_size
        self.names += 1
        child = replace(
            parent,
            request_id=RequestId(f"r{self.names}"),
            tokens=[*parent.tokens[: parent.computed], token],
            blocks=[],
            hashes=parent.hashes[:shared],
            computed=0,
            published=0,
        )
        room, before = self.num_blocks - len(self._held()), self.cache.counts()
        copy = self.cache.fork(parent, child)
        if copy is None:
            assert room == 0
            assert self.cache.counts() == before
            return
        assert child.blocks[:shared] == parent.blocks[:shared]
        assert len(child.blocks) == shared + 1
        self._took(child.blocks[shared:])
        if parent.computed % self.block_size:
            assert copy == BlockCopy(parent.blocks[shared], child.blocks[shared])
        self.pages.copy(copy)
        self.live.append(child)
        self.pages.require(child, child.computed)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.live))
        self.live.remove(sequence)
        self.cache.release(sequence)
        assert (sequence.blocks, sequence.computed, sequence.published) == ([], 0, 0)

    # What must hold

    @invariant()
    def every_block_is_accounted_for(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.cache.pool.check()
        holders = Counter(block for sequence in self.live for block in sequence.blocks)
        counts = self.cache.counts()
        assert counts.held == len(holders)
        assert counts.cached == len(set(self.findable) - set(holders))
        assert [self.cache.pool._references[block] for block in range(self.num_blocks)] == [
            holders[BlockId(block)] for block in range(self.num_blocks)
        ]

    @invariant()
    def nobody_lost_what_was_computed(self) -> None:
        for sequence in getattr(self, "live", ()):
            self.pages.require(sequence, sequence.computed)

    def _held(self) -> set[BlockId]:
        return {block for sequence in self.live for block in sequence.blocks}

    def _took(self, blocks: list[BlockId]) -> None:
        for block in blocks:
            self.findable.pop(block, None)

    def _longest_prefix(self, sequence: Sequence, reusable: int) -> list[BlockId]:
        by_content = {content: block for block, content in self.findable.items()}
        prefix: list[BlockId] = []
        while (end := (len(prefix) + 1) * self.block_size) <= reusable:
            block = by_content.get((sequence.salt, tuple(sequence.tokens[:end])))
            if block is None:
                break
            prefix.append(block)
        return prefix


TestManager = ManagerMachine.TestCase
TestManager.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


def held_after(tokens: list[int], other: list[int], *, salts: tuple[str, str] = ("", ""), caching: bool = True) -> int:
    """How much of ``other`` is found in a cache of blocks of 4 in which ``tokens`` were computed."""
    cache = KVCacheManager(32, 4, prefix_caching=caching)
    first, second = make_sequence(tokens, salts[0]), make_sequence(other, salts[1])
    assert cache.admit(first, reusable=len(tokens) - 1, reserve=len(tokens) + 1)
    compute(cache, first, len(tokens))
    cache.release(first)
    assert cache.admit(second, reusable=len(other) - 1, reserve=len(other) + 1)
    return second.computed


@pytest.mark.parametrize(
    ("length", "held"),
    [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8), (13, 12)],
)
def test_a_hit_ends_before_the_last_token(length: int, held: int) -> None:
    tokens = list(range(length))
    assert held_after(tokens, tokens) == held


@given(
    tokens=st.lists(st.integers(0, 1), min_size=1, max_size=20),
    other=st.lists(st.integers(0, 1), min_size=1, max_size=20),
)
@settings(deadline=None)
def test_only_equal_full_blocks_from_the_start_are_found(tokens: list[int], other: list[int]) -> None:
    common = next(
        (i for i, (a, b) in enumerate(zip(tokens, other, strict=False)) if a != b), min(len(tokens), len(other))
    )
    assert held_after(tokens, other) == min(common, len(other) - 1) // 4 * 4


def test_equal_tokens_after_another_beginning_are_another_prefix() -> None:
    assert held_after([9, 1, 2, 3, 4, 5, 6, 7, 8], [0, 1, 2, 3, 4, 5, 6, 7, 8]) == 0


def test_salts_and_a_switched_off_cache_find_nothing() -> None:
    tokens = list(range(9))
    assert held_after(tokens, tokens, salts=("a", "a")) == 8
    assert held_after(tokens, tokens, salts=("a", "b")) == 0
    assert held_after(tokens, tokens, salts=("", "b")) == 0
    assert held_after(tokens, tokens, caching=False) == 0


def test_the_end_of_a_chain_is_evicted_before_its_beginning() -> None:
    cache = KVCacheManager(4, 2, prefix_caching=True)
    first = make_sequence([1, 2, 3, 4, 5, 6])
    assert cache.admit(first, reusable=5, reserve=7)
    compute(cache, first, 6)
    cache.release(first)
    other = make_sequence([7, 7])
    assert cache.admit(other, reusable=1, reserve=3)  # takes the free block and evicts one
    again = make_sequence([1, 2, 3, 4, 5, 6, 0])
    assert not cache.admit(again, reusable=6, reserve=8)
    cache.release(other)
    assert cache.admit(again, reusable=6, reserve=8)
    assert again.computed == 4


@given(tokens=st.lists(st.integers(0, 2**32 - 1), max_size=40), block_size=st.integers(1, 8), salt=st.text(max_size=3))
@settings(deadline=None)
def test_chain_names_full_blocks_as_sequences_do(tokens: list[int], block_size: int, salt: str) -> None:
    names = list(chain(tokens, block_size, salt))
    assert len(names) == len(tokens) // block_size
    assert len(set(names)) == len(names)
    # A router that hashes a prompt finds what an engine published for it.
    cache = KVCacheManager(64, block_size, prefix_caching=True)
    sequence = make_sequence([*tokens, 0], salt)
    assert cache.admit(sequence, reusable=len(tokens), reserve=len(tokens) + 1)
    compute(cache, sequence, len(tokens))
    assert [cache.pool.find(name) for name in names] == sequence.blocks[: len(names)]
