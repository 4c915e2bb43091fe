"""One attention layer's place in the KV cache: it owns a cache, or it reads an earlier layer's.

Built with the model. The engine validates all targets, plans groups, and binds each layer's cache once; from then on a
layer does not know where its keys and values come from.
"""

from collections.abc import Hashable, Sequence

import torch

from kernels.attention.segments import AttentionBackend, AttentionPlan, Segment
from kernels.pages import PageShape
from worker.kv_cache.specs import FullAttentionSpec, LayerName, SlidingWindowSpec
from worker.kv_cache.tensors import LayerCache
from worker.layers.cache_format import CacheFormat
from worker.layers.cached_layer import Stored, nobody_asks


class Attention:
    """Causal attention with grouped queries over a paged cache, of the ``heads`` and ``kv_heads`` of one rank.

    With ``window`` it is over the last ``window`` tokens and the first ``sinks``. A value has ``value_head_dim``
    numbers, a multiple of ``head_dim``, which is the default. With ``kv_sharing_target_layer_name`` the layer has no
    spec and no cache of its own: its queries attend over the target's keys and values; ``kv_heads``, both head sizes,
    ``window`` and ``sinks`` must then equal the target's.
    """

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
        window: int | None = None,
        sinks: int = 0,
        value_head_dim: int | None = None,
        kv_sharing_target_layer_name: LayerName | None = None,
    ) -> None:
        self.name = name
        self.heads = heads
        self.kv_heads = kv_heads
        self.head_dim = head_dim
        self.window = window
        self.sinks = sinks
        self.value_parts = 1 if value_head_dim is None else value_head_dim // head_dim
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self._scale = scale
        self._cache_format = cache_format
        self._backend = backend
        self.kv_cache = torch.empty(0)
        self._pages: PageShape | None = None
        self._stored: Stored = nobody_asks

    @property
    def attention_type(self) -> str:
        """What a target must have in common."""
        if self.window is None:
            return "full attention"
        return f"sliding window of {self.window}" + (f" after {self.sinks} sinks" if self.sinks else "")

    @property
    def owns_cache(self) -> bool:
        """Whether it writes keys and values of its own."""
        return self.kv_sharing_target_layer_name is None

    def kv_cache_spec(self) -> FullAttentionSpec | None:
        """What it stores per block, or None for a sharing layer."""
        if not self.owns_cache:
            return None
        size, dtype = self._cache_format.block_size, self._cache_format.dtype
        heads, parts = self.kv_heads, self.value_parts
        if self.window is None:
            return FullAttentionSpec(size, heads, self.head_dim, dtype, value_parts=parts)
        return SlidingWindowSpec(size, heads, self.head_dim, dtype, self.window, self.sinks, value_parts=parts)

    def bind(self, cache: LayerCache, stored: Stored) -> None:
        """Take the one region of keys and values."""
        (self.kv_cache,) = cache
        self._stored = stored
        self._pages = PageShape.of(self.kv_cache)

    @property
    def plan_key(self) -> Hashable:
        """The pages' shape, the window and the sinks."""
        return self._pages, self.window, self.sinks

    def plan(self, segments: Sequence[Segment], device: torch.device) -> AttentionPlan:
        """Index tensors for the backend."""
        assert self._pages is not None, f"{self.name} is not bound"
        return self._backend.plan(segments, self._pages, self.window, device, sinks=self.sinks)

    def write(self, key_value: torch.Tensor, plan: AttentionPlan) -> None:
        """Store ``[rows, 1 + value parts, kv_heads, head_dim]``; only an owner may."""
        assert self.owns_cache, f"{self.name} writes into the cache of {self.kv_sharing_target_layer_name}"
        self._backend.write(self.kv_cache, key_value, plan)
        self._stored(self.name)

    def attend(self, query: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
        """``[rows, heads, head_dim]`` to ``[rows, heads, value_head_dim]``."""
        return self._backend.attend(query, self.kv_cache, plan, self._scale)
