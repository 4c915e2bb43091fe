import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.pages import PageShape, Slots, gather_tokens, locate, scatter_tokens, write_slots

CPU = torch.device("cpu")
SENTINEL = -7.0e4


def block_table(seed: int, num_blocks: int) -> np.ndarray:
    """All blocks of a cache, in random order."""
    return np.random.default_rng(seed).permutation(num_blocks).astype(np.int64)


@st.composite
def shapes(draw: st.DrawFn, block_size: st.SearchStrategy[int] = st.integers(1, 7)) -> PageShape:
    """Pages that may lie further apart than they are large, as in a buffer that others use too."""
    parts, kv_heads = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    size, head_dim = draw(block_size), draw(st.sampled_from([2, 4, 6, 8]))
    page = parts * kv_heads * size * head_dim
    return PageShape(parts, kv_heads, size, head_dim, page + draw(st.sampled_from([0, 0, 1, head_dim, 5 * head_dim])))


def new_cache(shape: PageShape, num_blocks: int, before: int = 0) -> torch.Tensor:
    """A view of memory full of sentinels, ``before`` elements into every page."""
    memory = torch.full((num_blocks * shape.stride + before,), SENTINEL)
    return view_of(memory, shape, num_blocks, before)


def view_of(memory: torch.Tensor, shape: PageShape, num_blocks: int, before: int) -> torch.Tensor:
    run = shape.block_size * shape.head_dim
    return memory.as_strided(
        (num_blocks, shape.parts, shape.kv_heads, shape.block_size, shape.head_dim),
        (shape.stride, shape.kv_heads * run, run, shape.head_dim, 1),
        before,
    )


def memory_of(cache: torch.Tensor) -> torch.Tensor:
    """Everything that lies under a view, gaps included."""
    storage = cache.untyped_storage()
    return torch.empty(0, dtype=cache.dtype).set_(storage)


def values(shape: PageShape, tokens: int, first: int = 0) -> torch.Tensor:
    """Different numbers everywhere, ``[parts, kv_heads, tokens, head_dim]``."""
    size = (shape.parts, shape.kv_heads, tokens, shape.head_dim)
    return torch.arange(first, first + np.prod(size), dtype=torch.float32).reshape(size)


def shifted(content: torch.Tensor, shift: int) -> torch.Tensor:
    """A copy that begins at any byte of its memory, as what has come in a message does."""
    memory = bytearray(shift) + content.numpy().tobytes()
    return torch.frombuffer(memoryview(memory)[shift:], dtype=content.dtype).view(content.shape)


@st.composite
def token_ranges(draw: st.DrawFn) -> tuple[int, int]:
    begin = draw(st.integers(0, 20))
    return begin, draw(st.integers(begin + 1, 30))


@given(shape=shapes(), before=st.integers(0, 3))
def test_a_views_shape_is_read_from_the_view(shape: PageShape, before: int) -> None:
    assert PageShape.of(new_cache(shape, 3, before)) == shape


@given(block_size=st.integers(1, 7), tokens=token_ranges(), seed=st.integers(0, 99))
def test_tokens_are_located_as_by_hand(block_size: int, tokens: tuple[int, int], seed: int) -> None:
    begin, end = tokens
    table = block_table(seed, -(-end // block_size) + 2)
    blocks, offsets = locate(table, begin, end, block_size)
    slots = Slots.of_range(table, begin, end, block_size, CPU)
    assert blocks.dtype == offsets.dtype == np.int64
    assert slots.blocks.tolist() == blocks.tolist() == [table[token // block_size] for token in range(begin, end)]
    assert slots.offsets.tolist() == offsets.tolist() == [token % block_size for token in range(begin, end)]


@st.composite
def head_ranges(draw: st.DrawFn, kv_heads: int) -> slice:
    begin = draw(st.integers(0, kv_heads - 1))
    return slice(begin, draw(st.integers(begin + 1, kv_heads)))


@given(shape=shapes(), sequences=st.integers(1, 3), each=st.integers(1, 4), seed=st.integers(0, 99))
@settings(max_examples=60)
def test_runs_are_whole_blocks_head_by_head(shape: PageShape, sequences: int, each: int, seed: int) -> None:
    num_blocks = sequences * each + 1
    table = block_table(seed, num_blocks)[: sequences * each].reshape(sequences, each)
    cache = view_of(torch.arange(num_blocks * shape.stride + 3.0), shape, num_blocks, before=seed % 3)

    starts = shape.run_starts(table)
    runs = shape.runs(cache)

    assert starts.shape == (shape.parts, sequences, shape.kv_heads, each)
    assert runs.data_ptr() == cache.data_ptr(), "nothing is copied"
    for part, sequence, head, place in np.ndindex(*starts.shape):
        expected = cache[table[sequence, place], part, head].flatten()
        assert runs[starts[part, sequence, head, place]].tolist() == expected.tolist()


@given(
    sender=shapes(st.integers(1, 9)),
    receiver_block=st.integers(1, 9),
    receiver_heads=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    gap=st.sampled_from([0, 1, 6]),
    layers=st.integers(1, 3),
    tokens=token_ranges(),
    shift=st.sampled_from([0, 0, 1, 8]),
    lead=st.sampled_from([2, 4]),
    seed=st.integers(0, 99),
    data=st.data(),
)
@settings(max_examples=150)
def test_tokens_of_some_heads_survive_the_way_between_caches_of_different_shapes(
    sender: PageShape,
    receiver_block: int,
    receiver_heads: tuple[int, int],
    gap: int,
    layers: int,
    tokens: tuple[int, int],
    shift: int,
    lead: int,
    seed: int,
    data: st.DataObject,
) -> None:
    """``receiver_heads`` are how many the receiver has before and after those that it is sent."""
    begin, end = tokens
    taken = data.draw(head_ranges(sender.kv_heads))
    count, (before, after) = taken.stop - taken.start, receiver_heads
    given_to = slice(before, before + count)
    page = sender.parts * (before + count + after) * receiver_block * sender.head_dim
    receiver = PageShape(sender.parts, before + count + after, receiver_block, sender.head_dim, page + gap)
    # A table may end with the last token's block or hold blocks for tokens to come.
    sender_table = block_table(seed, -(-end // sender.block_size) + seed % 2)
    receiver_table = block_table(seed + 1, -(-end // receiver_block) + seed // 2 % 2)
    written = [values(sender, end, first=10_000 * layer) for layer in range(layers)]
    sent_from = [new_cache(sender, len(sender_table)) for _ in range(layers)]
    for cache, content in zip(sent_from, written, strict=True):
        for token in range(end):
            cache[sender_table[token // sender.block_size], :, :, token % sender.block_size] = content[:, :, token]
    received_in = [new_cache(receiver, len(receiver_table), lead) for _ in range(layers)]
    # Blocks that hold nothing of the range may have been given back.
    sender_table[: begin // sender.block_size] = -1
    receiver_table[: begin // receiver_block] = -1

    payload = [torch.empty(sender.parts, count, end - begin, sender.head_dim) for _ in range(layers)]
    gather_tokens(sent_from, sender_table, begin, end, payload, taken)
    arrived = [shifted(part, shift) for part in payload]
    scatter_tokens(received_in, receiver_table, begin, end, arrived, given_to)

    for part, content in zip(payload, written, strict=True):
        torch.testing.assert_close(part, content[:, taken, begin:end], rtol=0, atol=0)
    for cache, content in zip(received_in, written, strict=True):
        expected = new_cache(receiver, len(receiver_table), lead)
        for token in range(begin, end):
            block, offset = receiver_table[token // receiver_block], token % receiver_block
            expected[block, :, given_to, offset] = content[:, taken, token]
        # Other slots and heads, and what lies between pages, keep what they held.
        torch.testing.assert_close(memory_of(cache), memory_of(expected), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_write_slots_fills_exactly_the_named_slots(dtype: torch.dtype) -> None:
    shape = PageShape(parts=2, kv_heads=2, block_size=3, head_dim=4, stride=2 * 2 * 3 * 4 + 5)
    blocks = np.array([4, 0, 2], dtype=np.int64)
    memory = torch.full((5 * shape.stride,), SENTINEL, dtype=dtype)
    cache = view_of(memory, shape, 5, 0)
    # Rows as a model computes them: part of a wider fused projection, hence not contiguous.
    fused = torch.randn(5, 2 * 2 * 4 + 3, generator=torch.Generator().manual_seed(0)).to(dtype)
    key_value = fused[:, 3:].view(5, 2, 2, 4)

    write_slots(cache, Slots.of_range(blocks, 2, 7, shape.block_size, CPU), key_value)

    whole = torch.full((5 * shape.stride,), SENTINEL, dtype=dtype)
    expected = view_of(whole, shape, 5, 0)
    for row, token in enumerate(range(2, 7)):
        expected[blocks[token // 3], :, :, token % 3] = key_value[row]
    torch.testing.assert_close(memory, whole, rtol=0, atol=0)


def test_a_payload_of_the_wrong_shape_changes_nothing() -> None:
    shape = PageShape(parts=2, kv_heads=2, block_size=4, head_dim=2, stride=32)
    cache = new_cache(shape, 2)
    for tokens, heads in ((3, slice(None)), (4, slice(1, 2))):
        with pytest.raises(ValueError, match=r"values have shape .*tokens \[1, 5\)"):
            scatter_tokens([cache], np.array([1, 0]), 1, 5, [values(shape, tokens)], heads)
    assert (cache == SENTINEL).all()


def test_payloads_of_layers_that_differ_in_their_strides_change_nothing() -> None:
    shape = PageShape(parts=2, kv_heads=2, block_size=4, head_dim=2, stride=32)
    caches = [new_cache(shape, 2), new_cache(shape, 2)]
    wider = values(shape, 6)[:, :, 1:5]
    with pytest.raises(ValueError, match=r"strides \(24, 12, 2, 1\)"):
        scatter_tokens(caches, np.array([1, 0]), 1, 5, [values(shape, 4), wider])
    turned = values(PageShape(2, 2, 4, 4, 64), 2).transpose(2, 3)
    with pytest.raises(ValueError, match="heads are not contiguous"):
        scatter_tokens(caches[:1], np.array([1, 0]), 1, 5, [turned])
    assert all((cache == SENTINEL).all() for cache in caches)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("begin", "end"), [(0, 64), (5, 6), (15, 17), (16, 32), (17, 31), (3, 61)])
def test_every_bit_survives_whatever_number_it_is_of(dtype: torch.dtype, begin: int, end: int) -> None:
    shape = PageShape(parts=2, kv_heads=3, block_size=16, head_dim=64, stride=2 * 3 * 16 * 64)
    table = block_table(1, 4)
    generator = torch.Generator().manual_seed(begin)
    size = (2, 3, end - begin, 64 * dtype.itemsize)
    payload = torch.randint(256, size, generator=generator, dtype=torch.uint8)
    cache = view_of(torch.zeros(4 * shape.stride, dtype=dtype), shape, 4, 0)
    scatter_tokens([cache], table, begin, end, [payload.view(dtype)])
    for token in range(begin, end):
        stored = cache[table[token // 16], :, :, token % 16].view(torch.uint8)
        assert torch.equal(stored, payload[:, :, token - begin])
    back = torch.empty_like(payload)
    gather_tokens([cache], table, begin, end, [back.view(dtype)])
    assert torch.equal(back, payload)


def test_all_heads_are_taken_where_none_are_named() -> None:
    shape = PageShape(parts=2, kv_heads=2, block_size=4, head_dim=2, stride=32)
    cache, content = new_cache(shape, 2), values(shape, 4)
    scatter_tokens([cache], np.array([1, 0]), 1, 5, [content])
    out = torch.empty_like(content)
    gather_tokens([cache], np.array([1, 0]), 1, 5, [out])
    assert out.tolist() == content.tolist()
