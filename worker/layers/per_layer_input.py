"""Per-layer inputs (Gemma 3n, 2025): every token brings a small vector of its own for each layer.

``PerLayerInputs`` makes them once per step; each layer's ``PerLayerGate`` turns its own into something to add to the
residual stream.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from worker.layers.linear import Linear
from worker.layers.rms_norm import RMSNorm
from worker.layers.weights import Slot, WeightFormat


class PerLayerInputs:
    """``(norm(projection(embedding) * projection_scale) + lookup(token)) * sum_scale``, ``width`` wide for each layer.

    ``table`` is ``[vocab, layers * width]``, ``projection`` ``[layers * width, hidden]``. Only the vectors of the first
    ``used_layers`` are made.
    """

    def __init__(
        self,
        vocab_size: int,
        layers: int,
        width: int,
        hidden_size: int,
        norm_epsilon: float,
        weight_format: WeightFormat,
        *,
        used_layers: int,
        projection_scale: float,
        sum_scale: float,
    ) -> None:
        self._width = width
        self._used = used_layers * width
        self._projection_scale = projection_scale
        self._sum_scale = sum_scale
        self._lookup_scale = weight_format.rounded(width**0.5)
        self.table = weight_format.empty(vocab_size, layers * width)
        self.projection = weight_format.empty(layers * width, hidden_size)
        self.norm = RMSNorm(width, norm_epsilon, weight_format)

    def slots(self, prefix: str) -> Iterator[Slot]:
        """The table, the projection and its norm; ``prefix`` is the model's."""
        yield Slot(f"{prefix}.embed_tokens_per_layer.weight", self.table)
        yield Slot(f"{prefix}.per_layer_model_projection.weight", self.projection)
        yield from self.norm.slots(f"{prefix}.per_layer_projection_norm")

    def __call__(self, token_ids: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """Int64 ``[rows]`` and their embeddings ``[rows, hidden]`` to ``[rows, used_layers, width]``."""
        shape = (len(token_ids), -1, self._width)
        projected = F.linear(embedded, self.projection[: self._used]).mul_(self._projection_scale)
        found = F.embedding(token_ids, self.table[:, : self._used]).mul_(self._lookup_scale)
        return self.norm(projected.view(shape)).add_(found.view(shape)).mul_(self._sum_scale)


class PerLayerGate:
    """``norm(projection(gelu(gate(hidden)) * vector))``, for one layer."""

    def __init__(self, width: int, hidden_size: int, norm_epsilon: float, weight_format: WeightFormat) -> None:
        self.gate = Linear({"per_layer_input_gate": width}, hidden_size, weight_format)
        self.projection = Linear({"per_layer_projection": hidden_size}, width, weight_format)
        self.norm = RMSNorm(hidden_size, norm_epsilon, weight_format)

    def slots(self, prefix: str) -> Iterator[Slot]:
        """Gate, projection and norm; ``prefix`` is the layer's."""
        yield from self.gate.slots(prefix)
        yield from self.projection.slots(prefix)
        yield from self.norm.slots(f"{prefix}.post_per_layer_input_norm")

    def __call__(self, hidden: torch.Tensor, vector: torch.Tensor) -> torch.Tensor:
        """``[rows, hidden]`` and ``[rows, width]`` to a new ``[rows, hidden]``."""
        gated = F.gelu(self.gate(hidden), approximate="tanh").mul_(vector)
        return self.norm(self.projection(gated))
