"""What the engine needs of any model, and what a model is told when it is built.

A model is built once per engine from its configuration, possibly on the ``meta`` device just to be described. Its
attention layers say what they cache; its slots say what to load; ``forward`` computes one step.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from kernels.attention.segments import AttentionBackend
from kernels.table import LatentBackend, attention_backend, latent_backend
from worker.kv_cache.sharing import SharingRule
from worker.kv_cache.specs import LayerName
from worker.layers.cache_format import CacheFormat
from worker.layers.cached_layer import CachedLayer, StepPlan
from worker.layers.weights import Slot, WeightFormat


@dataclass(frozen=True, slots=True)
class ModelContext:
    """How to build a model, or one rank's part of it: ``weights`` names the ranks.

    A ``headless`` one ends with the last owner's keys and values and gives no logits.
    """

    weights: WeightFormat
    cache: CacheFormat
    sharing: SharingRule
    max_model_len: int
    headless: bool = False

    @property
    def backend(self) -> AttentionBackend:
        """What attends over the cache."""
        return attention_backend(self.weights.device, self.cache.dtype)

    @property
    def latent_backend(self) -> LatentBackend:
        """What attends over latents in the cache."""
        return latent_backend(self.weights.device)


@dataclass(frozen=True, slots=True)
class RowSet:
    """Some rows of a step: int64 ``positions`` ``[rows]`` and every cached layer's plan for them."""

    positions: torch.Tensor
    plans: Mapping[LayerName, StepPlan]


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One step as a model sees it.

    ``token_ids`` int64 ``[rows]``. Layers up to the last that stores anything compute all ``rows``; what comes after
    them, the head included, only ``logit_rows``, whose indices are ``logit_index`` (None: all rows), and whose plans
    are those of attention layers only. None as ``logit_rows``: nobody wants logits, and the pass ends with what the
    last owner stores.
    """

    token_ids: torch.Tensor
    rows: RowSet
    logit_rows: RowSet | None
    logit_index: torch.Tensor | None


class Model(Protocol):
    """A decoder-only language model over a paged cache."""

    vocab_size: int
    hidden_size: int

    @property
    def cached_layers(self) -> Sequence[CachedLayer]:
        """Every layer with a place in the cache, in the order in which they run."""
        ...

    def slots(self) -> Iterator[Slot]:
        """Every checkpoint tensor that it loads, and where."""
        ...

    def forward(self, step: StepInputs) -> torch.Tensor | None:
        """Write KV of all rows; return float32 logits ``[logit rows, vocab]`` on rank 0.

        None elsewhere, and when there are none. All ranks of a model get the same step.
        """
        ...
