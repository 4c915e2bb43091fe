"""KV memory in two steps: allocate raw bytes for owners, then reshape them into one typed view per layer.

Called once when an engine starts. The views live as long as the engine; a sharing layer's view is its target's, the
same storage.
"""

from collections.abc import Mapping, Sequence

import torch

from worker.kv_cache.groups import CachedLayer, KVCacheGroup
from worker.kv_cache.specs import LayerName


def allocate_kv_cache_tensors(
    groups: Sequence[KVCacheGroup], num_blocks: int, device: torch.device, fill: int = 0
) -> dict[LayerName, torch.Tensor]:
    """Raw uint8 memory per owner layer, ``num_blocks * page_size_bytes`` long, every byte ``fill``."""
    return {
        name: torch.full((num_blocks * group.spec.page_size_bytes,), fill, dtype=torch.uint8, device=device)
        for group in groups
        for name in group.owners
    }


def reshape_kv_cache_tensors(
    raw: Mapping[LayerName, torch.Tensor],
    layers: Sequence[CachedLayer],
    groups: Sequence[KVCacheGroup],
    num_blocks: int,
) -> dict[LayerName, torch.Tensor]:
    """One typed view per layer, ``[num_blocks, 2, kv_heads, block_size, head_dim]``."""
    views: dict[LayerName, torch.Tensor] = {}
    specs = {name: group.spec for group in groups for name in group.owners}
    for layer in layers:
        target = layer.kv_sharing_target_layer_name
        if target is not None:
            views[layer.name] = views[target]
            continue
        spec = specs[layer.name]
        views[layer.name] = raw[layer.name].view(spec.dtype).view(spec.page_shape.cache_shape(num_blocks))
    return views
