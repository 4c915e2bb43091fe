import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.worker.kv_cache.plans import full, owners, state, window
from tests.worker.kv_cache.sequences import compute, make_sequence
from worker.kv_cache.block_table import NO_BLOCK
from worker.kv_cache.group_blocks import BlockCopy
from worker.kv_cache.groups import plan_cache
from worker.kv_cache.manager import KVCacheManager
from worker.kv_cache.prefix_hash import chain
from worker.kv_cache.specs import KVCacheSpec
from worker.sequence import Sequence


def manager(
    num_blocks: int,
    *specs: KVCacheSpec,
    block_size: int,
    caching: bool = True,
    chunk: int = 64,
    checkpoint_blocks: int = 1,
) -> KVCacheManager:
    return KVCacheManager(
        plan_cache(owners(*specs), block_size),
        num_blocks,
        prefix_caching=caching,
        max_chunk=chunk,
        checkpoint_blocks=checkpoint_blocks,
    )


def admit(cache: KVCacheManager, sequence: Sequence) -> bool:
    """As an engine does that samples: the last token is always computed, and there is room for one more."""
    return cache.admit(sequence, reusable=len(sequence.tokens) - 1, tokens=len(sequence.tokens) + 1)


# Prefixes


def held_after(tokens: list[int], other: list[int], *, salts: tuple[str, str] = ("", ""), caching: bool = True) -> int:
    """How much of ``other`` is found in a cache of blocks of 4 in which ``tokens`` were computed."""
    cache = manager(32, full(4), block_size=4, caching=caching)
    first, second = make_sequence(tokens, salts[0]), make_sequence(other, salts[1])
    assert admit(cache, first)
    compute(cache, first, len(tokens))
    cache.release(first)
    assert admit(cache, second)
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
    cache = manager(4, full(2), block_size=2)
    first = make_sequence([1, 2, 3, 4, 5, 6])
    assert admit(cache, first)
    compute(cache, first, 6)
    cache.release(first)
    other = make_sequence([7, 7])
    assert admit(cache, other)  # takes the free block and evicts one
    again = make_sequence([1, 2, 3, 4, 5, 6, 0])
    assert not admit(cache, again)
    cache.release(other)
    assert admit(cache, again)
    assert again.computed == 4


@given(tokens=st.lists(st.integers(0, 2**32 - 1), max_size=40), block_size=st.integers(1, 8), salt=st.text(max_size=3))
def test_chain_names_full_blocks_as_sequences_do(tokens: list[int], block_size: int, salt: str) -> None:
    names = list(chain(tokens, block_size, salt))
    assert len(names) == len(tokens) // block_size
    assert len(set(names)) == len(names)
    # A router that hashes a prompt finds what an engine published for it.
    cache = manager(64, full(block_size), block_size=block_size)
    sequence = make_sequence([*tokens, 0], salt)
    assert admit(cache, sequence)
    compute(cache, sequence, len(tokens))
    (table,) = sequence.tables
    assert [cache.pool.find(name) for name in names] == table.blocks[: len(names)]


# Windows


def test_a_windows_blocks_are_given_back_after_a_step_and_not_before() -> None:
    """A layer that shares the cache sees in the same chunk what the next chunk no longer does."""
    cache = manager(32, window(2, 4), block_size=2, chunk=6)
    sequence = make_sequence(list(range(20)))
    assert admit(cache, sequence)
    (table,) = sequence.tables
    compute(cache, sequence, 6)
    # The row at 6 sees 3, 4, 5 and itself.
    assert [block == NO_BLOCK for block in table.blocks] == [True, False, False]
    assert cache.extend(sequence, 6)
    # Room for 6 to 11, and still everything that the first of them sees.
    assert [block == NO_BLOCK for block in table.blocks] == [True, False, False, False, False, False]
    assert cache.counts().held == 5
    sequence.computed += 6
    cache.advance(sequence)
    assert [block == NO_BLOCK for block in table.blocks] == [True] * 4 + [False] * 2
    assert cache.counts().held == 2


def test_what_a_window_gives_back_stays_promised_until_its_prompt_is_computed() -> None:
    cache = manager(5, window(2, 4), block_size=2, chunk=4)
    sequence = make_sequence([0] * 20)
    assert admit(cache, sequence)
    # The window, a chunk, and wherever they begin in a block.
    assert cache.pool.available == 1
    while sequence.pending:
        compute(cache, sequence, min(4, sequence.pending))
        assert cache.pool.available >= 1
        cache.pool.check()
    cache.release(sequence)
    assert cache.pool.available == 5


def test_a_prefix_is_usable_as_soon_as_what_its_next_token_sees_is_there() -> None:
    cache = manager(8, window(2, 4), block_size=2)
    first = make_sequence(list(range(13)))
    assert admit(cache, first)
    compute(cache, first, 13)
    cache.release(first)
    # Other sequences take blocks; the window's last ones are evicted first, its oldest after them.
    again = make_sequence(list(range(13)))
    assert admit(cache, again)
    assert again.computed == 12
    (table,) = again.tables
    assert [block == NO_BLOCK for block in table.blocks] == [True] * 4 + [False] * 2
    cache.release(again)
    # Of a prefix of 8, a row sees 5, 6 and 7.
    shorter = make_sequence([*range(8), 99])
    assert admit(cache, shorter)
    assert shorter.computed == 8


def test_sinks_are_kept_and_needed() -> None:
    cache = manager(16, window(2, 2, sinks=3), block_size=2)
    sequence = make_sequence(list(range(13)))
    assert admit(cache, sequence)
    compute(cache, sequence, 13)
    (table,) = sequence.tables
    # Tokens 0 to 2, and 12 of the window.
    assert [block == NO_BLOCK for block in table.blocks] == [False, False, True, True, True, True, False]
    cache.release(sequence)
    again = make_sequence([*range(12), 99])
    assert admit(cache, again)
    assert again.computed == 12


def test_what_a_received_window_leaves_empty_is_not_found() -> None:
    cache = manager(16, full(4), window(4, 3), block_size=4)
    sequence = make_sequence(list(range(10)))
    assert cache.admit_received(sequence, tokens=11)
    whole, sliding = sequence.tables
    # Of the tokens before the last, at 9, it sees 7 and 8; the block of 4 to 7 lacks three.
    assert (whole.lacking_from, sliding.lacking_from) == (0, 7)
    assert [block == NO_BLOCK for block in sliding.blocks] == [True, False, False]
    cache.received(sequence)
    compute(cache, sequence, 1)
    cache.release(sequence)
    assert cache.counts().cached == 2  # the first two blocks of full attention
    again = make_sequence([*range(8), 99])
    assert admit(cache, again)
    assert again.computed == 0


# States


@pytest.mark.parametrize(("checkpoint_blocks", "cached"), [(1, 12), (2, 8), (4, 0)])
def test_a_state_is_reused_where_a_checkpoint_was_kept(checkpoint_blocks: int, cached: int) -> None:
    cache = manager(32, full(4), state(1), block_size=4, checkpoint_blocks=checkpoint_blocks)
    for expected in (0, cached):
        sequence = make_sequence(list(range(15)))
        assert admit(cache, sequence)
        assert sequence.computed == expected
        while sequence.pending:
            compute(cache, sequence, cache.chunk(sequence, sequence.pending))
        cache.release(sequence)


def test_a_checkpoint_is_read_and_never_written_again() -> None:
    cache = manager(8, state(1), block_size=2)
    first = make_sequence([1, 2, 3])
    assert admit(cache, first)
    compute(cache, first, 2)
    (table,) = first.tables
    checkpoint, own = table.blocks
    assert checkpoint != own
    assert cache.pool.find(next(iter(chain([1, 2], 2, "")))) == checkpoint
    compute(cache, first, 1)
    assert table.blocks == [own, own]
    second = make_sequence([1, 2, 4])
    assert admit(cache, second)
    assert second.computed == 2
    assert second.tables[0].blocks[0] == checkpoint
    assert second.tables[0].blocks[1] not in (checkpoint, own)


def test_without_room_for_a_checkpoint_a_state_goes_on_in_place() -> None:
    cache = manager(1, state(1), block_size=2)
    sequence = make_sequence([1, 2, 3, 4])
    assert admit(cache, sequence)
    compute(cache, sequence, 2)
    compute(cache, sequence, 2)
    assert cache.counts().held == 1
    cache.release(sequence)
    assert cache.counts().cached == 0


def test_a_prefix_that_does_not_fit_beside_the_state_is_computed_again() -> None:
    cache = manager(5, full(2), state(1), block_size=2)
    sequence = make_sequence([1, 2, 3, 4])
    assert admit(cache, sequence)
    compute(cache, sequence, 2)
    compute(cache, sequence, 2)
    sequence.tokens.append(5)
    cache.release(sequence)
    assert cache.cached_prefix(sequence, 4) == 4
    # Three blocks of tokens, the checkpoint and a state to go on in are more than are left; without a checkpoint not.
    (elsewhere,) = cache.pool.take(1)
    assert admit(cache, sequence)
    assert sequence.computed == 0
    cache.release(sequence)
    cache.pool.release([elsewhere])
    assert admit(cache, sequence)


def test_blocks_of_tokens_are_cleared_of_what_was_a_state() -> None:
    cache = manager(8, full(2), state(1), block_size=2, checkpoint_blocks=8)
    parent = make_sequence([1, 2])
    assert admit(cache, parent)
    tokens, states = parent.tables
    assert sorted(cache.take_to_clear()) == sorted(tokens.blocks)
    assert cache.take_to_clear() == ()
    compute(cache, parent, 2)
    child = make_sequence([1, 2, 7])
    # Room for a block of tokens, which is new, and for a copy of the state, which must not be cleared.
    copies = cache.fork(parent, child)
    assert copies == [BlockCopy(states.blocks[1], child.tables[1].blocks[0])]
    assert cache.take_to_clear() == (child.tables[0].blocks[1],)
    compute(cache, child, 1)
    other = make_sequence([1, 2, 7])
    copies = cache.fork(child, other)
    assert copies is not None
    assert len(copies) == 2
    assert cache.take_to_clear() == (), "what is copied to is not cleared afterwards"


def test_nothing_is_cleared_where_all_layers_store_numbers_of_tokens() -> None:
    cache = manager(8, full(2), window(2, 4), block_size=2)
    assert admit(cache, make_sequence([1, 2, 3]))
    assert cache.take_to_clear() == ()


# Choices of one prompt


def test_choices_share_full_blocks_and_copy_the_rest() -> None:
    cache = manager(32, full(2), window(2, 2), state(1), block_size=2, checkpoint_blocks=8)
    parent = make_sequence([1, 2, 3, 4, 5])
    assert admit(cache, parent)
    compute(cache, parent, 5)
    child = make_sequence([1, 2, 3, 4, 5, 6])
    copies = cache.fork(parent, child)
    whole, sliding, states = parent.tables
    assert copies == [
        BlockCopy(whole.blocks[2], child.tables[0].blocks[2]),
        BlockCopy(sliding.blocks[2], child.tables[1].blocks[2]),
        BlockCopy(states.blocks[0], child.tables[2].blocks[0]),
    ]
    assert child.tables[0].blocks[:2] == whole.blocks[:2]
    assert child.tables[1].blocks[:2] == sliding.blocks[:2] == [NO_BLOCK, sliding.blocks[1]]
    assert child.computed == 5
