"""KV memory in two steps: allocate raw bytes for a plan's buffers, then reshape them into typed views per layer.

Called once when an engine starts. The views live as long as the engine; a sharing layer's views are its target's, the
same storage. There is one path for every kind of layer: a spec's regions say what its page holds.
"""

from collections.abc import Mapping, Sequence

import torch

from kernels.huge_pages import empty_in_huge_pages
from worker.kv_cache.groups import Buffer, CachedLayer, CachePlan
from worker.kv_cache.specs import KVCacheSpec, LayerName, TokenRegion

LayerCache = tuple[torch.Tensor, ...]
"""One view per region of what a layer reads: ``[num_blocks, parts, kv_heads, block_size, head_dim]`` of tokens,
``[num_blocks, *shape]`` of a state."""


def allocate_kv_cache_tensors(
    plan: CachePlan, num_blocks: int, device: torch.device, fill: int = 0
) -> dict[Buffer, torch.Tensor]:
    """Raw uint8 memory per buffer, ``num_blocks * page_bytes`` long, every byte ``fill``."""
    sizes = {buffer: num_blocks * buffer.page_bytes for buffer in plan.buffers}
    if device.type == "cpu":
        return {buffer: empty_in_huge_pages(size, torch.uint8).fill_(fill) for buffer, size in sizes.items()}
    return {buffer: torch.full((size,), fill, dtype=torch.uint8, device=device) for buffer, size in sizes.items()}


def reshape_kv_cache_tensors(
    raw: Mapping[Buffer, torch.Tensor], plan: CachePlan, layers: Sequence[CachedLayer], num_blocks: int
) -> dict[LayerName, LayerCache]:
    """Typed views of every layer: its target's, if it shares a cache, then its own."""
    buffer_of = {name: buffer for buffer in plan.buffers for name in buffer.shared_by}
    views: dict[LayerName, LayerCache] = {}
    for group in plan.groups:
        for name, spec in zip(group.owners, group.specs, strict=True):
            buffer = buffer_of[name]
            views[name] = _views(raw[buffer], buffer.page_bytes, spec, num_blocks)
    for layer in layers:
        if layer.kv_sharing_target_layer_name is not None:
            views[layer.name] = views[layer.kv_sharing_target_layer_name] + views.get(layer.name, ())
    return views


def _views(raw: torch.Tensor, page_bytes: int, spec: KVCacheSpec, num_blocks: int) -> LayerCache:
    views = []
    offset = 0
    for region in spec.regions:
        size = region.dtype.itemsize
        assert offset % size == 0, f"{region} is not aligned at {offset} of {page_bytes}"
        assert page_bytes % size == 0, f"{region} is not aligned in pages of {page_bytes}"
        shape: tuple[int, ...]
        if isinstance(region, TokenRegion):
            shape = (region.parts, region.kv_heads, spec.tokens_per_block, region.head_dim)
        else:
            shape = region.shape
        strides = [1]
        for length in reversed(shape[1:]):
            strides.insert(0, strides[0] * length)
        typed = raw.view(region.dtype)
        views.append(typed.as_strided((num_blocks, *shape), (page_bytes // size, *strides), offset // size))
        offset += strides[0] * shape[0] * size
    return tuple(views)
