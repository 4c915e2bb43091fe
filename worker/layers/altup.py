"""Alternating updates (Baykal et al. 2023, AltUp): several streams, of which every layer computes only one.

A model makes them of its embeddings with ``AltUpSpread`` and one vector of them again with ``AltUpMerge``. In between,
a layer's ``AltUpPrediction`` guesses what it would make of every stream; its ``AltUpCorrection`` corrects the guesses
by what the active one turned out to be.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from worker.layers.linear import Linear
from worker.layers.rms_norm import RMSNorm
from worker.layers.weights import Slot, WeightFormat

_LEAST_MEAN_SQUARE = 1e-5


@dataclass(frozen=True, slots=True)
class AltUpShape:
    """``streams`` of ``hidden_size``, of which ``active`` is computed; ``scale_output`` is AltUpCorrection's."""

    streams: int
    active: int
    hidden_size: int
    norm_epsilon: float
    scale_output: bool


class _StreamRouter:
    """Turns an active row into one factor per stream, from -1 to 1."""

    def __init__(self, shape: AltUpShape, weights: WeightFormat) -> None:
        self.norm = RMSNorm(shape.hidden_size, shape.norm_epsilon, weights)
        self.router = Linear({"modality_router": shape.streams}, shape.hidden_size, weights)
        self._scale = weights.rounded(1.0 / shape.hidden_size)

    def slots(self, prefix: str) -> Iterator[Slot]:
        yield from self.norm.slots(f"{prefix}.router_norm")
        yield from self.router.slots(prefix)

    def __call__(self, active: torch.Tensor) -> torch.Tensor:
        routed = self.router(self.norm(active).mul_(self._scale))
        return routed.float().tanh_().to(active.dtype)


class AltUpPrediction:
    """Before a layer: every stream plus a mixture of all, by factors that the active one decides."""

    def __init__(self, shape: AltUpShape, weights: WeightFormat) -> None:
        self.active = shape.active
        self.router = _StreamRouter(shape, weights)
        self.coefficients = Linear({"prediction_coefs": shape.streams**2}, shape.streams, weights)

    def slots(self, prefix: str) -> Iterator[Slot]:
        """Weights by checkpoint name; ``prefix`` is the module's, such as ``model.layers.0.altup``."""
        yield from self.router.slots(prefix)
        yield from self.coefficients.slots(prefix)

    def __call__(self, streams: torch.Tensor) -> torch.Tensor:
        """``[rows, streams, hidden]`` in, a new tensor out."""
        rows, count, _ = streams.shape
        mixture = self.coefficients(self.router(streams[:, self.active])).view(rows, count, count)
        return torch.baddbmm(streams, mixture, streams)


class AltUpCorrection:
    """After a layer: every predicted stream plus its share of the active one's error."""

    def __init__(self, prediction: AltUpPrediction, shape: AltUpShape, weights: WeightFormat) -> None:
        self._shape = shape
        self._router = prediction.router
        self.coefficients = Linear({"correction_coefs": shape.streams}, shape.streams, weights)
        self.output_scale = weights.empty(shape.hidden_size)

    def slots(self, prefix: str) -> Iterator[Slot]:
        """Weights by checkpoint name, without the router's, which are the prediction's."""
        yield from self.coefficients.slots(prefix)
        yield Slot(f"{prefix}.correct_output_scale", self.output_scale)

    def __call__(self, predicted: torch.Tensor, computed: torch.Tensor) -> torch.Tensor:
        """Predictions and the active stream as computed, ``[rows, hidden]``, to corrected streams, a new tensor."""
        error = computed - predicted[:, self._shape.active]
        shares = self.coefficients(self._router(computed)).add_(1.0)
        return (shares[:, :, None] * error[:, None]).add_(predicted)

    def output(self, corrected: torch.Tensor) -> torch.Tensor:
        """The active stream ``[rows, hidden]``, times a learned scale if the model has ``scale_output``."""
        active = corrected[:, self._shape.active]
        return active * self.output_scale if self._shape.scale_output else active


class AltUpSpread:
    """The first stream is the embedding; the others are projections of it, as long as it is."""

    def __init__(self, shape: AltUpShape, weights: WeightFormat) -> None:
        self._hidden_size = shape.hidden_size
        parts = {str(stream): shape.hidden_size for stream in range(shape.streams - 1)}
        self.projections = Linear(parts, shape.hidden_size, weights)

    def slots(self, prefix: str) -> Iterator[Slot]:
        """Weights by checkpoint name; ``prefix`` is the model's."""
        yield from self.projections.slots(f"{prefix}.altup_projections")

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[rows, hidden]`` to ``[rows, streams, hidden]``."""
        first = hidden[:, None]
        others = self.projections(hidden).view(len(hidden), -1, self._hidden_size)
        return torch.cat((first, _as_long_as(first, others)), dim=1)


class AltUpMerge:
    """The mean of the first stream and of projections of the others, each as long as the first."""

    def __init__(self, shape: AltUpShape, weights: WeightFormat) -> None:
        self.projections = weights.empty(shape.streams - 1, shape.hidden_size, shape.hidden_size)

    def slots(self, prefix: str) -> Iterator[Slot]:
        """Weights by checkpoint name; ``prefix`` is the model's."""
        for stream, projection in enumerate(self.projections):
            yield Slot(f"{prefix}.altup_unembed_projections.{stream}.weight", projection)

    def __call__(self, streams: torch.Tensor) -> torch.Tensor:
        """``[rows, streams, hidden]`` to ``[rows, hidden]``."""
        first = streams[:, :1]
        others = torch.bmm(streams[:, 1:].transpose(0, 1), self.projections.transpose(1, 2)).transpose(0, 1)
        return torch.cat((first, _as_long_as(first, others)), dim=1).mean(dim=1)


def _as_long_as(first: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """``others`` with the root mean square of ``first``."""
    wanted = first.square().mean(dim=-1, keepdim=True).sqrt()
    present = others.square().mean(dim=-1, keepdim=True).clamp(min=_LEAST_MEAN_SQUARE).sqrt()
    return others * wanted / present
