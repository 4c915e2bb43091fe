"""KV cache groups: layers whose slots live equally long share a block table; a sharing layer is in its target's group.

Planned once when a model is built. The cache manager sees only groups, so it never hears of sharing: a sharing layer
adds nothing to a block's bytes.

A model with one retention is one group, and every owner has a buffer of its own. A hybrid model, whose layers keep
their slots for different times, is cut into groups of equal size. Its buffers are then shared: buffer ``j`` belongs to
the ``j``-th owner of *every* group, and a block id says which group uses that part of all buffers. Nothing is set aside
for a kind of layer that a request does not fill. The block sizes are chosen so that the pages of one buffer are nearly
equal; what is left is padding, and reported.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from worker.kv_cache.specs import EveryToken, KVCacheSpec, LastState, LastTokens, LayerName, Retention

# Every type of a page is aligned at a multiple of this, in bytes.
PAGE_ALIGNMENT = 16


class CachedLayer(Protocol):
    """A layer with a place in the cache as the planner sees it: an owner has a spec, a sharing layer a target."""

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
    """``owners`` in producing order with their ``specs``; ``members`` are owners and the layers that share them.

    ``block_size`` is in tokens; 0 for states, of which a sequence has one.
    """

    retention: Retention
    block_size: int
    owners: tuple[LayerName, ...]
    specs: tuple[KVCacheSpec, ...]
    members: tuple[LayerName, ...]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all owners, without padding."""
        return sum(spec.page_size_bytes for spec in self.specs)

    def blocks_held(self, tokens: int, chunk: int = 1) -> int:
        """Most blocks that a sequence of ``tokens`` tokens holds, computed up to ``chunk`` of them at a time."""
        match self.retention:
            case LastState():
                return 1
            case LastTokens(window, sinks):
                # What the chunk's first row still sees, and the chunk, may begin anywhere in a block. A prompt that is
                # received has room for its last token and the next one, like a chunk of two.
                reach = -(-(window - 1 + max(chunk, 2) - 1) // self.block_size) + 1
                return min(-(-tokens // self.block_size), reach + -(-sinks // self.block_size))
            case EveryToken():
                return -(-tokens // self.block_size)


@dataclass(frozen=True, slots=True)
class Buffer:
    """One allocation of ``num_blocks * page_bytes``, ``shared_by`` at most one owner of every group."""

    page_bytes: int
    shared_by: tuple[LayerName, ...]


@dataclass(frozen=True, slots=True)
class CachePlan:
    """How a model's KV memory is laid out. ``base_block_size`` divides the block size of every group."""

    base_block_size: int
    groups: tuple[KVCacheGroup, ...]
    buffers: tuple[Buffer, ...]

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block id over all buffers."""
        return sum(buffer.page_bytes for buffer in self.buffers)

    @property
    def bytes_per_block_unshared_buffers(self) -> int:
        """The same with one set of buffers per kind of layer instead of one for all kinds."""
        total = 0
        for retention in dict.fromkeys(group.retention for group in self.groups):
            same = [group for group in self.groups if group.retention == retention]
            for position in range(len(self.buffers)):
                total += max(
                    (g.specs[position].page_size_bytes for g in same if position < len(g.specs)),
                    default=0,
                )
        return total

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token over all owners."""
        return sum(spec.bytes_per_token for group in self.groups for spec in group.specs)

    @property
    def state_bytes(self) -> int:
        """Bytes of one sequence's recurrent states over all owners."""
        return sum(spec.state_bytes for group in self.groups for spec in group.specs)

    @property
    def largest_block_size(self) -> int:
        """Tokens of the largest block of any group."""
        return max(self.base_block_size, *(group.block_size for group in self.groups))

    def padding(self, group: KVCacheGroup) -> int:
        """Bytes of a block that ``group`` leaves unused."""
        return self.bytes_per_block - group.block_bytes

    def count_blocks(self, memory: int) -> int:
        """Number of blocks in ``memory`` bytes."""
        return memory // self.bytes_per_block

    def blocks_held(self, tokens: int, chunk: int = 1) -> int:
        """Most blocks that a sequence of ``tokens`` tokens holds over all groups."""
        return sum(group.blocks_held(tokens, chunk) for group in self.groups)


def plan_cache(layers: Sequence[CachedLayer], block_size: int) -> CachePlan:
    """Group validated layers, in the order in which their retentions first appear.

    ``block_size`` is the smallest that any group gets; those of a hybrid model are multiples of it.
    """
    spec_of: dict[LayerName, KVCacheSpec] = {}
    sharers: dict[LayerName, list[LayerName]] = {}
    for layer in layers:
        spec, target = layer.kv_cache_spec(), layer.kv_sharing_target_layer_name
        if spec is not None:
            spec_of[layer.name] = spec
        elif target is not None:
            sharers.setdefault(target, []).append(layer.name)
    kinds = {
        retention: [name for name, spec in spec_of.items() if spec.retention == retention]
        for retention in dict.fromkeys(spec.retention for spec in spec_of.values())
    }
    sized = _choose_block_sizes(spec_of, block_size) if len(kinds) > 1 else spec_of
    order = {layer.name: index for index, layer in enumerate(layers)}
    size = min(len(names) for names in kinds.values())
    groups = []
    for retention, names in kinds.items():
        count = -(-len(names) // size)
        for first in range(count):
            owners = tuple(names[first::count])
            members = [member for owner in owners for member in (owner, *sharers.get(owner, ()))]
            specs = tuple(sized[owner] for owner in owners)
            groups.append(
                KVCacheGroup(
                    retention, specs[0].tokens_per_block, owners, specs, tuple(sorted(members, key=order.__getitem__))
                )
            )
    for layer in layers:
        target = layer.kv_sharing_target_layer_name
        if target is not None and layer.name in spec_of:
            both = {layer.name, target}
            assert any(both <= set(group.owners) for group in groups), f"{layer.name} needs {target}'s block table too"
    return CachePlan(block_size, tuple(groups), _buffers(groups))


def _choose_block_sizes(specs: dict[LayerName, KVCacheSpec], block_size: int) -> dict[LayerName, KVCacheSpec]:
    """Blocks large enough that the largest token page holds a state, and pages of small tokens are as large."""
    widest = max(spec.bytes_per_token for spec in specs.values())
    state = max(spec.state_bytes for spec in specs.values())
    base = block_size * max(1, -(-state // (block_size * widest))) if widest else block_size
    # Layers of one retention share a block table, so the widest of them decides.
    widest_of: dict[Retention, int] = {}
    for spec in specs.values():
        widest_of[spec.retention] = max(spec.bytes_per_token, widest_of.get(spec.retention, 0))
    return {
        name: spec.with_block_size(base * (widest // widest_of[spec.retention])) if spec.bytes_per_token else spec
        for name, spec in specs.items()
    }


def _buffers(groups: Sequence[KVCacheGroup]) -> tuple[Buffer, ...]:
    if len(groups) == 1:
        return tuple(
            Buffer(spec.page_size_bytes, (owner,))
            for owner, spec in zip(groups[0].owners, groups[0].specs, strict=True)
        )
    buffers = []
    for position in range(max(len(group.owners) for group in groups)):
        sharing = [group for group in groups if position < len(group.owners)]
        page = max(group.specs[position].page_size_bytes for group in sharing)
        buffers.append(
            Buffer(
                -(-page // PAGE_ALIGNMENT) * PAGE_ALIGNMENT,
                tuple(group.owners[position] for group in sharing),
            )
        )
    return tuple(buffers)


def longest_sequence(plan: CachePlan, num_blocks: int, limit: int, chunk: int) -> int:
    """The most tokens, up to ``limit``, of one sequence in ``num_blocks`` blocks, computed in steps of ``chunk``."""
    # A state that continues from a checkpoint holds both.
    checkpoints = sum(isinstance(group.retention, LastState) for group in plan.groups)
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        if plan.blocks_held(middle, chunk) + checkpoints <= num_blocks:
            low = middle
        else:
            high = middle - 1
    return low
