"""One attention layer's place in the KV cache: it owns a cache, or it reads an earlier layer's.

Built with the model. The engine validates all targets, plans groups, and binds each layer's cache view once; from then
on a layer does not know where its keys and values come from.
"""

import torch

from kernels.attention.segments import AttentionBackend, AttentionPlan
from worker.kv_cache.specs import FullAttentionSpec, LayerName
from worker.layers.cache_format import CacheFormat


class Attention:
    """Causal attention with grouped queries over a paged cache.

    With ``kv_sharing_target_layer_name`` the layer has no spec and no cache of its own: its queries attend over the
    target's keys and values. ``kv_heads`` and ``head_dim`` must then equal the target's.
    """

    attention_type = "decoder"

    def __init__(
        self,
        name: LayerName,
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        scale: float,
        cache_format: CacheFormat,
        backend: AttentionBackend,
        kv_sharing_target_layer_name: LayerName | None = None,
    ) -> None:
        self.name = name
        self.heads = heads
        self.kv_heads = kv_heads
        self.head_dim = head_dim
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self._scale = scale
        self._cache_format = cache_format
        self._backend = backend
        self.kv_cache = torch.empty(0)

    @property
    def owns_cache(self) -> bool:
        """Whether it writes keys and values of its own."""
        return self.kv_sharing_target_layer_name is None

    def kv_cache_spec(self) -> FullAttentionSpec | None:
        """What it stores per block, or None for a sharing layer."""
        if not self.owns_cache:
            return None
        return FullAttentionSpec(self._cache_format.block_size, self.kv_heads, self.head_dim, self._cache_format.dtype)

    def write(self, key_value: torch.Tensor, plan: AttentionPlan) -> None:
        """Store ``[rows, 2, kv_heads, head_dim]``; only an owner may."""
        assert self.owns_cache, f"{self.name} writes into the cache of {self.kv_sharing_target_layer_name}"
        self._backend.write(self.kv_cache, key_value, plan)

    def attend(self, query: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
        """``[rows, heads, head_dim]`` in and out."""
        return self._backend.attend(query, self.kv_cache, plan, self._scale)
