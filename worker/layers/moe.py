"""A mixture of experts as the feed-forward half of a layer: gate, router, many small gated MLPs, a shared one beside.

Built with its model like any feed-forward; experts are stored as two matrices for all of them and loaded one by one.
Every rank has a part of every expert, and chooses the same ones as the others do.
"""

from collections.abc import Callable, Iterator

import torch

from kernels.table import routed_experts
from worker.layers.gated_mlp import GatedMLP
from worker.layers.linear import Linear
from worker.layers.router import Router
from worker.layers.weights import Slot, TensorPart, WeightFormat
from worker.ranks.rank_group import split


class Experts:
    """Gated MLPs, a few of them for each row.

    ``gate_up`` is ``[experts, 2 * width, hidden]``, gate first; ``down`` is ``[experts, hidden, width]``. The width is
    this rank's part of ``intermediate_size``, which the configuration calls ``field``.
    """

    def __init__(
        self,
        count: int,
        hidden_size: int,
        intermediate_size: int,
        weight_format: WeightFormat,
        *,
        activate: Callable[[torch.Tensor], torch.Tensor] | None = None,
        field: str = "moe_intermediate_size",
    ) -> None:
        self._activate = activate or weight_format.pointwise.silu_and_multiply
        self._route = routed_experts(weight_format.device)
        self._width = split(weight_format.ranks, intermediate_size, field)
        self.gate_up = weight_format.empty(count, 2 * len(self._width), hidden_size)
        self.down = weight_format.empty(count, hidden_size, len(self._width))

    def slots(self, prefix: str) -> Iterator[Slot]:
        """``{prefix}.3.gate_proj.weight`` and so on."""
        width, rows, columns = len(self._width), TensorPart(0, (self._width,)), TensorPart(1, (self._width,))
        for expert, (gate_up, down) in enumerate(zip(self.gate_up, self.down, strict=True)):
            yield Slot(f"{prefix}.{expert}.gate_proj.weight", gate_up[:width], rows)
            yield Slot(f"{prefix}.{expert}.up_proj.weight", gate_up[width:], rows)
            yield Slot(f"{prefix}.{expert}.down_proj.weight", down, columns)

    def fused_slots(self, prefix: str) -> Iterator[Slot]:
        """``{prefix}.gate_up_proj`` and ``{prefix}.down_proj``, of checkpoints with one tensor for all experts."""
        size = self._width.whole
        gate_up = (self._width.within(0, 2 * size), self._width.within(size, 2 * size))
        yield Slot(f"{prefix}.gate_up_proj", self.gate_up, TensorPart(1, gate_up))
        yield Slot(f"{prefix}.down_proj", self.down, TensorPart(2, (self._width,)))

    def __call__(self, hidden: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """``[rows, hidden]`` to this rank's summand of the output; expert ids and weights are ``[rows, k]``."""
        return self._route(hidden, self.gate_up, self.down, experts, weights, self._activate)


class SharedExpert:
    """A gated MLP that every row passes, with ``gated`` times the sigmoid of a learned projection of the row.

    ``field`` is what the configuration calls its ``intermediate_size``.
    """

    def __init__(
        self,
        name: str,
        hidden_size: int,
        intermediate_size: int,
        weight_format: WeightFormat,
        *,
        gated: bool = False,
        field: str = "moe_intermediate_size",
    ) -> None:
        self._name = name
        self.mlp = GatedMLP(hidden_size, intermediate_size, weight_format, field=field)
        self.gate = Linear({f"{name}_gate": 1}, hidden_size, weight_format) if gated else None

    def slots(self, prefix: str) -> Iterator[Slot]:
        """``{prefix}.{name}.gate_proj`` and so on, and ``{prefix}.{name}_gate``."""
        yield from self.mlp.slots(f"{prefix}.{self._name}")
        if self.gate is not None:
            yield from self.gate.slots(prefix)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[rows, hidden]`` to this rank's summand of the output."""
        output = self.mlp.partial(hidden)
        return output if self.gate is None else output.mul_(self.gate(hidden).sigmoid())


class MixtureOfExperts:
    """Routed experts, and a shared one added to them.

    ``gate`` is the checkpoint's name of the matrix that scores the experts, ``gate_dtype`` what it is kept and computed
    in if not the model's dtype.
    """

    def __init__(
        self,
        experts: Experts,
        router: Router,
        weight_format: WeightFormat,
        *,
        shared: SharedExpert | None = None,
        gate: str = "gate",
        gate_dtype: torch.dtype | None = None,
    ) -> None:
        count, hidden_size, _ = experts.down.shape
        self._ranks = weight_format.ranks
        self.experts = experts
        self.router = router
        self.shared = shared
        self._gate_name = gate
        self._gate_dtype = gate_dtype or weight_format.dtype
        self.gate = Linear({gate: count}, hidden_size, WeightFormat(self._gate_dtype, weight_format.device))

    def slots(self, prefix: str) -> Iterator[Slot]:
        """``gate``, ``experts`` and the shared expert's."""
        yield from self.gate.slots(prefix)
        yield from self.router.slots(f"{prefix}.{self._gate_name}")
        yield from self.experts.slots(f"{prefix}.experts")
        if self.shared is not None:
            yield from self.shared.slots(prefix)

    def __call__(self, hidden: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """``[rows, hidden]`` in and out, with ``residual`` added to what comes out."""
        experts, weights = self.router(self.gate(hidden.to(self._gate_dtype)).float())
        output = self.experts(hidden, experts, weights)
        whole = self._ranks.sum(output if self.shared is None else output.add_(self.shared(hidden)))
        return whole if residual is None else whole.add_(residual)
