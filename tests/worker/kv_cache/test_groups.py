from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.worker.kv_cache.attention_layers import attention, layer_name
from tests.worker.kv_cache.plans import StatedLayer, full, layered_plans, owners, sharer, small_plans, state, window
from worker.kv_cache.groups import PAGE_ALIGNMENT, CachePlan, KVCacheGroup, longest_sequence, plan_cache
from worker.kv_cache.specs import (
    EveryToken,
    FullAttentionSpec,
    IndexKeySpec,
    LastState,
    LastTokens,
    LayerName,
    MLASpec,
    RecurrentStateSpec,
    SlidingWindowSpec,
    StateRegion,
)

PAGE = 2 * 4 * 2 * 8 * 2  # parts, block size, KV heads, head size, bfloat16: what attention() gives


# Models with one retention


def test_a_sharing_layer_is_a_member_of_its_targets_group_and_costs_nothing() -> None:
    plan = plan_cache([attention(0), attention(1, shares=0), attention(2), attention(3, shares=0)], 4)
    (group,) = plan.groups
    assert group.owners == (layer_name(0), layer_name(2))
    assert group.members == tuple(map(layer_name, range(4)))
    assert group.block_bytes == plan.bytes_per_block == 2 * PAGE


def test_layers_of_different_sizes_have_one_table_and_buffers_of_their_own() -> None:
    layers = [attention(0), attention(1, kv_heads=4), attention(2, shares=1, kv_heads=4), attention(3)]
    plan = plan_cache(layers, 4)
    (group,) = plan.groups
    assert group.owners == (layer_name(0), layer_name(1), layer_name(3))
    assert group.members == tuple(map(layer_name, range(4)))
    assert [(buffer.page_bytes, buffer.shared_by) for buffer in plan.buffers] == [
        (PAGE, (layer_name(0),)),
        (2 * PAGE, (layer_name(1),)),
        (PAGE, (layer_name(3),)),
    ]
    assert plan.count_blocks(100 * (2 * PAGE + 2 * PAGE)) == 100


@given(shared=st.lists(st.booleans(), min_size=0, max_size=30), memory=st.integers(0, 1 << 30))
def test_blocks_in_a_budget(shared: list[bool], memory: int) -> None:
    layers = [attention(0), *(attention(i + 1, shares=0 if share else None) for i, share in enumerate(shared))]
    count = 1 + shared.count(False)
    plan = plan_cache(layers, 4)
    blocks = plan.count_blocks(memory)
    assert blocks * count * PAGE <= memory < (blocks + 1) * count * PAGE
    (group,) = plan.groups
    assert plan.padding(group) == 0
    assert plan.bytes_per_block_unshared_buffers == plan.bytes_per_block == count * PAGE


@pytest.mark.parametrize("window_size", [None, 512])
def test_half_the_owners_make_twice_the_blocks(window_size: int | None) -> None:
    memory = 36 * PAGE * 1000
    unshared = plan_cache([attention(i, window=window_size) for i in range(36)], 4)
    shared = plan_cache([attention(i, shares=i - 1 if i % 2 else None, window=window_size) for i in range(36)], 4)
    assert unshared.count_blocks(memory) == 1000
    assert shared.count_blocks(memory) == 2000


# Hybrid models


@given(planned=layered_plans())
@settings(max_examples=150)
def test_a_buffer_is_large_enough_for_every_layer_that_uses_it(planned: tuple[list[StatedLayer], CachePlan]) -> None:
    layers, plan = planned
    every_owner = [layer.name for layer in layers if layer.spec is not None]
    target_of = {layer.name: layer.kv_sharing_target_layer_name for layer in layers}
    assert sorted(name for group in plan.groups for name in group.owners) == sorted(every_owner)
    spec_of = {name: spec for group in plan.groups for name, spec in zip(group.owners, group.specs, strict=True)}
    group_of = {name: index for index, group in enumerate(plan.groups) for name in group.owners}
    order = [layer.name for layer in layers]
    for index, group in enumerate(plan.groups):
        assert {spec.retention for spec in group.specs} == {group.retention}
        assert {spec.tokens_per_block for spec in group.specs} == {group.block_size}
        assert group.block_size % plan.base_block_size == 0
        assert (group.block_size == 0) == isinstance(group.retention, LastState)
        assert list(group.owners) == sorted(group.owners, key=order.index)
        sharers = {name for name, target in target_of.items() if target in group.owners}
        assert set(group.members) == set(group.owners) | sharers
        assert plan.padding(group) == plan.bytes_per_block - sum(spec_of[n].page_size_bytes for n in group.owners) >= 0
        # One owner of a group, if any, in every buffer.
        for buffer in plan.buffers:
            assert sum(group_of[name] == index for name in buffer.shared_by) <= 1
    assert sorted(name for buffer in plan.buffers for name in buffer.shared_by) == sorted(every_owner)
    for buffer in plan.buffers:
        widest = max(spec_of[name].page_size_bytes for name in buffer.shared_by)
        if len(plan.groups) == 1:
            assert buffer.page_bytes == widest
        else:
            assert buffer.page_bytes % PAGE_ALIGNMENT == 0
            assert widest <= buffer.page_bytes < widest + PAGE_ALIGNMENT
    assert plan.bytes_per_token == sum(spec.bytes_per_token for spec in spec_of.values())
    assert plan.state_bytes == sum(spec.state_bytes for spec in spec_of.values())


@given(
    counts=st.lists(st.integers(1, 4), min_size=2, max_size=3),
    size=st.integers(1, 4),
    widths=st.tuples(st.integers(1, 4), st.integers(1, 4)),
)
def test_groups_of_a_hybrid_model_are_equally_large(counts: list[int], size: int, widths: tuple[int, int]) -> None:
    smallest = min(counts)
    specs = [full(4, widths[0]), window(4, 100, widths[1]), state(3)][: len(counts)]
    # Every kind has a multiple of the smallest kind's layers, as real hybrids have.
    numbers = [size * (1 if count == smallest else count) for count in counts]
    plan = plan_cache(owners(*[spec for spec, number in zip(specs, numbers, strict=True) for _ in range(number)]), 4)
    assert {len(group.owners) for group in plan.groups} == {size}
    assert len(plan.buffers) == size
    assert [len(buffer.shared_by) for buffer in plan.buffers] == [len(plan.groups)] * size
    for retention, number in zip([spec.retention for spec in specs], numbers, strict=True):
        assert sum(group.retention == retention for group in plan.groups) == number // size


def test_one_to_three_takes_half_of_what_a_set_of_buffers_per_kind_takes() -> None:
    # Qwen3-Next-80B: of 48 layers every fourth is attention.
    attention_spec = FullAttentionSpec(16, 2, 256, torch.bfloat16)
    linear = RecurrentStateSpec((StateRegion((32, 128, 128), torch.float32), StateRegion((8192, 3), torch.bfloat16)))
    plan = plan_cache(owners(*([linear] * 3 + [attention_spec]) * 12), 16)
    state_bytes, token_bytes = 4 * 32 * 128 * 128 + 2 * 8192 * 3, 2 * 2 * 256 * 2
    tokens = next(n for n in range(16, 1 << 20, 16) if n * token_bytes >= state_bytes)

    assert [group.block_size for group in plan.groups] == [0, 0, 0, tokens]
    assert plan.bytes_per_block == 12 * tokens * token_bytes
    assert plan.padding(plan.groups[3]) == 0
    assert plan.padding(plan.groups[0]) == 12 * (tokens * token_bytes - state_bytes)
    # Pages are equal but for that padding, and so is what kinds of their own would take each.
    unshared = 12 * (tokens * token_bytes + state_bytes)
    assert plan.bytes_per_block_unshared_buffers == unshared
    assert plan.bytes_per_block / unshared == pytest.approx(0.5, abs=0.005)
    equal = plan_cache(owners(*([state(8)] * 3 + [full(2, 4)]) * 12), 2)
    assert equal.padding(equal.groups[0]) == 0
    assert 2 * equal.bytes_per_block == equal.bytes_per_block_unshared_buffers


def test_pages_of_narrow_tokens_hold_more_of_them() -> None:
    # Gemma 4 E2B: one KV head of 512 in full layers, of 256 in sliding ones.
    whole = FullAttentionSpec(16, 1, 512, torch.bfloat16)
    sliding = SlidingWindowSpec(16, 1, 256, torch.bfloat16, 512)
    plan = plan_cache(owners(*([sliding] * 4 + [whole]) * 3), 16)
    assert {group.retention: group.block_size for group in plan.groups} == {LastTokens(512): 32, EveryToken(): 16}
    assert [plan.padding(group) for group in plan.groups] == [0] * 5
    assert plan.bytes_per_block == 3 * 16 * 2048


def test_a_layer_that_reads_two_caches_reads_both_through_one_table() -> None:
    latents = StatedLayer(layer_name(0), MLASpec(4, 8, torch.bfloat16))
    reader = sharer("reader", latents, IndexKeySpec(4, 8, torch.bfloat16))
    (group,) = plan_cache([latents, reader], 4).groups
    assert group.owners == group.members == (latents.name, reader.name)
    others = [StatedLayer(LayerName("window"), window(4, 8))]
    with pytest.raises(AssertionError, match=r"reader needs .* block table"):
        plan_cache([latents, reader, *others], 4)


# How much a sequence holds


def most_blocks_held(group: KVCacheGroup, tokens: int, chunk: int) -> int:
    """Over every moment of every way to compute ``tokens`` tokens in steps of at most ``chunk``."""
    match group.retention:
        case LastState():
            return 1
        case EveryToken():
            return len({token // group.block_size for token in range(tokens)})
        case LastTokens(size, sinks):
            most = 0
            for begin in range(tokens):
                for end in range(begin + 1, min(tokens, begin + chunk) + 1):
                    seen = {*range(min(sinks, end)), *range(max(0, begin - size + 1), end)}
                    most = max(most, len({token // group.block_size for token in seen}))
            return most


@given(
    spec=st.one_of(
        st.builds(full, st.integers(1, 5)),
        st.builds(window, st.integers(1, 5), st.integers(1, 12), sinks=st.integers(0, 6)),
        st.just(state(2)),
    ),
    tokens=st.integers(1, 40),
    chunk=st.integers(2, 9),
)
@settings(max_examples=200)
def test_blocks_held_is_enough_at_every_moment(spec: FullAttentionSpec, tokens: int, chunk: int) -> None:
    (group,) = plan_cache(owners(spec), 1).groups
    most = most_blocks_held(group, tokens, chunk)
    assert most <= group.blocks_held(tokens, chunk)
    match group.retention:
        case LastTokens(size, 0) if tokens >= size + chunk + group.block_size:
            assert most == group.blocks_held(tokens, chunk), "no block more than is ever used"
        case EveryToken() | LastState():
            assert most == group.blocks_held(tokens, chunk)


@given(
    plan=small_plans(),
    num_blocks=st.integers(0, 20),
    limit=st.integers(0, 60),
    chunk=st.integers(1, 8),
)
@settings(max_examples=150)
def test_the_longest_sequence_is_the_last_that_fits(plan: CachePlan, num_blocks: int, limit: int, chunk: int) -> None:
    def fits(tokens: int) -> bool:
        # Beside a state, the checkpoint that it continues from.
        needed = [g.blocks_held(tokens, chunk) + isinstance(g.retention, LastState) for g in plan.groups]
        return sum(needed) <= num_blocks

    longest = longest_sequence(plan, num_blocks, limit, chunk)
    assert longest == max((tokens for tokens in range(1, limit + 1) if fits(tokens)), default=0)


@pytest.mark.parametrize(
    ("specs", "num_blocks", "longest"),
    [
        ([full(4)], 5, 20),
        ([full(4), state(1)], 6, 16),
        ([full(4), window(4, 5)], 7, 16),  # three of the window: its 5 tokens and a chunk of 4 reach over 3 blocks
        ([window(4, 5)], 2, 8),
        ([window(4, 5)], 3, 1000),
    ],
)
def test_how_long_a_sequence_may_be(specs: Sequence[FullAttentionSpec], num_blocks: int, longest: int) -> None:
    assert longest_sequence(plan_cache(owners(*specs), 4), num_blocks, 1000, 4) == longest
