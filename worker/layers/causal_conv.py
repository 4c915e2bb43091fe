"""Depthwise causal convolution of a recurrent layer, over the rows of many sequences."""

from collections.abc import Iterator, Sequence
from functools import cached_property

import torch

from kernels.causal_conv import convolve_chunk, convolve_row
from worker.layers.recurrent_state import StatePlan
from worker.layers.weights import Slot, TensorPart, WeightFormat
from worker.ranks.span import Span


class CausalConv:
    """``weight`` ``[channels, 1, kernel]``, of the checkpoint's channels in ``spans``, one span after the other.

    The last ``kernel - 1`` inputs are state. Where the rows' channels are in another order, ``order`` is int64
    ``[channels]``: channel ``i`` of a row has the weights of channel ``order[i]``.
    """

    def __init__(
        self,
        spans: Sequence[Span],
        kernel: int,
        weight_format: WeightFormat,
        *,
        bias: bool,
        order: torch.Tensor | None = None,
    ) -> None:
        channels = sum(map(len, spans))
        self._part = TensorPart(0, tuple(spans))
        self.weight = weight_format.empty(channels, 1, kernel)
        self.bias = weight_format.empty(channels) if bias else None
        self._order = order

    def slots(self, name: str) -> Iterator[Slot]:
        """Where ``{name}.weight`` and ``.bias`` go."""
        yield Slot(f"{name}.weight", self.weight, self._part)
        if self.bias is not None:
            yield Slot(f"{name}.bias", self.bias, self._part)

    @cached_property
    def _ordered(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Weight and bias in the rows' order. Weights are loaded before the first step."""
        weight = self.weight[:, 0]
        if self._order is None:
            return weight, self.bias
        bias = None if self.bias is None else self.bias.index_select(0, self._order)
        return weight.index_select(0, self._order), bias

    def __call__(self, rows: torch.Tensor, states: torch.Tensor, plan: StatePlan) -> torch.Tensor:
        """``[rows, channels]`` in and out; ``states`` ``[sequences, channels, kernel - 1]`` are updated in place."""
        weight, bias = self._ordered
        out = torch.empty_like(rows)
        if plan.singles is not None:
            at, of = plan.singles.rows, plan.singles.sequences
            out[at], states[of] = convolve_row(rows[at], states[of], weight, bias)
        for chunk in plan.chunks:
            state = states[chunk.sequence]
            out[chunk.rows], states[chunk.sequence] = convolve_chunk(rows[chunk.rows], state, weight, bias)
        return out
