"""Decode steps as graphs: a step is one launch, where it would be hundreds of small ones from Python.

A runner has one of these if its model can be captured where it computes: CUDA graphs on a GPU, recorded calls of
compiled kernels on a CPU; see ``worker.captures``. A graph is made when a step of its size comes for the first time,
and lives as long as the runner. A step whose sequences all compute one row has a size: its rows and its longest
context, both rounded up. Rows are filled up with some that read one token of the first sequence and store nothing. A
graph reads its step from memory at fixed addresses, which is loaded before it is launched. Every other step, and every
step after a capture has failed, is computed as it is anywhere else.

Of CUDA graphs, captures and launches have not been run on a GPU; sizes, padding and loading are tested on the CPU.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kernels.attention.segments import KeepablePlan, copy_to_kept
from worker.captures import Capture, Launch
from worker.layers.gated_mlp import GatedMLP
from worker.models.decoder import Decoder
from worker.models.model import Model, RowSet, StepInputs
from worker.ranks.commands import SequenceRows

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GraphSize:
    """A step of ``rows`` sequences with one row each, none with more than ``context`` tokens."""

    rows: int
    context: int

    @classmethod
    def of(cls, scheduled: Sequence[SequenceRows], capture: Capture) -> "GraphSize | None":
        """The size that serves a step, or None for a step that no graph can serve."""
        if not scheduled or any(one.rows != 1 or not one.logit_rows for one in scheduled):
            return None
        rows = capture.rows(len(scheduled))
        if rows is None:
            return None
        return cls(rows, capture.context(max(one.context for one in scheduled)))


def padded(scheduled: Sequence[SequenceRows], size: GraphSize, block_sizes: Sequence[int]) -> list[SequenceRows]:
    """A step with rows that nobody wants behind it; ``block_sizes`` are of the KV cache groups.

    Such a row sees one token of the block that the first sequence writes to, so what it computes are numbers.
    """
    first = scheduled[0]
    blocks = tuple(
        table[[(first.context - 1) // block_size]] for table, block_size in zip(first.tables, block_sizes, strict=True)
    )
    nobody = SequenceRows(token_ids=np.zeros(1, dtype=np.int64), first=0, logit_rows=1, tables=blocks)
    return [*scheduled, *[nobody] * (size.rows - len(scheduled))]


def can_be_captured(model: Model) -> bool:
    """Whether a decode step of this model is the same launches whatever the tokens: no experts, no states."""
    if not isinstance(model, Decoder) or type(model).forward is not Decoder.forward:
        return False
    layers = (*model.before_last_owner, *model.from_last_owner)
    return all(isinstance(layer.feed_forward, GatedMLP) for layer in layers) and model.keys_only is None


class KeptInputs:
    """One size's inputs: what a graph was captured with, and what every later step is copied into."""

    def __init__(self, size: GraphSize, like: StepInputs, device: torch.device) -> None:
        """``like`` is a padded step of this size, whose layers share plans as all steps' do."""
        self._token_ids = torch.zeros(size.rows, dtype=torch.int64, device=device)
        positions = torch.zeros(size.rows, dtype=torch.int64, device=device)
        self._plans = [plan.kept(size.rows, size.context, device) for plan in _distinct(like)]
        index = {id(plan): number for number, plan in enumerate(_distinct(like))}
        plans = {name: self._plans[index[id(plan)]] for name, plan in like.rows.plans.items()}
        rows = RowSet(positions, plans)
        self.step = StepInputs(self._token_ids, rows, rows, None)

    def load(self, step: StepInputs, real: int) -> None:
        """Copy a padded step that was planned on the CPU. Rows from ``real`` on store nothing."""
        copy_to_kept(self._token_ids, step.token_ids)
        copy_to_kept(self.step.rows.positions, step.rows.positions)
        for kept, plan in zip(self._plans, _distinct(step), strict=True):
            kept.load(plan, real)


class DecodeGraphs:
    """See the module."""

    def __init__(self, model: Model, device: torch.device, block_sizes: Sequence[int], capture: Capture) -> None:
        """``block_sizes`` are of the KV cache groups."""
        self._model = model
        self._device = device
        self._block_sizes = block_sizes
        self._capture = capture
        self._graphs: dict[GraphSize, tuple[KeptInputs, Launch]] = {}
        self._has_failed = False

    def size_of(self, scheduled: Sequence[SequenceRows]) -> GraphSize | None:
        """The graph for a step, or None if it is to be computed without one."""
        return None if self._has_failed else GraphSize.of(scheduled, self._capture)

    def pad(self, scheduled: Sequence[SequenceRows], size: GraphSize) -> Sequence[SequenceRows]:
        """See ``padded``."""
        return scheduled if len(scheduled) == size.rows else padded(scheduled, size, self._block_sizes)

    def forward(self, step: StepInputs, size: GraphSize, real: int) -> torch.Tensor | None:
        """Logits of the first ``real`` rows of a padded step that was planned on the CPU; None if there is no graph."""
        if size not in self._graphs:
            inputs = KeptInputs(size, step, self._device)
            inputs.load(step, real)
            try:
                self._graphs[size] = inputs, self._capture(lambda: self._logits(inputs.step))
            except RuntimeError as error:
                log.warning("decode steps are slower, because %s could not be captured: %s", size, error)
                self._has_failed = True
                return None
        inputs, launch = self._graphs[size]
        inputs.load(step, real)
        # The next launch writes its logits to the same place.
        return launch()[:real].clone()

    def _logits(self, step: StepInputs) -> torch.Tensor:
        logits = self._model.forward(step)
        assert logits is not None, "only a whole model on one rank has graphs"
        return logits


def _distinct(step: StepInputs) -> list[KeepablePlan]:
    """Plans in the order in which layers first use them."""
    found: dict[int, KeepablePlan] = {}
    for plan in step.rows.plans.values():
        assert isinstance(plan, KeepablePlan), "graphs are of attention over pages alone"
        found.setdefault(id(plan), plan)
    return list(found.values())
