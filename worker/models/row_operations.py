"""What one row costs a model, counted while the model's own ``forward`` runs on the meta device.

A model that is only described computes shapes, not numbers, but it performs the same matrix products. So nothing here
knows how a layer is made: an embedding is no product, a tied head is one, of a mixture of experts those few that a row
goes to are computed, and a headless model ends where it ends.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Self

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from kernels.attention.segments import Segment
from worker.kv_cache.groups import CachePlan
from worker.kv_cache.specs import LayerName
from worker.kv_cache.tensors import allocate_kv_cache_tensors, reshape_kv_cache_tensors
from worker.layers.cached_layer import StepPlan, Stored
from worker.layers.weights import Slot
from worker.models.model import Model, RowSet, StepInputs


@dataclass(frozen=True, slots=True)
class Product:
    """A matrix product: its FLOPs, two per multiply-add, and the name of one of the tensors in the weight, if any."""

    flops: int
    weight: str | None


@dataclass(frozen=True, slots=True)
class Operations:
    """FLOPs of matrix products; sums, norms and activations are not counted.

    ``weights`` are those of linear layers, ``mixing`` those of two activations: attention, a recurrent state.
    """

    weights: int
    mixing: int

    @classmethod
    def of(cls, products: Iterable[Product]) -> Self:
        """Their sums."""
        weights = mixing = 0
        for product in products:
            if product.weight is None:
                mixing += product.flops
            else:
                weights += product.flops
        return cls(weights, mixing)


@dataclass(frozen=True, slots=True)
class RowOperations:
    """Of one row: until everything is ``stored`` that later rows need, through all ``layers``, and in the ``head``.

    The first are part of the second. The head is all that comes after the last layer.
    """

    stored: Operations
    layers: Operations
    head: Operations


def count_row(model: Model, slots: Sequence[Slot], cache: CachePlan, context: int) -> RowOperations:
    """Count one row of a described model, the last of ``context`` tokens, alone in its step.

    ``slots`` are the model's. Its layers are bound to memory that does not exist.
    """
    counter = _ProductCounter({_storage(slot.destination): slot.name for slot in slots})
    rows = _last_row(model, cache, context, counter.tell_stored)
    tokens = torch.empty(1, dtype=torch.int64, device="meta")
    with counter:
        model.forward(StepInputs(tokens, rows, rows, None))
    # Every checkpoint numbers its layers; a weight after the last of them has no number.
    head = list(takewhile(_outside_layers, reversed(counter.products)))
    return RowOperations(
        stored=Operations.of(counter.products[: counter.stored]),
        layers=Operations.of(counter.products[: len(counter.products) - len(head)]),
        head=Operations.of(head),
    )


class _ProductCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lists products in the order of their computation, the first ``stored`` of which are needed by later rows."""

    def __init__(self, weights: Mapping[int, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._weights = weights
        self.products: list[Product] = []
        self.stored = 0

    def tell_stored(self, layer: LayerName) -> None:
        """Called whenever a layer has stored what it stores."""
        del layer
        self.stored = len(self.products)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Called for every operation."""
        del types
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func.overloadpacket in flop_registry:
            operands = [_storage(argument) for argument in args if isinstance(argument, torch.Tensor)]
            self.products.append(
                Product(
                    flop_registry[func.overloadpacket](*args, **kwargs, out_val=out),
                    next((self._weights[storage] for storage in operands if storage in self._weights), None),
                )
            )
        return out


def _outside_layers(product: Product) -> bool:
    return product.weight is not None and "layers." not in product.weight


def _storage(tensor: torch.Tensor) -> int:
    """What all views of one weight have in common."""
    return int(tensor.untyped_storage()._cdata)


def _last_row(model: Model, cache: CachePlan, context: int, stored: Stored) -> RowSet:
    """The last of ``context`` tokens, whose blocks are numbered from the first."""
    meta = torch.device("meta")
    # One block at least, and two for a state, which is read from one and written to another.
    count = max(-(-context // group.block_size) if group.block_size else 2 for group in cache.groups)
    caches = reshape_kv_cache_tensors(allocate_kv_cache_tensors(cache, count, meta), cache, model.cached_layers, count)
    group_of = {name: group for group in cache.groups for name in group.members}
    plans: dict[object, StepPlan] = {}
    of_layer = {}
    for layer in model.cached_layers:
        layer.bind(caches[layer.name], stored)
        key = (group_of[layer.name], layer.plan_key)
        if key not in plans:
            plans[key] = layer.plan([Segment(0, 1, context, np.arange(count))], meta)
        of_layer[layer.name] = plans[key]
    return RowSet(torch.empty(1, dtype=torch.int64, device=meta), of_layer)
