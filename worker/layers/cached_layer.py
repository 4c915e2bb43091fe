"""What the engine needs of any layer that has a place in the KV cache, whatever it stores there."""

from collections.abc import Callable, Hashable, Sequence
from typing import Protocol

import torch

from kernels.attention.segments import Segment
from worker.kv_cache.specs import KVCacheSpec, LayerName
from worker.kv_cache.tensors import LayerCache

Stored = Callable[[LayerName], None]
"""Told of a layer that has stored its part of a step, in the order in which layers run."""


def nobody_asks(layer: LayerName) -> None:
    """A ``Stored`` for layers that nobody waits for."""


class StepPlan(Protocol):
    """Index tensors of one step for one kind of layer. Opaque to everybody but the layer."""


class CachedLayer(Protocol):
    """Built with a model, bound to its memory once, then planned for once per step and called by its model."""

    @property
    def name(self) -> LayerName:
        """Fully qualified name."""
        ...

    @property
    def kv_sharing_target_layer_name(self) -> LayerName | None:
        """The owner whose cache it reads, or None."""
        ...

    def kv_cache_spec(self) -> KVCacheSpec | None:
        """What it stores itself, or None if that is nothing."""
        ...

    def bind(self, cache: LayerCache, stored: Stored) -> None:
        """Give it its memory: views of its target's regions, if it has a target, then of its own.

        ``stored`` is told whenever all that the layer stores of a step is there.
        """
        ...

    @property
    def plan_key(self) -> Hashable:
        """Layers of one group with equal keys can use one plan. Known once the layer is bound."""
        ...

    def plan(self, segments: Sequence[Segment], device: torch.device) -> StepPlan:
        """Prepare one step."""
        ...
