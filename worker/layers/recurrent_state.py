"""A recurrent layer's place in the KV cache: one state per sequence, read before a step and written after it.

Built with the model, bound to its memory once. A step reads a sequence's state from one block and writes it to another
or to the same: a checkpoint that prefix caching keeps is read, never written.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kernels.attention.segments import Segment
from worker.kv_cache.specs import LayerName, RecurrentStateSpec, StateRegion
from worker.kv_cache.tensors import LayerCache
from worker.layers.cached_layer import StepPlan, Stored, nobody_asks


@dataclass(frozen=True, slots=True)
class OneRowSequences:
    """Sequences that compute one row each, which a layer computes together.

    ``sequences`` and ``rows`` index them, in the same order, in tensors with an entry per sequence and per row.
    """

    sequences: slice | torch.Tensor
    rows: slice | torch.Tensor


@dataclass(frozen=True, slots=True)
class SequenceChunk:
    """A sequence, by its index, that computes several ``rows``."""

    sequence: int
    rows: slice


@dataclass(frozen=True, slots=True)
class StatePlan:
    """``sources`` and ``destinations`` are int64 ``[sequences]``; ``begins`` is bool ``[sequences]``: no state yet.

    Every sequence is either one of ``singles`` or has a chunk in ``chunks``.
    """

    sources: torch.Tensor
    destinations: torch.Tensor
    begins: torch.Tensor
    singles: OneRowSequences | None
    chunks: tuple[SequenceChunk, ...]


class RecurrentState:
    """``tensors`` describe one sequence's state, wider types first."""

    kv_sharing_target_layer_name: LayerName | None = None

    def __init__(self, name: LayerName, tensors: Sequence[StateRegion]) -> None:
        self.name = name
        self._tensors = tuple(tensors)
        self._cache: LayerCache = ()
        self._stored: Stored = nobody_asks

    def kv_cache_spec(self) -> RecurrentStateSpec:
        """Its tensors."""
        return RecurrentStateSpec(self._tensors)

    def bind(self, cache: LayerCache, stored: Stored) -> None:
        """Take one view per tensor."""
        self._cache = cache
        self._stored = stored

    @property
    def plan_key(self) -> Hashable:
        """A plan is about sequences only."""
        return RecurrentState

    def plan(self, segments: Sequence[Segment], device: torch.device) -> StatePlan:
        """``blocks`` of a segment are the block to read, -1 for none, and the block to write."""
        sources = np.array([segment.blocks[0] for segment in segments])
        return StatePlan(
            torch.from_numpy(np.maximum(sources, 0)).to(device),
            torch.from_numpy(np.array([segment.blocks[1] for segment in segments])).to(device),
            torch.from_numpy(sources < 0).to(device),
            _one_row_sequences(segments, device),
            tuple(
                SequenceChunk(index, slice(segment.first_row, segment.first_row + segment.rows))
                for index, segment in enumerate(segments)
                if segment.rows > 1
            ),
        )

    def load(self, plan: StepPlan) -> list[torch.Tensor]:
        """Every sequence's state before the step, ``[sequences, *shape]`` per tensor, zero where it begins."""
        assert isinstance(plan, StatePlan)
        states = [cache.index_select(0, plan.sources) for cache in self._cache]
        for state in states:
            state[plan.begins] = 0
        return states

    def store(self, plan: StepPlan, states: Sequence[torch.Tensor]) -> None:
        """Every sequence's state after the step."""
        assert isinstance(plan, StatePlan)
        for cache, state in zip(self._cache, states, strict=True):
            cache.index_copy_(0, plan.destinations, state)
        self._stored(self.name)


def _one_row_sequences(segments: Sequence[Segment], device: torch.device) -> OneRowSequences | None:
    """Slices where they come first in the step, as decode steps do, so that nothing is gathered."""
    sequences = [index for index, segment in enumerate(segments) if segment.rows == 1]
    if not sequences:
        return None
    rows = [segments[index].first_row for index in sequences]
    if rows == sequences == list(range(len(sequences))):
        leading = slice(0, len(sequences))
        return OneRowSequences(leading, leading)
    return OneRowSequences(torch.tensor(sequences, device=device), torch.tensor(rows, device=device))
