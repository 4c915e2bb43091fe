"""Cache plans without a model: layers that only state what they store, and strategies for whole plans."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from worker.kv_cache.groups import CachePlan, plan_cache
from worker.kv_cache.specs import (
    EveryToken,
    FullAttentionSpec,
    IndexKeySpec,
    KVCacheSpec,
    LayerName,
    MLASpec,
    RecurrentStateSpec,
    SlidingWindowSpec,
    SparseMLASpec,
    StateRegion,
)


@dataclass(frozen=True, slots=True)
class StatedLayer:
    """A layer as the planner sees it."""

    name: LayerName
    spec: KVCacheSpec | None
    kv_sharing_target_layer_name: LayerName | None = None

    def kv_cache_spec(self) -> KVCacheSpec | None:
        return self.spec


def owners(*specs: KVCacheSpec) -> list[StatedLayer]:
    """A layer per spec."""
    return [StatedLayer(LayerName(f"layers.{index}"), spec) for index, spec in enumerate(specs)]


def sharer(name: str, target: StatedLayer, spec: KVCacheSpec | None = None) -> StatedLayer:
    """A layer that reads the target's cache and may store something else of its own."""
    return StatedLayer(LayerName(name), spec, target.name)


def full(block_size: int, width: int = 1) -> FullAttentionSpec:
    """``4 * width`` bytes of a token."""
    return FullAttentionSpec(block_size, 1, width, torch.bfloat16)


def window(block_size: int, size: int, width: int = 1, sinks: int = 0) -> SlidingWindowSpec:
    """The same of the last ``size`` tokens."""
    return SlidingWindowSpec(block_size, 1, width, torch.bfloat16, size, sinks)


def state(numbers: int) -> RecurrentStateSpec:
    """``4 * numbers`` bytes of a sequence."""
    return RecurrentStateSpec((StateRegion((numbers,), torch.float32),))


@st.composite
def small_plans(draw: st.DrawFn, kinds: Sequence[str] | None = None) -> CachePlan:
    """Few groups of small blocks: one or two owners of each of ``kinds``: full, window, sinks (and a window), state."""
    if kinds is None:
        kinds = draw(
            st.sampled_from(
                [
                    ["full"],
                    ["window"],
                    ["full", "window"],
                    ["full", "sinks"],
                    ["full", "state"],
                    ["full", "window", "state"],
                ]
            )
        )
    size = draw(st.integers(1, 3), "block size")
    specs: list[KVCacheSpec] = []
    for kind in kinds:
        width = draw(st.integers(1, 2), "width")
        seen, sinks = draw(st.integers(1, 6), "window"), draw(st.integers(1, 4), "sinks")
        spec: KVCacheSpec = {
            "full": full(size, width),
            "window": window(size, seen, width),
            "sinks": window(size, seen, width, sinks),
            "state": state(1),
        }[kind]
        # Several owners of one kind beside one of another are several groups.
        specs += [spec] * draw(st.integers(1, 2), "owners")
    return plan_cache(owners(*specs), size)


DTYPES = st.sampled_from([torch.bfloat16, torch.float32])


@st.composite
def _token_specs(draw: st.DrawFn, block_size: int, index: int) -> KVCacheSpec:
    heads, dim, dtype = draw(st.integers(1, 2)), draw(st.sampled_from([2, 4, 40])), draw(DTYPES)
    match index:
        case 0:
            return FullAttentionSpec(block_size, heads, dim, dtype, value_parts=draw(st.integers(1, 2)))
        case 1:
            return SlidingWindowSpec(block_size, heads, dim, dtype, draw(st.sampled_from([4, 7])))
        case 2:
            return MLASpec(block_size, dim, dtype)
        case 3:
            return SparseMLASpec(block_size, dim, dtype, 32)
    return IndexKeySpec(block_size, dim, dtype)


@st.composite
def layered_plans(draw: st.DrawFn) -> tuple[list[StatedLayer], CachePlan]:
    """Any mixture of everything that layers may store, some of them sharing, and the plan of it."""
    size = draw(st.sampled_from([1, 2, 4]))
    kinds = draw(st.lists(st.integers(0, 5), min_size=1, max_size=6))
    specs: list[KVCacheSpec] = []
    for kind in kinds:
        if kind < 5:
            specs.append(draw(_token_specs(size, kind)))
        else:
            # Of an even number of shorts, so that pages of states alone are aligned.
            shapes = draw(st.integers(1, 3)), 2 * draw(st.integers(1, 9))
            regions = StateRegion((shapes[0], 4, 3), torch.float32), StateRegion((shapes[1], 3), torch.bfloat16)
            specs.append(RecurrentStateSpec(regions))
    layers = owners(*specs)
    for number, target in enumerate(draw(st.lists(st.sampled_from(layers), max_size=4))):
        if isinstance(target.spec, RecurrentStateSpec):
            continue
        # What reads two caches reads both through one block table, so both are in the one group that there is.
        one_group = all(spec.retention == EveryToken() for spec in specs)
        own = IndexKeySpec(size, 8, torch.bfloat16) if one_group and number % 2 else None
        layers.append(sharer(f"sharing.{number}", target, own))
    return layers, plan_cache(layers, size)
