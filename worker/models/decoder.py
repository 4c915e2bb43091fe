"""The plain decoder: RMSNorm, grouped-query attention with rotary positions, feed-forward, one residual stream.

Llama, Mistral, Qwen2, Qwen3 and what else has this skeleton are subclasses; their files say only how they differ.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch

from kernels.pages import KEY_VALUE
from worker.kv_cache.sharing import Targets, validate_targets
from worker.kv_cache.specs import LayerName
from worker.layers.attention import Attention
from worker.layers.embedding import Embedding, LogitsHead
from worker.layers.gated_mlp import FeedForward, GatedMLP
from worker.layers.linear import Linear, SummedLinear
from worker.layers.rms_norm import RMSNorm
from worker.layers.rotary import RotaryTable, Rotation
from worker.layers.weights import Slot
from worker.models.config_checks import SLIDING
from worker.models.model import ModelContext, RowSet, StepInputs
from worker.ranks.heads import Heads
from worker.ranks.rank_group import RankGroup
from worker.text_config import TextConfig


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """Sizes and switches of a plain decoder. ``windows`` has one entry per layer, None for full attention."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_epsilon: float
    tied_embeddings: bool
    windows: tuple[int | None, ...]
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False

    @classmethod
    def of(cls, config: TextConfig, **switches: bool) -> Self:
        """The sizes that every plain decoder's configuration has, and what an architecture adds to them."""
        return cls(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            layers=config.num_hidden_layers,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=_head_dim(config),
            norm_epsilon=config.rms_norm_eps,
            tied_embeddings=config.tie_word_embeddings,
            windows=_windows(config),
            **switches,
        )

    def heads_of(self, ranks: RankGroup) -> Heads:
        """Those of this rank. Raises ``CannotSplit``."""
        return Heads.of(ranks, self.heads, self.kv_heads)


class LastOwnerKeys:
    """All that a headless model keeps of its last owner layer: the projection to keys and values."""

    def __init__(self, index: int, shape: DecoderShape, attention: Attention, context: ModelContext) -> None:
        self.prefix = f"model.layers.{index}"
        self.attention = attention
        width = shape.heads_of(context.weights.ranks).key_value.times(shape.head_dim)
        self.input_norm = RMSNorm(shape.hidden_size, shape.norm_epsilon, context.weights)
        self.key_value = Linear(
            {"k_proj": width, "v_proj": width}, shape.hidden_size, context.weights, bias=shape.qkv_bias
        )
        self.key_norm = RMSNorm(shape.head_dim, shape.norm_epsilon, context.weights) if shape.qk_norm else None

    def slots(self) -> Iterator[Slot]:
        """Weights by checkpoint name."""
        yield from self.input_norm.slots(f"{self.prefix}.input_layernorm")
        yield from self.key_value.slots(f"{self.prefix}.self_attn")
        if self.key_norm is not None:
            yield from self.key_norm.slots(f"{self.prefix}.self_attn.k_norm")

    def write(self, hidden: torch.Tensor, rotation: Rotation, rows: RowSet) -> None:
        """Write keys and values of every row."""
        heads, head_dim = self.attention.kv_heads, self.attention.head_dim
        states = self.key_value(self.input_norm(hidden)).view(len(hidden), KEY_VALUE, heads, head_dim)
        self.rotate(states[:, 0], rotation)
        self.attention.write(states, rows.plans[self.attention.name])

    def rotate(self, key: torch.Tensor, rotation: Rotation) -> None:
        """Normalise and rotate keys, ``[rows, kv_heads, head_dim]``, in place."""
        if self.key_norm is not None:
            self.key_norm.in_place(key)
        rotation.apply(key)


class DecoderLayer:
    """One layer, in two halves: ``project`` needs every row, ``finish`` only those that go on.

    ``keys_class`` is what remains of such a layer in a headless model when it is the last owner.
    """

    keys_class: type[LastOwnerKeys] = LastOwnerKeys

    def __init__(
        self, index: int, shape: DecoderShape, attention: Attention, feed_forward: FeedForward, context: ModelContext
    ) -> None:
        weights = context.weights
        self.prefix = f"model.layers.{index}"
        self.attention = attention
        self._heads = attention.heads
        self._kv_heads = attention.kv_heads if attention.owns_cache else 0
        self._head_dim = shape.head_dim
        heads = shape.heads_of(weights.ranks)
        query = heads.query.times(shape.head_dim)
        parts = {"q_proj": query}
        if attention.owns_cache:
            parts |= dict.fromkeys(("k_proj", "v_proj"), heads.key_value.times(shape.head_dim))
        self.input_norm = RMSNorm(shape.hidden_size, shape.norm_epsilon, weights)
        self.qkv = Linear(parts, shape.hidden_size, weights, bias=shape.qkv_bias)
        self.query_norm = RMSNorm(shape.head_dim, shape.norm_epsilon, weights) if shape.qk_norm else None
        self.key_norm = (
            RMSNorm(shape.head_dim, shape.norm_epsilon, weights) if shape.qk_norm and attention.owns_cache else None
        )
        self.output = SummedLinear("o_proj", shape.hidden_size, query, weights, bias=shape.output_bias)
        self.mlp_norm = RMSNorm(shape.hidden_size, shape.norm_epsilon, weights)
        self.feed_forward = feed_forward

    def slots(self) -> Iterator[Slot]:
        """Weights by checkpoint name."""
        yield from self.input_norm.slots(f"{self.prefix}.input_layernorm")
        yield from self.qkv.slots(f"{self.prefix}.self_attn")
        if self.query_norm is not None:
            yield from self.query_norm.slots(f"{self.prefix}.self_attn.q_norm")
        if self.key_norm is not None:
            yield from self.key_norm.slots(f"{self.prefix}.self_attn.k_norm")
        yield from self.output.slots(f"{self.prefix}.self_attn")
        yield from self.mlp_norm.slots(f"{self.prefix}.post_attention_layernorm")
        yield from self.feed_forward.slots(f"{self.prefix}.mlp")

    def project(self, hidden: torch.Tensor, rotation: Rotation, rows: RowSet) -> torch.Tensor:
        """Write keys and values of every row; return the rotated queries ``[rows, heads, head_dim]``."""
        states = self.qkv(self.input_norm(hidden)).view(len(hidden), -1, self._head_dim)
        self.rotate(states[:, : self._heads + self._kv_heads], rotation)
        if self.attention.owns_cache:
            key_value = states[:, self._heads :].view(len(hidden), KEY_VALUE, self._kv_heads, self._head_dim)
            self.attention.write(key_value, rows.plans[self.attention.name])
        return states[:, : self._heads]

    def rotate(self, query_key: torch.Tensor, rotation: Rotation) -> None:
        """Normalise and rotate queries and then keys, ``[rows, heads + kv_heads, head_dim]``, in place."""
        if self.query_norm is not None:
            self.query_norm.in_place(query_key[:, : self._heads])
        if self.key_norm is not None:
            self.key_norm.in_place(query_key[:, self._heads :])
        rotation.apply(query_key)

    def finish(self, query: torch.Tensor, hidden: torch.Tensor, rows: RowSet) -> torch.Tensor:
        """Attention output and feed-forward, added to the residual stream ``hidden``."""
        attended = self.attention.attend(query, rows.plans[self.attention.name])
        hidden = self.output(attended.view(len(hidden), -1), hidden)
        return self.feed_forward(self.mlp_norm(hidden), hidden)


class Decoder:
    """See the module. Subclasses implement ``shape_of`` and override what else differs."""

    def __init__(self, config: TextConfig, context: ModelContext) -> None:
        shape = self.shape_of(config)
        names = [LayerName(f"model.layers.{index}.self_attn.attn") for index in range(shape.layers)]
        targets = self.sharing_targets(config, names, context)
        self.vocab_size = shape.vocab_size
        self.hidden_size = shape.hidden_size
        attentions = [
            _attention(name, window, shape, context, targets) for name, window in zip(names, shape.windows, strict=True)
        ]
        validate_targets(attentions)
        self.cached_layers: Sequence[Attention] = attentions
        last_owner = max(i for i, attention in enumerate(attentions) if attention.owns_cache)
        self._rotary = RotaryTable(
            config, shape.head_dim, context.max_model_len, context.weights.dtype, context.weights.device
        )
        self.embedding = Embedding(shape.vocab_size, shape.hidden_size, context.weights)

        layers = self.layer_class(config)

        def layer(index: int) -> DecoderLayer:
            return layers(index, shape, attentions[index], self.feed_forward(config, index, context), context)

        self.before_last_owner = [layer(index) for index in range(last_owner)]
        self.keys_only: LastOwnerKeys | None = None
        self.from_last_owner: list[DecoderLayer] = []
        if context.headless:
            self.keys_only = layers.keys_class(last_owner, shape, attentions[last_owner], context)
            return
        self.from_last_owner = [layer(index) for index in range(last_owner, shape.layers)]
        self.norm = RMSNorm(shape.hidden_size, shape.norm_epsilon, context.weights)
        self.head = LogitsHead(self.embedding, context.weights, tied=shape.tied_embeddings)

    @staticmethod
    def shape_of(config: TextConfig) -> DecoderShape:
        """Read the sizes from a checkpoint's configuration; raise ``ValueError`` for what cannot be honoured."""
        raise NotImplementedError

    @staticmethod
    def layer_class(config: TextConfig) -> type[DecoderLayer]:
        """What layers are made of: the plain one, unless a subclass says otherwise."""
        del config
        return DecoderLayer

    def feed_forward(self, config: TextConfig, index: int, context: ModelContext) -> FeedForward:
        """The feed-forward half of layer ``index``: a gated MLP, unless a subclass says otherwise."""
        del index
        shape = self.shape_of(config)
        return GatedMLP(shape.hidden_size, shape.intermediate_size, context.weights, bias=shape.mlp_bias)

    def declared_sharing(self, config: TextConfig, names: Sequence[LayerName]) -> Targets:
        """Which layers share KV by the checkpoint's own configuration: none, unless a subclass says otherwise."""
        del config, names
        return {}

    def sharing_targets(self, config: TextConfig, names: Sequence[LayerName], context: ModelContext) -> Targets:
        """Which layers share KV by the rule of ``--kv-sharing``; a subclass may refuse some rules."""
        return context.sharing.resolve(names, declared=self.declared_sharing(config, names))

    def slots(self) -> Iterator[Slot]:
        """Weights by checkpoint name."""
        yield from self.embedding.slots("model.embed_tokens")
        for layer in (*self.before_last_owner, *self.from_last_owner):
            yield from layer.slots()
        if self.keys_only is not None:
            yield from self.keys_only.slots()
        else:
            yield from self.norm.slots("model.norm")
            yield from self.head.slots("lm_head")

    def forward(self, step: StepInputs) -> torch.Tensor | None:
        """See ``Model.forward``."""
        hidden = self.embedding(step.token_ids)
        rotation = self._rotary.at(step.rows.positions)
        for layer in self.before_last_owner:
            query = layer.project(hidden, rotation, step.rows)
            hidden = layer.finish(query, hidden, step.rows)
        if self.keys_only is not None:
            self.keys_only.write(hidden, rotation, step.rows)
            return None

        last_owner, *sharing = self.from_last_owner
        query = last_owner.project(hidden, rotation, step.rows)
        if step.logit_rows is None:
            return None
        if step.logit_index is not None:
            hidden, query = hidden.index_select(0, step.logit_index), query.index_select(0, step.logit_index)
            rotation = rotation.select(step.logit_index)
        hidden = last_owner.finish(query, hidden, step.logit_rows)
        for layer in sharing:
            query = layer.project(hidden, rotation, step.logit_rows)
            hidden = layer.finish(query, hidden, step.logit_rows)
        return self.head(self.norm(hidden))


def _attention(
    name: LayerName,
    window: int | None,
    shape: DecoderShape,
    context: ModelContext,
    targets: Mapping[LayerName, LayerName],
) -> Attention:
    heads = shape.heads_of(context.weights.ranks)
    return Attention(
        name,
        heads=len(heads.query),
        kv_heads=len(heads.key_value),
        head_dim=shape.head_dim,
        scale=shape.head_dim**-0.5,
        cache_format=context.cache,
        backend=context.backend,
        window=window,
        kv_sharing_target_layer_name=targets.get(name),
    )


def _head_dim(config: TextConfig) -> int:
    """Of the hidden size, unless a configuration says otherwise."""
    given: int | None = config.head_dim if hasattr(config, "head_dim") else None
    return given or config.hidden_size // config.num_attention_heads


def _windows(config: TextConfig) -> tuple[int | None, ...]:
    """Windows by ``layer_types``, or one for all layers where the configuration has no such list."""
    window: int | None = config.sliding_window if hasattr(config, "sliding_window") else None
    if not hasattr(config, "layer_types") or config.layer_types is None:
        return (window,) * int(config.num_hidden_layers)
    return tuple(window if kind == SLIDING else None for kind in config.layer_types)
