"""What one layer stores per block. A layer that owns KV has a spec; a layer that shares another's cache has none.

Specs are made by the model's attention layers, compared to form groups, and turned into page sizes, tensors and
transfer layouts. They never change.
"""

from dataclasses import dataclass
from typing import NewType

import torch

from kernels.pages import PARTS, PageShape

LayerName = NewType("LayerName", str)
"""Fully qualified, such as ``model.layers.18.self_attn.attn``; one block of a model can hold two attention layers."""


@dataclass(frozen=True, slots=True)
class FullAttentionSpec:
    """Keys and values of every token. ``kv_heads`` is this rank's share."""

    block_size: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's keys and values."""
        return PARTS * self.kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block of one layer: ``2 * block * kv_heads * head_dim * size``."""
        return self.block_size * self.bytes_per_token

    @property
    def page_shape(self) -> PageShape:
        """How the kernels see a page."""
        return PageShape(self.kv_heads, self.block_size, self.head_dim)


KVCacheSpec = FullAttentionSpec
"""Every kind of spec. The rooms above depend only on ``page_size_bytes``, ``bytes_per_token`` and ``page_shape``."""
