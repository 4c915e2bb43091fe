"""The attention of Gemma 3, 3n and 4: normalised queries and keys, two types of layers with ropes of their own.

Built with its layer, and called in two halves: ``project`` for every row, ``attend`` for those that go on.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

import torch

from worker.layers.attention import Attention
from worker.layers.linear import Linear, SummedLinear
from worker.layers.rms_norm import RMSNorm, UnscaledRMSNorm
from worker.layers.rotary import Rotation
from worker.layers.weights import Slot, WeightFormat
from worker.models.model import RowSet
from worker.ranks.heads import Heads
from worker.ranks.rank_group import RankGroup


class Values(Enum):
    """Where a layer's cached values come from."""

    PROJECTED = "a projection of their own"
    NORMALIZED = "a projection of their own, normalised without a scale"
    NORMALIZED_KEYS = "the keys' projection, normalised without a scale"


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One layer's attention. ``layer_type`` also names its rope; ``window`` is None for full attention."""

    layer_type: str
    heads: int
    kv_heads: int
    head_dim: int
    window: int | None
    scale: float
    values: Values

    def heads_of(self, ranks: RankGroup) -> Heads:
        """Those of this rank. Raises ``CannotSplit``."""
        return Heads.of(ranks, self.heads, self.kv_heads)


@dataclass(frozen=True, slots=True)
class GemmaShape:
    """Sizes and switches of a model.

    ``norm_offset`` is added to the weight of every norm. The last ``sharing_layers`` read the cache of the last layer
    of their type before them.
    """

    vocab_size: int
    hidden_size: int
    layers: tuple[LayerShape, ...]
    norm_epsilon: float
    attention_bias: bool
    tied_embeddings: bool
    soft_cap: float | None
    norm_offset: float = 0.0
    sharing_layers: int = 0

    def norm(self, weights: WeightFormat, size: int | None = None) -> RMSNorm:
        """A norm of the residual stream, or of vectors of another ``size``."""
        return RMSNorm(size or self.hidden_size, self.norm_epsilon, weights, offset=self.norm_offset)


@dataclass(frozen=True, slots=True)
class Rotations:
    """The rotation of one step's rows for every type of layer."""

    by_type: Mapping[str, Rotation]

    def select(self, rows: torch.Tensor) -> "Rotations":
        """Some of the rows, given by index."""
        return Rotations({layer_type: rotation.select(rows) for layer_type, rotation in self.by_type.items()})


class KeysAndValues:
    """What a layer caches, and with ``queries`` these too.

    Without them it is all that a headless model keeps of its last owner. A sharing layer has no keys and values.
    """

    def __init__(
        self,
        prefix: str,
        layer: LayerShape,
        shape: GemmaShape,
        attention: Attention,
        weights: WeightFormat,
        *,
        queries: bool = False,
    ) -> None:
        self._prefix = f"{prefix}.self_attn"
        self._attention = attention
        self._shape = layer
        self._heads = attention.heads if queries else 0
        self._keys_end = self._heads + attention.kv_heads
        heads = layer.heads_of(weights.ranks)
        parts = {"q_proj": heads.query.times(layer.head_dim)} if queries else {}
        if attention.owns_cache:
            parts["k_proj"] = heads.key_value.times(layer.head_dim)
            if layer.values is not Values.NORMALIZED_KEYS:
                parts["v_proj"] = parts["k_proj"]
        self.projection = Linear(parts, shape.hidden_size, weights, bias=shape.attention_bias)
        self.query_norm = shape.norm(weights, layer.head_dim) if queries else None
        self.key_norm = shape.norm(weights, layer.head_dim) if attention.owns_cache else None
        self.value_norm = UnscaledRMSNorm(shape.norm_epsilon, weights)

    def slots(self) -> Iterator[Slot]:
        """Weights by checkpoint name."""
        yield from self.projection.slots(self._prefix)
        if self.query_norm is not None:
            yield from self.query_norm.slots(f"{self._prefix}.q_norm")
        if self.key_norm is not None:
            yield from self.key_norm.slots(f"{self._prefix}.k_norm")

    def project(self, normed: torch.Tensor, rotations: Rotations, rows: RowSet) -> torch.Tensor:
        """Write keys and values of ``[rows, hidden]``; return the rotated queries ``[rows, heads, head_dim]``."""
        rotation = rotations.by_type[self._shape.layer_type]
        states = self.projection(normed).view(len(normed), -1, self._shape.head_dim)
        query, key = states[:, : self._heads], states[:, self._heads : self._keys_end]
        if self.key_norm is not None:
            key_value = torch.stack((self.key_norm(key), self._value(key, states[:, self._keys_end :])), dim=1)
            rotation.apply(key_value[:, 0])
            self._attention.write(key_value, rows.plans[self._attention.name])
        if self.query_norm is not None:
            query = self.query_norm(query)
            rotation.apply(query)
        return query

    def _value(self, key: torch.Tensor, projected: torch.Tensor) -> torch.Tensor:
        match self._shape.values:
            case Values.PROJECTED:
                return projected
            case Values.NORMALIZED:
                return self.value_norm(projected)
            case Values.NORMALIZED_KEYS:
                return self.value_norm(key)


class SelfAttention(KeysAndValues):
    """A layer's whole attention."""

    def __init__(
        self, prefix: str, layer: LayerShape, shape: GemmaShape, attention: Attention, weights: WeightFormat
    ) -> None:
        super().__init__(prefix, layer, shape, attention, weights, queries=True)
        width = layer.heads_of(weights.ranks).query.times(layer.head_dim)
        self.output = SummedLinear("o_proj", shape.hidden_size, width, weights, bias=shape.attention_bias)

    def slots(self) -> Iterator[Slot]:
        """Weights by checkpoint name."""
        yield from super().slots()
        yield from self.output.slots(self._prefix)

    def attend(self, query: torch.Tensor, rows: RowSet) -> torch.Tensor:
        """Queries ``[rows, heads, head_dim]`` to ``[rows, hidden]``."""
        attended = self._attention.attend(query, rows.plans[self._attention.name])
        return self.output(attended.view(len(query), -1))
