import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.kv_cache.specs import FullAttentionSpec

SIZES = {torch.float32: 4, torch.bfloat16: 2, torch.float16: 2}


@given(
    block_size=st.integers(1, 256),
    kv_heads=st.integers(1, 64),
    head_dim=st.integers(1, 256),
    dtype=st.sampled_from(list(SIZES)),
)
@settings(deadline=None)
def test_page_bytes_are_two_times_block_times_heads_times_size(
    block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    spec = FullAttentionSpec(block_size, kv_heads, head_dim, dtype)
    assert spec.page_size_bytes == 2 * block_size * kv_heads * head_dim * SIZES[dtype]
    assert spec.bytes_per_token * block_size == spec.page_size_bytes


@pytest.mark.parametrize("num_blocks", [1, 7])
def test_a_cache_tensor_has_exactly_the_pages_bytes(num_blocks: int) -> None:
    spec = FullAttentionSpec(16, 3, 64, torch.bfloat16)
    cache = torch.empty(spec.page_shape.cache_shape(num_blocks), dtype=spec.dtype)
    assert cache.nbytes == num_blocks * spec.page_size_bytes
    # One block is one contiguous page.
    assert cache.stride(0) * cache.itemsize == spec.page_size_bytes
    assert cache[0].is_contiguous()
