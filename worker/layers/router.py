"""Which experts a row goes to, and how much each counts: pure functions of the router's logits.

A router takes float32 logits ``[rows, experts]`` and returns int64 expert ids and float32 weights, both ``[rows, k]``,
in no particular order. It is made with its mixture of experts and holds at most a correction that was learned.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from worker.layers.weights import Slot, WeightFormat


class Router(Protocol):
    """See the module."""

    def slots(self, prefix: str) -> Iterator[Slot]:
        """Learned parts beside the gate's matrix; ``prefix`` is the gate's, such as ``model.layers.0.mlp.gate``."""
        ...

    def __call__(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Expert ids and weights."""
        ...


@dataclass(frozen=True, slots=True)
class SoftmaxRouter:
    """The ``top_k`` most probable experts (Shazeer et al. 2017), weighted by probability times ``scale``.

    ``renormalize`` makes the chosen probabilities sum to 1, before they are scaled. Of ``groups``, consecutive and
    equal, the ``top_groups`` whose best expert is most probable are considered (DeepSeek-V2, 2024).
    """

    top_k: int
    renormalize: bool
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1

    def slots(self, prefix: str) -> Iterator[Slot]:
        """None."""
        del prefix
        yield from ()

    def __call__(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Expert ids and weights."""
        probabilities = logits.softmax(dim=-1)
        if self.top_groups < self.groups:
            best = probabilities.view(len(logits), self.groups, -1).amax(dim=-1)
            probabilities = probabilities.masked_fill(_outside(best, self.top_groups, logits.shape[-1]), 0.0)
        weights, experts = probabilities.topk(self.top_k, dim=-1)
        if self.renormalize:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return experts, weights * self.scale


class SigmoidRouter:
    """Experts scored one by one and balanced without an auxiliary loss (DeepSeek-V3, 2024, ``noaux_tc``).

    A learned correction is added to the scores to choose by, never to the weights. Of ``groups``, consecutive and
    equal, the ``top_groups`` with the greatest sum of their two best are considered.
    """

    def __init__(
        self,
        experts: int,
        top_k: int,
        weight_format: WeightFormat,
        *,
        renormalize: bool,
        scale: float = 1.0,
        groups: int = 1,
        top_groups: int = 1,
    ) -> None:
        self.correction = WeightFormat(torch.float32, weight_format.device).empty(experts)
        self._top_k = top_k
        self._renormalize = renormalize
        self._scale = scale
        self._groups = groups
        self._top_groups = top_groups

    def slots(self, prefix: str) -> Iterator[Slot]:
        """Where ``e_score_correction_bias`` goes."""
        yield Slot(f"{prefix}.e_score_correction_bias", self.correction)

    def __call__(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Expert ids and weights."""
        scores = logits.sigmoid()
        choice = scores + self.correction
        if self._top_groups < self._groups:
            best_two = choice.view(len(logits), self._groups, -1).topk(2, dim=-1).values.sum(dim=-1)
            choice = choice.masked_fill(_outside(best_two, self._top_groups, logits.shape[-1]), -torch.inf)
        experts = choice.topk(self._top_k, dim=-1).indices
        weights = scores.gather(-1, experts)
        if self._renormalize:
            # Sigmoids may all vanish, unlike probabilities.
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        return experts, weights * self._scale


def _outside(group_scores: torch.Tensor, top_groups: int, experts: int) -> torch.Tensor:
    """Bool ``[rows, experts]``: whether an expert's group is not among the best."""
    outside = torch.ones_like(group_scores, dtype=torch.bool)
    outside.scatter_(-1, group_scores.topk(top_groups, dim=-1).indices, value=False)
    return outside.repeat_interleave(experts // group_scores.shape[-1], dim=-1)
