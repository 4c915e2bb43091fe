"""The feed-forward half of a plain decoder layer."""

from collections.abc import Callable, Iterator
from typing import Protocol

import torch

from kernels.pointwise import silu_and_multiply
from worker.layers.linear import Linear
from worker.layers.weights import Slot, WeightFormat


class FeedForward(Protocol):
    """What follows attention in a layer: ``[rows, hidden]`` in and out."""

    def slots(self, prefix: str) -> Iterator[Slot]:
        """Weights by checkpoint name; ``prefix`` is the module's, such as ``model.layers.0.mlp``."""
        ...

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """A new tensor."""
        ...


class GatedMLP:
    """``down(activation(gate(x)) * up(x))`` with gate and up as one matrix (Shazeer 2020)."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        weight_format: WeightFormat,
        *,
        bias: bool = False,
        activate: Callable[[torch.Tensor], torch.Tensor] = silu_and_multiply,
    ) -> None:
        widths = {"gate_proj": intermediate_size, "up_proj": intermediate_size}
        self._activate = activate
        self.gate_up = Linear(widths, hidden_size, weight_format, bias=bias)
        self.down = Linear({"down_proj": hidden_size}, intermediate_size, weight_format, bias=bias)

    def slots(self, prefix: str) -> Iterator[Slot]:
        """``gate_proj``, ``up_proj`` and ``down_proj``."""
        yield from self.gate_up.slots(prefix)
        yield from self.down.slots(prefix)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[rows, hidden]`` in and out."""
        return self.down(self._activate(self.gate_up(hidden)))
