"""The recurrent half of a Mamba (Gu & Dao 2023): everything that a sequence's later rows depend on.

Input rows, already projected, are convolved over time, and say themselves how they change the layer's state and what
is read from it. The gate and the projections around it are the model's. Built with a model; its state is bound like
every cached layer's.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F

from kernels.selective_scan import scan_chunk, scan_row
from worker.kv_cache.specs import LayerName, StateRegion
from worker.layers.cached_layer import StepPlan
from worker.layers.causal_conv import CausalConv
from worker.layers.linear import Linear
from worker.layers.recurrent_state import RecurrentState, StatePlan
from worker.layers.rms_norm import RMSNorm
from worker.layers.weights import Slot, WeightFormat
from worker.ranks.span import Span


@dataclass(frozen=True, slots=True)
class MambaShape:
    """Sizes of a Mamba: ``channels`` with ``d_state`` numbers each, steps made of ``dt_rank`` numbers."""

    channels: int
    d_state: int
    dt_rank: int
    kernel: int
    norm_epsilon: float


class Mamba:
    """The state is a float32 matrix ``[channels, d_state]``, then the last inputs of the convolution.

    Steps, inputs and readings of the state are normalised, as in Jamba (Lieber et al. 2024).
    """

    def __init__(
        self, name: LayerName, shape: MambaShape, weight_format: WeightFormat, cache_dtype: torch.dtype
    ) -> None:
        self.state = RecurrentState(
            name,
            [
                StateRegion((shape.channels, shape.d_state), torch.float32),
                StateRegion((shape.channels, shape.kernel - 1), cache_dtype),
            ],
        )
        self._widths = (shape.dt_rank, shape.d_state, shape.d_state)
        channels = Span(0, shape.channels, shape.channels)
        self.convolution = CausalConv([channels], shape.kernel, weight_format, bias=True)
        self.selection = Linear({"x_proj.0": sum(self._widths)}, shape.channels, weight_format)
        self.norms = tuple(RMSNorm(width, shape.norm_epsilon, weight_format) for width in self._widths)
        self.step = Linear({"dt_proj.0": shape.channels}, shape.dt_rank, weight_format)
        self.step_bias = weight_format.empty(shape.channels)
        self.decay_rate_log = weight_format.empty(shape.channels, shape.d_state)
        self.skip = weight_format.empty(shape.channels)

    def slots(self, prefix: str) -> Iterator[Slot]:
        """Weights by checkpoint name, of lists with one entry; ``prefix`` is such as ``model.layers.0.mamba``."""
        yield from self.convolution.slots(f"{prefix}.conv1d")
        yield from self.selection.slots(prefix)
        for name, norm in zip(["dt", "B", "C"], self.norms, strict=True):
            yield from norm.slots(f"{prefix}.{name}_layernorm")
        yield from self.step.slots(prefix)
        yield Slot(f"{prefix}.dt_proj.0.bias", self.step_bias)
        yield Slot(f"{prefix}.A_log.0", self.decay_rate_log)
        yield Slot(f"{prefix}.D.0", self.skip)

    @cached_property
    def _constants(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Decay rates, skip weights and the bias of the steps, in float32. Weights are loaded before the first step."""
        return -self.decay_rate_log.float().exp(), self.skip.float(), self.step_bias.float()

    def __call__(self, rows: torch.Tensor, plan: StepPlan) -> torch.Tensor:
        """``[rows, channels]`` to float32 of the same shape."""
        assert isinstance(plan, StatePlan)
        rates, skip, step_bias = self._constants
        states, inputs = self.state.load(plan)
        x = F.silu(self.convolution(rows, inputs, plan))
        selected = self.selection(x).split_with_sizes(self._widths, dim=1)
        step, b, c = (norm(part) for norm, part in zip(self.norms, selected, strict=True))
        dt = F.softplus(self.step(step).float() + step_bias)
        x, b, c = x.float(), b.float(), c.float()
        out = torch.empty_like(x)
        if plan.singles is not None:
            at, of = plan.singles.rows, plan.singles.sequences
            out[at], states[of] = scan_row(states[of], x[at], dt[at], rates, b[at], c[at], skip)
        for chunk in plan.chunks:
            at, index = chunk.rows, chunk.sequence
            out[at], states[index] = scan_chunk(states[index], x[at], dt[at], rates, b[at], c[at], skip)
        self.state.store(plan, [states, inputs])
        return out
