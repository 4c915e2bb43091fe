"""What a prefill replica holds and computes of a model, beside what a replica does that has all of it.

Made by commands that describe a model, from its configuration alone; ends with the command.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from worker.kv_cache.groups import plan_cache
from worker.layers.weights import Slot
from worker.models.outline import describe, open_model
from worker.models.row_operations import RowOperations, count_row


@dataclass(frozen=True, slots=True)
class Weights:
    """Parameters that a model loads, and their bytes. A tied head has none of its own."""

    parameters: int
    size_bytes: int

    @classmethod
    def of(cls, slots: Iterable[Slot]) -> Self:
        """Of all that a model loads."""
        tensors = [slot.destination for slot in slots]
        return cls(sum(t.numel() for t in tensors), sum(t.numel() * t.itemsize for t in tensors))


@dataclass(frozen=True, slots=True)
class PrefillOutline:
    """Weights, and operations of the last of ``context`` tokens of a prompt, of a whole model and of a headless one."""

    context: int
    weights: Weights
    operations: RowOperations
    headless_weights: Weights
    headless_operations: RowOperations


def outline_prefill(path: Path, *, kv_sharing: str, dtype: str, block_size: int, context: int) -> PrefillOutline:
    """Of the same models as ``outline_model``, not split over ranks; ``context`` is without the model's own prefix."""
    _, config, chosen = open_model(path, dtype)
    described = describe(chosen, kv_sharing, block_size)
    whole, headless = config.build(described), config.build(replace(described, headless=True))
    slots, headless_slots = list(whole.slots()), list(headless.slots())
    cache = plan_cache(whole.cached_layers, block_size)
    tokens = len(config.prefix_tokens) + context
    return PrefillOutline(
        context=context,
        weights=Weights.of(slots),
        operations=count_row(whole, slots, cache, tokens),
        headless_weights=Weights.of(headless_slots),
        headless_operations=count_row(headless, headless_slots, cache, tokens),
    )
