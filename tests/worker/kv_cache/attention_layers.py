"""Attention layers without a model, for tests of what is planned from them."""

import torch

from kernels.table import attention_backend
from worker.kv_cache.specs import LayerName
from worker.layers.attention import Attention
from worker.layers.cache_format import CacheFormat


def layer_name(index: int) -> LayerName:
    return LayerName(f"model.layers.{index}.self_attn.attn")


def attention(
    index: int,
    *,
    shares: int | None = None,
    kv_heads: int = 2,
    head_dim: int = 8,
    block_size: int = 4,
    dtype: torch.dtype = torch.bfloat16,
    window: int | None = None,
) -> Attention:
    """Layer ``index``, an owner unless it ``shares`` another."""
    return Attention(
        layer_name(index),
        heads=4,
        kv_heads=kv_heads,
        head_dim=head_dim,
        scale=1.0,
        cache_format=CacheFormat(block_size, dtype),
        backend=attention_backend(torch.device("cpu"), torch.float32),
        window=window,
        kv_sharing_target_layer_name=None if shares is None else layer_name(shares),
    )
