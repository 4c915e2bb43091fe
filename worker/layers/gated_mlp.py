"""The feed-forward half of a plain decoder layer."""

from collections.abc import Callable, Iterator
from typing import Protocol

import torch

from kernels import table
from worker.layers.linear import Linear, SummedLinear
from worker.layers.weights import Slot, WeightFormat
from worker.ranks.rank_group import split


class FeedForward(Protocol):
    """What follows attention in a layer: ``[rows, hidden]`` in and out."""

    def slots(self, prefix: str) -> Iterator[Slot]:
        """Weights by checkpoint name; ``prefix`` is the module's, such as ``model.layers.0.mlp``."""
        ...

    def __call__(self, hidden: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """A new tensor, with ``residual`` added to it."""
        ...


class GatedMLP:
    """``down(activation(gate(x)) * up(x))`` with gate and up as one matrix (Shazeer 2020).

    ``activate`` is SiLU unless given. ``intermediate_size``, which the configuration calls ``field``, is split over
    ranks.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        weight_format: WeightFormat,
        *,
        bias: bool = False,
        activate: Callable[[torch.Tensor], torch.Tensor] | None = None,
        field: str = "intermediate_size",
    ) -> None:
        width = split(weight_format.ranks, intermediate_size, field)
        self._activate = activate
        # A product that ends with SiLU is one kernel where there is one.
        arrange = table.gated_matrix if activate is None else table.matrix
        parts = {"gate_proj": width, "up_proj": width}
        self.gate_up = Linear(parts, hidden_size, weight_format, bias=bias, arrange=arrange)
        self.down = SummedLinear("down_proj", hidden_size, width, weight_format, bias=bias)

    def slots(self, prefix: str) -> Iterator[Slot]:
        """``gate_proj``, ``up_proj`` and ``down_proj``."""
        yield from self.gate_up.slots(prefix)
        yield from self.down.slots(prefix)

    def partial(self, hidden: torch.Tensor) -> torch.Tensor:
        """This rank's summand of the output."""
        return self.down.partial(self._inner(hidden))

    def __call__(self, hidden: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """``[rows, hidden]`` in and out, with ``residual`` added to what comes out."""
        return self.down(self._inner(hidden), residual)

    def _inner(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[rows, hidden]`` to ``[rows, intermediate]``."""
        product = self.gate_up(hidden)
        return product if self._activate is None else self._activate(product)
