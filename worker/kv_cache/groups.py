"""KV cache groups: layers with equal specs share one block table, and a sharing layer sits in its target's group.

Groups are planned once when a model is built. The cache manager only ever sees groups, so it never hears of sharing:
a sharing layer adds nothing to a block's bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from worker.kv_cache.specs import KVCacheSpec, LayerName


class CachedLayer(Protocol):
    """An attention layer as the planner sees it: an owner has a spec, a sharing layer a target."""

    @property
    def name(self) -> LayerName:
        """Fully qualified name."""
        ...

    @property
    def kv_sharing_target_layer_name(self) -> LayerName | None:
        """The owner whose cache it uses, or None for an owner."""
        ...

    def kv_cache_spec(self) -> KVCacheSpec | None:
        """What it stores per block, or None for a sharing layer."""
        ...


@dataclass(frozen=True, slots=True)
class KVCacheGroup:
    """``owners`` in producing order; ``members`` are owners and the layers that share them, in model order."""

    spec: KVCacheSpec
    owners: tuple[LayerName, ...]
    members: tuple[LayerName, ...]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all owners."""
        return len(self.owners) * self.spec.page_size_bytes


def group_layers(layers: Sequence[CachedLayer]) -> tuple[KVCacheGroup, ...]:
    """Group validated layers, in the order in which their specs first appear."""
    spec_of: dict[LayerName, KVCacheSpec] = {}
    for layer in layers:
        spec = layer.kv_cache_spec()
        target = layer.kv_sharing_target_layer_name
        spec_of[layer.name] = spec if spec is not None else spec_of[target or layer.name]
    owners = {layer.name for layer in layers if layer.kv_sharing_target_layer_name is None}
    groups = []
    for spec in dict.fromkeys(spec_of.values()):
        members = tuple(name for name, other in spec_of.items() if other == spec)
        groups.append(KVCacheGroup(spec, tuple(name for name in members if name in owners), members))
    return tuple(groups)


def count_blocks(groups: Sequence[KVCacheGroup], memory: int) -> int:
    """Number of blocks in ``memory`` bytes: ``memory // sum of the owners' page bytes``."""
    return memory // sum(group.block_bytes for group in groups)
