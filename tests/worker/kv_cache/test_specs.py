from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from worker.kv_cache.specs import (
    EveryToken,
    FullAttentionSpec,
    IndexKeySpec,
    KVCacheSpec,
    LastState,
    LastTokens,
    MLASpec,
    RecurrentStateSpec,
    SlidingWindowSpec,
    SparseMLASpec,
    StateRegion,
)

SIZES = {torch.float32: 4, torch.bfloat16: 2, torch.float16: 2}
BF16 = torch.bfloat16

DELTA_NET = RecurrentStateSpec((StateRegion((32, 128, 128), torch.float32), StateRegion((8192, 3), BF16)))
"""One linear layer of Qwen3-Next-80B."""


@given(
    block_size=st.integers(1, 256),
    kv_heads=st.integers(1, 64),
    head_dim=st.integers(1, 256),
    dtype=st.sampled_from(list(SIZES)),
)
def test_page_bytes_are_two_times_block_times_heads_times_size(
    block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    whole = FullAttentionSpec(block_size, kv_heads, head_dim, dtype)
    sliding = SlidingWindowSpec(block_size, kv_heads, head_dim, dtype, 512)
    for spec in (whole, sliding):
        assert spec.page_size_bytes == 2 * block_size * kv_heads * head_dim * SIZES[dtype]
        assert spec.bytes_per_token * block_size == spec.page_size_bytes
        assert spec.state_bytes == 0
    wide = FullAttentionSpec(block_size, kv_heads, head_dim, dtype, value_parts=2)
    assert wide.page_size_bytes == 3 * block_size * kv_heads * head_dim * SIZES[dtype]


@pytest.mark.parametrize(
    ("spec", "page", "per_token"),
    [
        (FullAttentionSpec(16, 8, 128, BF16), 65_536, 4096),  # Qwen3-8B
        (SlidingWindowSpec(16, 2, 256, BF16, 512), 32_768, 2048),  # Gemma 3n
        (MLASpec(16, 576, BF16), 18_432, 1152),  # DeepSeek V3
        (SparseMLASpec(16, 576, BF16, 128), 22_528, 1408),  # DeepSeek V3.2: 1,152 and an index key of 256
        (IndexKeySpec(16, 128, BF16), 4096, 256),
    ],
)
def test_pages_of_real_layers(spec: KVCacheSpec, page: int, per_token: int) -> None:
    assert (spec.page_size_bytes, spec.bytes_per_token, spec.state_bytes) == (page, per_token, 0)
    larger = spec.with_block_size(48)
    assert (larger.page_size_bytes, larger.bytes_per_token) == (3 * page, per_token)
    assert larger.with_block_size(16) == spec


def test_a_state_is_as_large_as_its_tensors_and_has_no_tokens() -> None:
    assert DELTA_NET.page_size_bytes == DELTA_NET.state_bytes == 4 * 32 * 128 * 128 + 2 * 8192 * 3
    assert (DELTA_NET.bytes_per_token, DELTA_NET.tokens_per_block) == (0, 0)
    assert DELTA_NET.with_block_size(48) == DELTA_NET
    assert 36 * DELTA_NET.state_bytes == pytest.approx(77.3e6, rel=1e-3)


def test_how_long_slots_are_needed() -> None:
    assert FullAttentionSpec(16, 8, 128, BF16).retention == EveryToken()
    assert MLASpec(16, 576, BF16).retention == SparseMLASpec(16, 576, BF16, 128).retention == EveryToken()
    assert SlidingWindowSpec(16, 2, 256, BF16, 512).retention == LastTokens(512)
    assert SlidingWindowSpec(16, 2, 256, BF16, 512, 128).retention == LastTokens(512, 128) != LastTokens(512)
    assert DELTA_NET.retention == LastState()


@pytest.mark.parametrize(("ranks", "heads"), [(1, 4), (2, 2), (4, 1), (8, 1), (16, 1)])
def test_heads_are_split_until_there_is_one_then_replicated(ranks: int, heads: int) -> None:
    spec = FullAttentionSpec(16, 4, 128, BF16)
    assert spec.sharded(ranks) == replace(spec, kv_heads=heads)
    sliding = SlidingWindowSpec(16, 4, 128, BF16, 512)
    assert sliding.sharded(ranks) == replace(sliding, kv_heads=heads)


def test_latents_and_index_keys_are_replicated_and_states_split_by_their_first_dimension() -> None:
    for spec in (MLASpec(16, 576, BF16), SparseMLASpec(16, 576, BF16, 128), IndexKeySpec(16, 128, BF16)):
        assert spec.sharded(8) == spec
    split = DELTA_NET.sharded(4)
    assert [region.shape for region in split.tensors] == [(8, 128, 128), (2048, 3)]
    assert split.state_bytes * 4 == DELTA_NET.state_bytes


@pytest.mark.parametrize("ranks", [3, 6])
def test_what_does_not_divide_is_named(ranks: int) -> None:
    with pytest.raises(ValueError, match=f"4 KV heads .* {ranks} ranks"):
        FullAttentionSpec(16, 4, 128, BF16).sharded(ranks)
    with pytest.raises(ValueError, match=f"32 heads or channels .* {ranks} ranks"):
        DELTA_NET.sharded(ranks)
