"""Decode steps as CUDA graphs: a step is one launch, where it would be hundreds of small ones from Python.

A runner on a CUDA device has one of these if its model can be captured. A graph is made when a step of its size comes
for the first time, and lives as long as the runner. A step whose sequences all compute one row has a size: its rows and
its longest context, both rounded up. Rows are filled up with some that read one token of the first sequence and store
nothing. A graph reads its step from tensors at fixed addresses, which are loaded before it is launched. Every other
step, and every step after a capture has failed, is computed as it is anywhere else.

Captures and launches have not been run on a GPU; sizes, padding and loading are tested on the CPU.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kernels.attention.paged import Batch, PagedPlan
from kernels.pages import Slots
from worker.layers.gated_mlp import GatedMLP
from worker.models.decoder import Decoder
from worker.models.model import Model, RowSet, StepInputs
from worker.ranks.commands import SequenceRows

log = logging.getLogger(__name__)

MOST_ROWS = 256
"""Larger batches keep a GPU busy without graphs."""

SHORTEST_CONTEXT = 1024
CONTEXT_GROWTH = 4
"""Splits of the longest context of a size are the launch's grid, so a short context must not pay for the longest."""

Launch = Callable[[], torch.Tensor]
Capture = Callable[[Launch], Launch]
"""Turns a step into something that computes the same step again from whatever its tensors then hold."""


@dataclass(frozen=True, slots=True)
class GraphSize:
    """A step of ``rows`` sequences with one row each, none with more than ``context`` tokens."""

    rows: int
    context: int

    @classmethod
    def of(cls, scheduled: Sequence[SequenceRows]) -> "GraphSize | None":
        """The size that serves a step, or None for a step that no graph can serve."""
        if not scheduled or len(scheduled) > MOST_ROWS or any(one.rows != 1 or not one.logit_rows for one in scheduled):
            return None
        rows = len(scheduled)
        # Powers of two up to 8, then multiples of 8.
        rows = 1 << (rows - 1).bit_length() if rows <= 8 else -(-rows // 8) * 8
        context = SHORTEST_CONTEXT
        while context < max(one.context for one in scheduled):
            context *= CONTEXT_GROWTH
        return cls(rows, context)


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


class StaticInputs:
    """One size's tensors: what a graph was captured with, and what every later step is copied into."""

    def __init__(self, size: GraphSize, like: StepInputs, device: torch.device) -> None:
        """``like`` is a padded step of this size, whose layers share plans as all steps' do."""
        self._token_ids = torch.zeros(size.rows, dtype=torch.int64, device=device)
        positions = torch.zeros(size.rows, dtype=torch.int64, device=device)
        self._plans = [_static_plan(plan, size, device) for plan in _distinct(like)]
        index = {id(plan): number for number, plan in enumerate(_distinct(like))}
        plans = {name: self._plans[index[id(plan)]] for name, plan in like.rows.plans.items()}
        rows = RowSet(positions, plans)
        self.step = StepInputs(self._token_ids, rows, rows, None)

    def load(self, step: StepInputs, real: int) -> None:
        """Copy a padded step that was planned on the CPU. Rows from ``real`` on store nothing."""
        _copy(self._token_ids, step.token_ids)
        _copy(self.step.rows.positions, step.rows.positions)
        for static, plan in zip(self._plans, _distinct(step), strict=True):
            assert static.decodes is not None
            assert plan.decodes is not None
            plan.slots.blocks[real:] = -1
            _copy(static.slots.blocks, plan.slots.blocks)
            _copy(static.slots.offsets, plan.slots.offsets)
            _copy(static.decodes.sequences, plan.decodes.sequences)
            # Beyond a sequence's context nobody reads its table.
            _copy(static.decodes.tables[:, : plan.decodes.tables.shape[1]], plan.decodes.tables)


class DecodeGraphs:
    """See the module."""

    def __init__(
        self, model: Model, device: torch.device, block_sizes: Sequence[int], capture: Capture | None = None
    ) -> None:
        """``block_sizes`` are of the KV cache groups."""
        self._model = model
        self._device = device
        self._block_sizes = block_sizes
        self._capture = capture or _Capture(device)
        self._graphs: dict[GraphSize, tuple[StaticInputs, Launch]] = {}
        self._has_failed = False

    def size_of(self, scheduled: Sequence[SequenceRows]) -> GraphSize | None:
        """The graph for a step, or None if it is to be computed without one."""
        return None if self._has_failed else GraphSize.of(scheduled)

    def pad(self, scheduled: Sequence[SequenceRows], size: GraphSize) -> list[SequenceRows]:
        """See ``padded``."""
        return padded(scheduled, size, self._block_sizes)

    def forward(self, step: StepInputs, size: GraphSize, real: int) -> torch.Tensor | None:
        """Logits of the first ``real`` rows of a padded step that was planned on the CPU; None if there is no graph."""
        if size not in self._graphs:
            inputs = StaticInputs(size, step, self._device)
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


class _Capture:
    """Captures on one device; all graphs share their memory, since only one runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Launch) -> Launch:
        """Once without capture, so that kernels are compiled and libraries have their memory; then for the graph."""
        aside = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(aside):
            run()
        torch.cuda.current_stream(self._device).wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        # Threads of transfers may go on meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            logits = run()

        def launch() -> torch.Tensor:
            graph.replay()
            return logits

        return launch


def _distinct(step: StepInputs) -> list[PagedPlan]:
    """Plans in the order in which layers first use them."""
    found: dict[int, PagedPlan] = {}
    for plan in step.rows.plans.values():
        assert isinstance(plan, PagedPlan), "graphs are of attention over pages alone"
        found.setdefault(id(plan), plan)
    return list(found.values())


def _static_plan(plan: PagedPlan, size: GraphSize, device: torch.device) -> PagedPlan:
    def fixed(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.full(shape, -1, dtype=dtype, device=device)

    return PagedPlan(
        shape=plan.shape,
        window=plan.window,
        sinks=plan.sinks,
        slots=Slots(fixed(size.rows, dtype=torch.int64), fixed(size.rows, dtype=torch.int64)),
        decodes=Batch(
            sequences=fixed(size.rows, 3, dtype=torch.int32),
            tables=fixed(size.rows, -(-size.context // plan.shape.block_size), dtype=torch.int32),
            most_rows=1,
            longest_context=size.context,
        ),
        chunks=None,
    )


def _copy(target: torch.Tensor, values: torch.Tensor) -> None:
    """Without waiting: pinned memory is used again only when its copy is over."""
    target.copy_(values.pin_memory() if target.is_cuda else values, non_blocking=True)
