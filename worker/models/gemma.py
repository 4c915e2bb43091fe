"""The skeleton of Gemma 3, 3n and 4: layers of two types, a norm before and after everything, shared KV caches.

Their files say what a layer does around its attention. A layer comes in two halves: what ``enter`` computes is needed
of every row, what ``leave`` computes only of rows that go on. A headless model keeps the first half of its last owner.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from worker.kv_cache.sharing import Targets, validate_targets
from worker.kv_cache.specs import LayerName
from worker.layers.attention import Attention
from worker.layers.embedding import Embedding, LogitsHead
from worker.layers.gated_mlp import GatedMLP
from worker.layers.rotary import RotaryTable
from worker.layers.weights import Slot, WeightFormat
from worker.models.gemma_attention import GemmaShape, KeysAndValues, Rotations, SelfAttention
from worker.models.model import ModelContext, RowSet, StepInputs
from worker.text_config import TextConfig


@dataclass(frozen=True, slots=True)
class CheckpointNames:
    """What a checkpoint calls the text model and its head."""

    body: str = "model"
    head: str = "lm_head"


@dataclass(frozen=True, slots=True)
class Hidden:
    """What goes from layer to layer.

    ``stream`` is ``[rows, hidden]`` or ``[rows, streams, hidden]``; ``per_layer`` is ``[rows, layers, width]``, or None
    in a model without per-layer inputs.
    """

    stream: torch.Tensor
    per_layer: torch.Tensor | None = None

    def select(self, rows: torch.Tensor) -> "Hidden":
        """Some of the rows, given by index."""
        per_layer = None if self.per_layer is None else self.per_layer.index_select(0, rows)
        return Hidden(self.stream.index_select(0, rows), per_layer)


class LayerEntry(Protocol):
    """What a layer does before its attention."""

    def slots(self) -> Iterator[Slot]:
        """Weights by checkpoint name, without the attention's."""
        ...

    def enter(self, hidden: Hidden) -> tuple[Hidden, torch.Tensor]:
        """What goes on to ``leave``, and the normalised input of the attention, ``[rows, hidden]``."""
        ...


class Layer(LayerEntry, Protocol):
    """What a layer does around its attention."""

    def leave(self, hidden: Hidden, normed: torch.Tensor, attended: torch.Tensor) -> Hidden:
        """The layer's result, from what ``enter`` returned and the attention's output ``[rows, hidden]``."""
        ...


class NormalizedEntry:
    """The first half of a layer with one residual stream: a norm."""

    def __init__(self, prefix: str, shape: GemmaShape, weights: WeightFormat) -> None:
        self._prefix = prefix
        self.input_norm = shape.norm(weights)

    def slots(self) -> Iterator[Slot]:
        """Weights by checkpoint name."""
        yield from self.input_norm.slots(f"{self._prefix}.input_layernorm")

    def enter(self, hidden: Hidden) -> tuple[Hidden, torch.Tensor]:
        """The stream goes on as it is."""
        return hidden, self.input_norm(hidden.stream)


class FeedForward(Protocol):
    """The feed-forward half of a layer with the norm before it: ``[rows, hidden]`` in, a new tensor out."""

    def slots(self, prefix: str) -> Iterator[Slot]:
        """Weights by checkpoint name; ``prefix`` is the layer's."""
        ...

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """See the class."""
        ...


class NormalizedMLP:
    """A norm, then a gated MLP."""

    def __init__(self, shape: GemmaShape, mlp: GatedMLP, weights: WeightFormat) -> None:
        self.norm = shape.norm(weights)
        self.mlp = mlp

    def slots(self, prefix: str) -> Iterator[Slot]:
        """Weights by checkpoint name; ``prefix`` is the layer's."""
        yield from self.norm.slots(f"{prefix}.pre_feedforward_layernorm")
        yield from self.mlp.slots(f"{prefix}.mlp")

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[rows, hidden]`` in, a new tensor out."""
        return self.mlp(self.norm(hidden))


class Residual:
    """Adds attention and feed-forward to a stream, each normalised once more before it is added."""

    def __init__(self, prefix: str, shape: GemmaShape, feed_forward: FeedForward, weights: WeightFormat) -> None:
        self._prefix = prefix
        self._feed_forward = feed_forward
        self.attention_norm = shape.norm(weights)
        self.feed_forward_norm = shape.norm(weights)

    def slots(self) -> Iterator[Slot]:
        """Weights by checkpoint name."""
        yield from self.attention_norm.slots(f"{self._prefix}.post_attention_layernorm")
        yield from self._feed_forward.slots(self._prefix)
        yield from self.feed_forward_norm.slots(f"{self._prefix}.post_feedforward_layernorm")

    def add_attention(self, stream: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """``[rows, hidden]`` each; a new tensor."""
        return self.attention_norm(attended).add_(stream)

    def add_feed_forward(self, stream: torch.Tensor) -> torch.Tensor:
        """``[rows, hidden]``; a new tensor."""
        return self.feed_forward_norm(self._feed_forward(stream)).add_(stream)


def gelu_mlp(hidden_size: int, intermediate_size: int, weights: WeightFormat) -> GatedMLP:
    """The gated MLP of these models."""
    return GatedMLP(hidden_size, intermediate_size, weights, activate=weights.pointwise.gelu_and_multiply)


@dataclass(frozen=True, slots=True)
class Block:
    """One whole layer."""

    attention: SelfAttention
    layer: Layer

    def slots(self) -> Iterator[Slot]:
        """Weights by checkpoint name."""
        yield from self.layer.slots()
        yield from self.attention.slots()

    def run(self, hidden: Hidden, rotations: Rotations, rows: RowSet) -> Hidden:
        """Both halves for the same rows."""
        hidden, normed = self.layer.enter(hidden)
        query = self.attention.project(normed, rotations, rows)
        return self.layer.leave(hidden, normed, self.attention.attend(query, rows))


@dataclass(frozen=True, slots=True)
class LastOwnerEntry:
    """All that a headless model keeps of its last owner."""

    entry: LayerEntry
    keys_and_values: KeysAndValues

    def slots(self) -> Iterator[Slot]:
        """Weights by checkpoint name."""
        yield from self.entry.slots()
        yield from self.keys_and_values.slots()

    def run(self, hidden: Hidden, rotations: Rotations, rows: RowSet) -> None:
        """Write keys and values of every row."""
        _, normed = self.entry.enter(hidden)
        self.keys_and_values.project(normed, rotations, rows)


class GemmaDecoder(ABC):
    """See the module."""

    def __init__(self, config: TextConfig, context: ModelContext, names: CheckpointNames, shape: GemmaShape) -> None:
        self.vocab_size = shape.vocab_size
        self.hidden_size = shape.hidden_size
        self.names = names
        self.shape = shape
        self.weights = context.weights
        attentions = _attentions(shape, context)
        self.cached_layers: Sequence[Attention] = attentions
        last_owner = max(i for i, attention in enumerate(attentions) if attention.owns_cache)
        self.computed_layers = last_owner + 1 if context.headless else len(shape.layers)
        self._rotary = {
            layer.layer_type: RotaryTable(
                config,
                layer.head_dim,
                context.max_model_len,
                context.weights.dtype,
                context.weights.device,
                layer_type=layer.layer_type,
            )
            for layer in shape.layers
        }
        self.embedding = Embedding(shape.vocab_size, shape.hidden_size, context.weights, scale=shape.hidden_size**0.5)
        self.before_last_owner = [self._block(config, index) for index in range(last_owner)]
        self.last_owner_entry: LastOwnerEntry | None = None
        self.from_last_owner: list[Block] = []
        if context.headless:
            prefix = self.prefix(last_owner)
            self.last_owner_entry = LastOwnerEntry(
                self.entry(config, last_owner),
                KeysAndValues(prefix, shape.layers[last_owner], shape, attentions[last_owner], context.weights),
            )
            return
        self.from_last_owner = [self._block(config, index) for index in range(last_owner, len(shape.layers))]
        self.norm = shape.norm(context.weights)
        self.head = LogitsHead(self.embedding, context.weights, tied=shape.tied_embeddings, soft_cap=shape.soft_cap)

    def prefix(self, index: int) -> str:
        """The checkpoint's name of a layer."""
        return f"{self.names.body}.layers.{index}"

    @abstractmethod
    def entry(self, config: TextConfig, index: int) -> LayerEntry:
        """Build the first half of a layer."""

    @abstractmethod
    def layer(self, config: TextConfig, index: int) -> Layer:
        """Build a layer."""

    @abstractmethod
    def embed(self, token_ids: torch.Tensor) -> Hidden:
        """What the first layer gets, for int64 ``[rows]``."""

    def merge(self, hidden: Hidden) -> torch.Tensor:
        """What the last norm gets, ``[rows, hidden]``: the stream, if there is only one."""
        return hidden.stream

    def slots(self) -> Iterator[Slot]:
        """Weights by checkpoint name."""
        yield from self.embedding.slots(f"{self.names.body}.embed_tokens")
        for block in (*self.before_last_owner, *self.from_last_owner):
            yield from block.slots()
        if self.last_owner_entry is not None:
            yield from self.last_owner_entry.slots()
        else:
            yield from self.norm.slots(f"{self.names.body}.norm")
            yield from self.head.slots(self.names.head)

    def forward(self, step: StepInputs) -> torch.Tensor | None:
        """See ``Model.forward``."""
        hidden = self.embed(step.token_ids)
        rotations = Rotations({kind: table.at(step.rows.positions) for kind, table in self._rotary.items()})
        for block in self.before_last_owner:
            hidden = block.run(hidden, rotations, step.rows)
        if self.last_owner_entry is not None:
            self.last_owner_entry.run(hidden, rotations, step.rows)
            return None

        last_owner, *sharing = self.from_last_owner
        hidden, normed = last_owner.layer.enter(hidden)
        query = last_owner.attention.project(normed, rotations, step.rows)
        if step.logit_rows is None:
            return None
        if step.logit_index is not None:
            normed, query = normed.index_select(0, step.logit_index), query.index_select(0, step.logit_index)
            hidden, rotations = hidden.select(step.logit_index), rotations.select(step.logit_index)
        hidden = last_owner.layer.leave(hidden, normed, last_owner.attention.attend(query, step.logit_rows))
        for block in sharing:
            hidden = block.run(hidden, rotations, step.logit_rows)
        return self.head(self.norm(self.merge(hidden)))

    def _block(self, config: TextConfig, index: int) -> Block:
        layer, attention = self.shape.layers[index], self.cached_layers[index]
        return Block(
            SelfAttention(self.prefix(index), layer, self.shape, attention, self.weights), self.layer(config, index)
        )


def _attentions(shape: GemmaShape, context: ModelContext) -> list[Attention]:
    names = [LayerName(f"model.layers.{index}.self_attn.attn") for index in range(len(shape.layers))]
    targets = context.sharing.resolve(names, declared=_declared_sharing(shape, names))
    heads = [layer.heads_of(context.weights.ranks) for layer in shape.layers]
    attentions = [
        Attention(
            name,
            heads=len(own.query),
            kv_heads=len(own.key_value),
            head_dim=layer.head_dim,
            scale=layer.scale,
            cache_format=context.cache,
            backend=context.backend,
            window=layer.window,
            kv_sharing_target_layer_name=targets.get(name),
        )
        for name, layer, own in zip(names, shape.layers, heads, strict=True)
    ]
    validate_targets(attentions)
    return attentions


def _declared_sharing(shape: GemmaShape, names: Sequence[LayerName]) -> Targets:
    """Each of the last ``sharing_layers`` reads the last owner of its own type."""
    first = len(names) - shape.sharing_layers
    last_of_type = {layer.layer_type: name for name, layer in zip(names[:first], shape.layers, strict=False)}
    return {
        name: last_of_type[layer.layer_type] for name, layer in zip(names[first:], shape.layers[first:], strict=True)
    }
