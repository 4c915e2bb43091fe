"""From specs to the plain records that a transfer is planned from, and back to where each owner's cache lies."""

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kv_transfer.layout import CacheLayout, Lifetime, OwnerLayer, Section
from worker.kv_cache.groups import CachedLayer, CachePlan
from worker.kv_cache.specs import EveryToken, KVCacheSpec, LastState, LastTokens, LayerName, Retention, TokenRegion


@dataclass(frozen=True, slots=True)
class OwnerPlace:
    """An owner of a section, the KV cache group that it is in, and what it stores."""

    name: LayerName
    group: int
    spec: KVCacheSpec


def transfer_layout(
    plan: CachePlan, layers: Sequence[CachedLayer], dtype: torch.dtype, fingerprint: str
) -> tuple[CacheLayout, tuple[tuple[OwnerPlace, ...], ...]]:
    """The layout, and for each of its sections where the owners are. Sections are in order of first appearance.

    Of a replica's rank only the places count: a layout is about whole layers.
    """
    order = {layer.name: index for index, layer in enumerate(layers)}
    targets = {
        layer.name: layer.kv_sharing_target_layer_name
        for layer in layers
        if layer.kv_sharing_target_layer_name is not None
    }
    sections = []
    places = []
    for retention in dict.fromkeys(group.retention for group in plan.groups):
        owners = [
            OwnerPlace(name, index, spec)
            for index, group in enumerate(plan.groups)
            if group.retention == retention
            for name, spec in zip(group.owners, group.specs, strict=True)
        ]
        owners.sort(key=lambda place: order[place.name])
        records = tuple(_owner(place, sum(target == place.name for target in targets.values())) for place in owners)
        for lifetime, window, sinks in _lifetimes(retention):
            sections.append(Section(lifetime, window, sinks, records))
            places.append(tuple(owners))
    layer_map = json.dumps([[*map(str, pair)] for pair in targets.items()])
    layout = CacheLayout(
        fingerprint=fingerprint,
        kv_dtype=str(dtype).removeprefix("torch."),
        sections=tuple(sections),
        sharing_digest=hashlib.sha256(layer_map.encode()).hexdigest()[:16],
        sharing_layers=len(targets),
    )
    return layout, tuple(places)


def heads_of_spec(spec: KVCacheSpec) -> int:
    """The equal parts of a slot that ranks can share: KV heads, or what every tensor of a state has some of."""
    return math.gcd(*(r.kv_heads if isinstance(r, TokenRegion) else r.shape[0] for r in spec.regions))


def _owner(place: OwnerPlace, sharers: int) -> OwnerLayer:
    size = place.spec.bytes_per_token + place.spec.state_bytes
    return OwnerLayer(place.name, heads_of_spec(place.spec), size, sharers)


def _lifetimes(retention: Retention) -> list[tuple[Lifetime, int, int]]:
    """Lifetime, window and sinks of every section that a retention becomes."""
    match retention:
        case EveryToken():
            return [(Lifetime.EVERY_TOKEN, 0, 0)]
        case LastTokens(window, 0):
            return [(Lifetime.LAST_TOKENS, window, 0)]
        case LastTokens(window, sinks):
            return [(Lifetime.FIRST_TOKENS, 0, sinks), (Lifetime.LAST_TOKENS, window, sinks)]
        case LastState():
            return [(Lifetime.STATE, 0, 0)]
