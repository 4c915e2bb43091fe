import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.pages import PageShape, gather_tokens, scatter_tokens, write_slots

SENTINEL = -7.0e4

shapes = st.builds(
    PageShape, kv_heads=st.integers(1, 4), block_size=st.integers(1, 7), head_dim=st.sampled_from([2, 6])
)


def block_table(seed: int, num_blocks: int) -> np.ndarray:
    """All blocks of a cache, in random order."""
    return np.random.default_rng(seed).permutation(num_blocks).astype(np.int64)


def new_cache(shape: PageShape, num_blocks: int) -> torch.Tensor:
    return torch.full(shape.cache_shape(num_blocks), SENTINEL)


def values(layers: int, shape: PageShape, tokens: int) -> torch.Tensor:
    """Different numbers everywhere, ``[layers, 2, kv_heads, tokens, head_dim]``."""
    size = (layers, 2, shape.kv_heads, tokens, shape.head_dim)
    return torch.arange(layers * 2 * shape.kv_heads * tokens * shape.head_dim, dtype=torch.float32).reshape(size)


@st.composite
def token_ranges(draw: st.DrawFn) -> tuple[int, int]:
    begin = draw(st.integers(0, 20))
    return begin, draw(st.integers(begin + 1, 30))


@given(shape=shapes, tokens=token_ranges(), seed=st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_slot_rows_are_the_rows_that_indexing_by_hand_finds(
    shape: PageShape, tokens: tuple[int, int], seed: int
) -> None:
    begin, end = tokens
    blocks = block_table(seed, -(-end // shape.block_size) + 2)
    # Every head vector of the cache holds its own row number.
    count = len(blocks) * 2 * shape.kv_heads * shape.block_size
    numbered = torch.arange(count).reshape(shape.cache_shape(len(blocks))[:-1])

    rows = shape.slot_rows(blocks, begin, end)

    assert rows.dtype == np.int64
    assert rows.shape == (end - begin, 2, shape.kv_heads)
    for token in range(begin, end):
        for part in range(2):
            for head in range(shape.kv_heads):
                where = numbered[blocks[token // shape.block_size], part, head, token % shape.block_size]
                assert rows[token - begin, part, head] == where


@given(shape=shapes, sequences=st.integers(1, 3), each=st.integers(1, 4), seed=st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_run_rows_are_whole_blocks_head_by_head(shape: PageShape, sequences: int, each: int, seed: int) -> None:
    num_blocks = sequences * each + 1
    table = block_table(seed, num_blocks)[: sequences * each].reshape(sequences, each)
    numbered = torch.arange(num_blocks * 2 * shape.kv_heads).reshape(num_blocks, 2, shape.kv_heads)

    runs = shape.run_rows(table)

    assert runs.shape == (2, sequences, shape.kv_heads, each)
    for part, sequence, head, place in np.ndindex(*runs.shape):
        assert runs[part, sequence, head, place] == numbered[table[sequence, place], part, head]


@given(
    kv_heads=st.integers(1, 3),
    sender_block=st.integers(1, 9),
    receiver_block=st.integers(1, 9),
    layers=st.integers(1, 3),
    tokens=token_ranges(),
    seed=st.integers(0, 99),
)
@settings(max_examples=80, deadline=None)
def test_tokens_survive_the_way_between_caches_of_different_block_sizes(
    kv_heads: int, sender_block: int, receiver_block: int, layers: int, tokens: tuple[int, int], seed: int
) -> None:
    begin, end = tokens
    sender, receiver = PageShape(kv_heads, sender_block, 4), PageShape(kv_heads, receiver_block, 4)
    # A table may end with the last token's block or hold blocks for tokens to come.
    sender_table = block_table(seed, -(-end // sender_block) + seed % 2)
    receiver_table = block_table(seed + 1, -(-end // receiver_block) + seed // 2 % 2)
    written = values(layers, sender, end)
    sent_from = [new_cache(sender, len(sender_table)) for _ in range(layers)]
    for layer, cache in enumerate(sent_from):
        for token in range(end):
            cache[sender_table[token // sender_block], :, :, token % sender_block] = written[layer, :, :, token]
    received_in = [new_cache(receiver, len(receiver_table)) for _ in range(layers)]

    payload = gather_tokens(sent_from, sender, sender_table, begin, end)
    scatter_tokens(received_in, receiver, receiver_table, begin, end, payload)

    assert payload.is_contiguous()
    torch.testing.assert_close(payload, written[:, :, :, begin:end], rtol=0, atol=0)
    for layer, cache in enumerate(received_in):
        expected = new_cache(receiver, len(receiver_table))
        for token in range(begin, end):
            block, offset = receiver_table[token // receiver_block], token % receiver_block
            expected[block, :, :, offset] = written[layer, :, :, token]
        # Slots outside the range keep what they held.
        torch.testing.assert_close(cache, expected, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_write_slots_fills_exactly_the_named_slots(dtype: torch.dtype) -> None:
    shape = PageShape(kv_heads=2, block_size=3, head_dim=4)
    blocks = np.array([4, 0, 2], dtype=np.int64)
    cache = new_cache(shape, 5).to(dtype)
    # Rows as a model computes them: part of a wider fused projection, hence not contiguous.
    fused = torch.randn(5, 2 * 2 * 4 + 3, generator=torch.Generator().manual_seed(0)).to(dtype)
    key_value = fused[:, 3:].view(5, 2, 2, 4)

    write_slots(cache, torch.from_numpy(shape.slot_rows(blocks, 2, 7).reshape(-1)), key_value)

    expected = new_cache(shape, 5).to(dtype)
    for row, token in enumerate(range(2, 7)):
        expected[blocks[token // 3], :, :, token % 3] = key_value[row]
    torch.testing.assert_close(cache, expected, rtol=0, atol=0)


def test_a_payload_of_the_wrong_shape_changes_nothing() -> None:
    shape = PageShape(kv_heads=2, block_size=4, head_dim=2)
    cache = new_cache(shape, 2)
    with pytest.raises(ValueError, match=r"payload has shape .*tokens \[1, 5\)"):
        scatter_tokens([cache], shape, np.array([1, 0]), 1, 5, values(1, shape, 3))
    assert (cache == SENTINEL).all()
