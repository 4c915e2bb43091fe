"""The recurrent half of a gated delta net (Yang et al. 2024): everything that a sequence's later rows depend on.

Rows are projected, convolved over time, and change the layer's state; what they read from it goes on to the layer's
output. Built with a model; its state is bound like every cached layer's.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from kernels.delta_rule import DeltaRows, unit_vectors
from kernels.table import delta_rule
from worker.kv_cache.specs import LayerName, StateRegion
from worker.layers.cached_layer import StepPlan
from worker.layers.causal_conv import CausalConv
from worker.layers.linear import Linear
from worker.layers.recurrent_state import RecurrentState, StatePlan
from worker.layers.weights import Slot, TensorPart, WeightFormat
from worker.ranks.rank_group import split
from worker.ranks.span import Span


@dataclass(frozen=True, slots=True)
class DeltaNetShape:
    """Sizes of a gated delta net. Each key head serves ``value_heads / key_heads`` consecutive value heads."""

    hidden_size: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int

    @property
    def group(self) -> int:
        """Value heads of one key head."""
        return self.value_heads // self.key_heads

    @property
    def channels_per_key_head(self) -> tuple[int, int, int]:
        """Convolved channels that belong to one key head: its query, its key, the values of its group."""
        return self.key_dim, self.key_dim, self.group * self.value_dim


class DeltaRecurrence:
    """The state is a float32 matrix per value head, then the last inputs of the convolution in the cache's dtype.

    Channels are ordered by key head throughout, in the state too, so that heads can be split over ranks: this one has
    ``value_heads`` of all that ``shape`` counts, and their key heads.
    """

    def __init__(
        self, name: LayerName, shape: DeltaNetShape, weight_format: WeightFormat, cache_dtype: torch.dtype
    ) -> None:
        key_heads = split(weight_format.ranks, shape.key_heads, "linear_num_key_heads")
        channels = _channels(shape, key_heads)
        self.value_heads = key_heads.times(shape.group)
        shape = replace(shape, key_heads=len(key_heads), value_heads=len(self.value_heads))
        per_key_head = sum(shape.channels_per_key_head)
        self.state = RecurrentState(
            name,
            [
                StateRegion((shape.value_heads, shape.key_dim, shape.value_dim), torch.float32),
                StateRegion((shape.key_heads, per_key_head, shape.kernel - 1), cache_dtype),
            ],
        )
        self._shape = shape
        self._rule = delta_rule(weight_format.device)
        parts = {
            "in_proj_qkvz": key_heads.times(per_key_head + shape.group * shape.value_dim),
            "in_proj_ba": key_heads.times(2 * shape.group),
        }
        self.projection = Linear(parts, shape.hidden_size, weight_format)
        self._widths = tuple(self.projection.widths.values())
        self.convolution = CausalConv(
            channels, shape.kernel, weight_format, bias=False, order=_channel_order(shape, weight_format.device)
        )
        self.decay_rate_log = weight_format.empty(shape.value_heads)
        self.step_bias = weight_format.empty(shape.value_heads)

    def slots(self, prefix: str) -> Iterator[Slot]:
        """Weights by checkpoint name; ``prefix`` is the module's, such as ``model.layers.0.linear_attn``."""
        yield from self.projection.slots(prefix)
        yield from self.convolution.slots(f"{prefix}.conv1d")
        by_value_head = TensorPart(0, (self.value_heads,))
        yield Slot(f"{prefix}.A_log", self.decay_rate_log, by_value_head)
        yield Slot(f"{prefix}.dt_bias", self.step_bias, by_value_head)

    def __call__(self, hidden: torch.Tensor, plan: StepPlan) -> tuple[torch.Tensor, torch.Tensor]:
        """``[rows, hidden]`` to what is read and the gate on it, both ``[rows, value_heads, value_dim]``."""
        assert isinstance(plan, StatePlan)
        shape, count = self._shape, len(hidden)
        by_head = shape.channels_per_key_head
        # Of every key head: query, key, values, gates; of its values: beta, step.
        mixed, scalars = (
            part.view(count, shape.key_heads, -1)
            for part in self.projection(hidden).split_with_sizes(self._widths, dim=1)
        )
        beta, step = (part.flatten(1) for part in scalars.chunk(2, dim=2))
        gate = mixed[:, :, sum(by_head) :].reshape(count, shape.value_heads, shape.value_dim)

        matrices, inputs = self.state.load(plan)
        convolved = self.convolution(
            mixed[:, :, : sum(by_head)].flatten(1), inputs.view(len(inputs), -1, shape.kernel - 1), plan
        )
        convolved = F.silu(convolved).float().view(count, shape.key_heads, -1)
        query, key, value = convolved.split_with_sizes(by_head, dim=2)
        rows = DeltaRows(
            query=unit_vectors(query) * shape.key_dim**-0.5,
            key=unit_vectors(key),
            value=value.reshape(gate.shape),
            # A step's length times a rate (Mamba, Gu & Dao 2023).
            log_decay=-self.decay_rate_log.float().exp() * F.softplus(step.float() + self.step_bias),
            beta=beta.sigmoid().float(),
        )
        read = self._apply_rule(rows, matrices, plan)
        self.state.store(plan, [matrices, inputs])
        return read.to(hidden.dtype), gate

    def _apply_rule(self, rows: DeltaRows, matrices: torch.Tensor, plan: StatePlan) -> torch.Tensor:
        """What every row reads; every sequence's matrices are updated in place."""
        read = torch.empty_like(rows.value)
        if plan.singles is not None:
            at, of = plan.singles.rows, plan.singles.sequences
            read[at], matrices[of] = self._rule.delta_rule_row(rows.at(at), matrices[of])
        for chunk in plan.chunks:
            state = matrices[chunk.sequence]
            read[chunk.rows], matrices[chunk.sequence] = self._rule.delta_rule_chunk(rows.at(chunk.rows), state)
        return read


def _channels(shape: DeltaNetShape, key_heads: Span) -> list[Span]:
    """Where a checkpoint, which has all queries, all keys, all values, has those of some key heads."""
    whole = shape.key_heads * sum(shape.channels_per_key_head)
    begin = 0
    spans = []
    for width in shape.channels_per_key_head:
        spans.append(key_heads.times(width).within(begin, whole))
        begin += shape.key_heads * width
    return spans


def _channel_order(shape: DeltaNetShape, device: torch.device) -> torch.Tensor:
    """Where, among all queries, all keys, all values, the channels of every key head are."""
    begin = 0
    parts = []
    for width in shape.channels_per_key_head:
        end = begin + shape.key_heads * width
        parts.append(torch.arange(begin, end, device=device).view(shape.key_heads, width))
        begin = end
    return torch.cat(parts, dim=1).flatten()
