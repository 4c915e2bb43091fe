"""One layer of multi-head latent attention in the KV cache: it owns latents, index keys, both, or neither.

Built with the model. The engine validates all targets, plans groups, and binds each layer's views once. A step then
writes the rows' latents and index keys, selects tokens if there is an indexer, and attends.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch

from kernels.attention.latent import Expansion, LatentPlan, Selection
from kernels.attention.segments import Segment
from kernels.pages import PageShape
from kernels.table import LatentBackend
from worker.kv_cache.specs import IndexKeySpec, LayerName, MLASpec, SparseMLASpec
from worker.kv_cache.tensors import LayerCache
from worker.layers.cache_format import CacheFormat
from worker.layers.cached_layer import StepPlan, Stored, nobody_asks


@dataclass(frozen=True, slots=True)
class IndexShape:
    """A sparse indexer: its heads, the size of its keys, and how many tokens it lets a row attend to."""

    heads: int
    head_dim: int
    topk: int


class LatentAttention:
    """Attention of ``heads`` query heads over one latent per token, ``latent_dim + rope_dim`` wide.

    A rank has some of a layer's query heads, and all of its latents and index keys.

    With ``index`` the layer has an indexer and stores its keys. With ``kv_sharing_target_layer_name`` it reads the
    target's latents; an indexer's keys are its own all the same.
    """

    attention_type = "latent attention"
    kv_heads = 1

    def __init__(
        self,
        name: LayerName,
        *,
        heads: int,
        latent_dim: int,
        rope_dim: int,
        scale: float,
        cache_format: CacheFormat,
        backend: LatentBackend,
        index: IndexShape | None = None,
        kv_sharing_target_layer_name: LayerName | None = None,
    ) -> None:
        self.name = name
        self.heads = heads
        self.head_dim = latent_dim + rope_dim
        self.index = index
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self._scale = scale
        self._cache_format = cache_format
        self._backend = backend
        self.latents = torch.empty(0)
        self.index_keys: torch.Tensor | None = None
        self._stored: Stored = nobody_asks

    @property
    def owns_latents(self) -> bool:
        """Whether it writes latents of its own."""
        return self.kv_sharing_target_layer_name is None

    def kv_cache_spec(self) -> MLASpec | IndexKeySpec | None:
        """Latents, latents and index keys, index keys alone, or nothing."""
        size, dtype = self._cache_format.block_size, self._cache_format.dtype
        if self.index is None:
            return MLASpec(size, self.head_dim, dtype) if self.owns_latents else None
        if self.owns_latents:
            return SparseMLASpec(size, self.head_dim, dtype, self.index.head_dim)
        return IndexKeySpec(size, self.index.head_dim, dtype)

    def bind(self, cache: LayerCache, stored: Stored) -> None:
        """The latents come first; index keys of its own are last, after whatever else a target has."""
        self._stored = stored
        self.latents = cache[0]
        self.index_keys = None if self.index is None else cache[-1]

    @property
    def plan_key(self) -> Hashable:
        """The shapes of both kinds of pages."""
        return PageShape.of(self.latents), None if self.index_keys is None else PageShape.of(self.index_keys)

    def plan(self, segments: Sequence[Segment], device: torch.device) -> LatentPlan:
        """Index tensors over both kinds of pages."""
        index_pages = None if self.index_keys is None else PageShape.of(self.index_keys)
        return self._backend.plan_latents(segments, PageShape.of(self.latents), index_pages, device)

    def write(self, latents: torch.Tensor, plan: StepPlan) -> None:
        """Store ``[rows, latent_dim + rope_dim]``; only an owner may."""
        assert isinstance(plan, LatentPlan)
        assert self.owns_latents, f"{self.name} writes into the cache of {self.kv_sharing_target_layer_name}"
        self._backend.write_vectors(self.latents, latents, plan.latents)
        if self.index is None:
            self._stored(self.name)

    def write_index_keys(self, keys: torch.Tensor, plan: StepPlan) -> None:
        """Store ``[rows, index head_dim]``, after the latents of a layer that owns both."""
        assert isinstance(plan, LatentPlan)
        assert plan.index_keys is not None
        assert self.index_keys is not None
        self._backend.write_vectors(self.index_keys, keys, plan.index_keys)
        self._stored(self.name)

    def chooses(self, plan: StepPlan) -> bool:
        """Whether a row may see more tokens than the indexer lets it attend to; if not, there is nothing to select."""
        assert isinstance(plan, LatentPlan)
        assert plan.index_keys is not None
        assert self.index is not None
        return self._backend.longest_context(plan.index_keys) > self.index.topk

    def select(self, query: torch.Tensor, weights: torch.Tensor, plan: StepPlan) -> Selection | None:
        """Which tokens each row attends to, in this and later layers of the step; None: all that it sees.

        ``query`` is ``[rows, index heads, index head_dim]``, ``weights`` ``[rows, index heads]`` with all scales in.
        """
        assert isinstance(plan, LatentPlan)
        assert plan.index_keys is not None
        assert self.index is not None
        assert self.index_keys is not None
        return self._backend.select_tokens(query, weights, self.index_keys, plan.index_keys, self.index.topk)

    def attend(
        self, query: torch.Tensor, expansion: Expansion, plan: StepPlan, selection: Selection | None = None
    ) -> torch.Tensor:
        """``[rows, heads, key_dim + rope_dim]`` to ``[rows, heads, value_dim]``, absorbed or not as costs less."""
        assert isinstance(plan, LatentPlan)
        return self._backend.attend_heads(
            query, expansion, self.latents, plan.latents, scale=self._scale, selection=selection
        )
