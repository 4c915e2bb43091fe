"""The DeepSeek decoder: multi-head latent attention, dense feed-forward layers first, mixtures of experts after them.

V2, V3 and V3.2 are subclasses; their files say how they differ. Multi-token prediction layers, which released V3
checkpoints append after the last layer for speculative decoding, are not part of it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch

from worker.kv_cache.sharing import validate_targets
from worker.kv_cache.specs import LayerName
from worker.layers.embedding import Embedding, LogitsHead
from worker.layers.gated_mlp import FeedForward, GatedMLP
from worker.layers.latent_attention import IndexShape, LatentAttention
from worker.layers.latent_expansion import LatentExpansion
from worker.layers.layer_norm import LayerNorm
from worker.layers.linear import Linear, SummedLinear
from worker.layers.moe import Experts, MixtureOfExperts, SharedExpert
from worker.layers.rms_norm import RMSNorm
from worker.layers.rotary import RotaryTable, Rotation, score_factor
from worker.layers.router import Router
from worker.layers.weights import Slot, WeightFormat
from worker.models.model import ModelContext, RowSet, StepInputs
from worker.ranks.rank_group import RankGroup, split
from worker.ranks.span import Span
from worker.text_config import TextConfig

LOW_RANK_NORM_EPSILON = 1e-6
"""Of the norms inside attention, whatever ``rms_norm_eps`` says."""


@dataclass(frozen=True, slots=True)
class DeepseekShape:
    """Sizes and switches. ``query_rank`` is None where queries are projected in one step.

    A query or key head is ``nope_dim`` wide without position and ``rope_dim`` with it; ``interleaved`` says that the
    latter's rotary dimensions come in pairs of neighbours.
    """

    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    query_rank: int | None
    latent_dim: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    norm_epsilon: float
    tied_embeddings: bool
    scale: float
    interleaved: bool
    index: IndexShape | None = None

    @classmethod
    def of(cls, config: TextConfig, *, interleaved: bool, index: IndexShape | None = None) -> Self:
        """The sizes that all configurations have, and what a version adds to them."""
        return cls(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            layers=config.num_hidden_layers,
            heads=config.num_attention_heads,
            query_rank=config.q_lora_rank,
            latent_dim=config.kv_lora_rank,
            nope_dim=config.qk_nope_head_dim,
            rope_dim=config.qk_rope_head_dim,
            value_dim=config.v_head_dim,
            norm_epsilon=config.rms_norm_eps,
            tied_embeddings=config.tie_word_embeddings,
            scale=(config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5 * score_factor(config.rope_parameters),
            interleaved=interleaved,
            index=index,
        )

    @property
    def head_dim(self) -> int:
        """Of a query or key before absorption."""
        return self.nope_dim + self.rope_dim

    def heads_of(self, ranks: RankGroup) -> Span:
        """Those of this rank. Raises ``CannotSplit``."""
        return split(ranks, self.heads, "num_attention_heads")

    def rotate(self, rotation: Rotation, heads: torch.Tensor) -> None:
        """Rotate ``[rows, heads, rope_dim]`` in place."""
        if self.interleaved:
            rotation.apply_interleaved(heads)
        else:
            rotation.apply(heads)


@dataclass(frozen=True, slots=True)
class Projected:
    """What attention needs of some rows beside the cache, each ``[rows, width]``.

    ``query`` is of ``query_rank``, or of all heads where there is no such thing; ``index_weights`` are an indexer's.
    """

    query: torch.Tensor
    index_weights: torch.Tensor | None

    def select(self, rows: torch.Tensor) -> "Projected":
        """Some of the rows, given by index."""
        weights = self.index_weights
        return Projected(self.query.index_select(0, rows), None if weights is None else weights.index_select(0, rows))


class LayerInput:
    """The part of a layer that needs every row: one product of the normalised input, and the writes of what it owns.

    Without ``queries`` this is all that a headless model keeps of its last owner.
    """

    def __init__(
        self, index: int, shape: DeepseekShape, attention: LatentAttention, weights: WeightFormat, *, queries: bool
    ) -> None:
        self.prefix = f"model.layers.{index}"
        self.attention = attention
        self._shape = shape
        self.norm = RMSNorm(shape.hidden_size, shape.norm_epsilon, weights)
        parts = _input_parts(shape, attention, weights.ranks, queries=queries)
        self.projection = Linear(parts, shape.hidden_size, weights)
        self.latent_norm = RMSNorm(shape.latent_dim, LOW_RANK_NORM_EPSILON, weights) if attention.owns_latents else None
        self.index_key_norm = None if shape.index is None else LayerNorm(shape.index.head_dim, 1e-6, weights)

    def slots(self) -> Iterator[Slot]:
        """Weights by checkpoint name."""
        yield from self.norm.slots(f"{self.prefix}.input_layernorm")
        yield from self.projection.slots(f"{self.prefix}.self_attn")
        if self.latent_norm is not None:
            yield from self.latent_norm.slots(f"{self.prefix}.self_attn.kv_a_layernorm")
        if self.index_key_norm is not None:
            yield from self.index_key_norm.slots(f"{self.prefix}.self_attn.indexer.k_norm")

    def store(self, hidden: torch.Tensor, rotation: Rotation, rows: RowSet) -> Mapping[str, torch.Tensor]:
        """Write latents and index keys; return the product by checkpoint module."""
        widths = self.projection.widths
        product = self.projection(self.norm(hidden)).split_with_sizes(list(widths.values()), dim=-1)
        parts = dict(zip(widths, product, strict=True))
        plan = rows.plans[self.attention.name]
        if self.latent_norm is not None:
            latents, size = parts["kv_a_proj_with_mqa"], self._shape.latent_dim
            self.latent_norm.in_place(latents[:, :size])
            self._shape.rotate(rotation, latents[:, None, size:])
            self.attention.write(latents, plan)
        if self.index_key_norm is not None:
            keys = self.index_key_norm(parts["indexer.wk"])
            rotation.apply(keys[:, None])
            self.attention.write_index_keys(keys, plan)
        return parts


def _input_parts(
    shape: DeepseekShape, attention: LatentAttention, ranks: RankGroup, *, queries: bool
) -> dict[str, int | Span]:
    parts: dict[str, int | Span] = {}
    if queries:
        if shape.query_rank is None:
            parts["q_proj"] = shape.heads_of(ranks).times(shape.head_dim)
        else:
            parts["q_a_proj"] = shape.query_rank
        if shape.index is not None:
            parts["indexer.weights_proj"] = shape.index.heads
    if attention.owns_latents:
        parts["kv_a_proj_with_mqa"] = shape.latent_dim + shape.rope_dim
    if shape.index is not None:
        parts["indexer.wk"] = shape.index.head_dim
    return parts


class Indexer:
    """Chooses the tokens that each row attends to (DeepSeek-V3.2, 2025). Its keys are a layer's input's business.

    The published one rotates queries and keys by a Hadamard matrix and scores in 8 bits; without the latter the former
    changes nothing.
    """

    def __init__(self, shape: IndexShape, query_rank: int, weights: WeightFormat) -> None:
        self._shape = shape
        self.query = Linear({"wq_b": shape.heads * shape.head_dim}, query_rank, weights)
        self._scale = (shape.heads * shape.head_dim) ** -0.5

    def slots(self, prefix: str) -> Iterator[Slot]:
        """Weights by checkpoint name."""
        yield from self.query.slots(prefix)

    def query_and_weights(
        self, low_rank: torch.Tensor, weights: torch.Tensor, rotation: Rotation
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotated queries ``[rows, heads, head_dim]`` and scaled weights ``[rows, heads]``.

        They come from the normalised low-rank query, ``[rows, query_rank]``, and from unscaled ``weights``. The rotary
        dimensions are halves here, whatever attention's are.
        """
        query = self.query(low_rank).view(len(low_rank), self._shape.heads, self._shape.head_dim)
        rotation.apply(query)
        return query, weights.to(torch.promote_types(weights.dtype, torch.float32)) * self._scale


class DeepseekLayer:
    """One layer, in two halves: ``project`` needs every row, ``finish`` only those that go on."""

    def __init__(
        self,
        index: int,
        shape: DeepseekShape,
        attention: LatentAttention,
        feed_forward: FeedForward,
        weights: WeightFormat,
    ) -> None:
        self.prefix = f"model.layers.{index}"
        self.attention = attention
        self._shape = shape
        self.input = LayerInput(index, shape, attention, weights, queries=True)
        heads = shape.heads_of(weights.ranks)
        self.query_norm: RMSNorm | None = None
        self.query: Linear | None = None
        self.indexer: Indexer | None = None
        if shape.query_rank is not None:
            self.query_norm = RMSNorm(shape.query_rank, LOW_RANK_NORM_EPSILON, weights)
            self.query = Linear({"q_b_proj": heads.times(shape.head_dim)}, shape.query_rank, weights)
            if shape.index is not None:
                self.indexer = Indexer(shape.index, shape.query_rank, weights)
        self.expansion = LatentExpansion(heads, shape.latent_dim, shape.nope_dim, shape.value_dim, weights)
        self.output = SummedLinear("o_proj", shape.hidden_size, heads.times(shape.value_dim), weights)
        self.mlp_norm = RMSNorm(shape.hidden_size, shape.norm_epsilon, weights)
        self.feed_forward = feed_forward

    def slots(self) -> Iterator[Slot]:
        """Weights by checkpoint name."""
        yield from self.input.slots()
        if self.query_norm is not None:
            yield from self.query_norm.slots(f"{self.prefix}.self_attn.q_a_layernorm")
        if self.query is not None:
            yield from self.query.slots(f"{self.prefix}.self_attn")
        if self.indexer is not None:
            yield from self.indexer.slots(f"{self.prefix}.self_attn.indexer")
        yield from self.expansion.slots(f"{self.prefix}.self_attn.kv_b_proj")
        yield from self.output.slots(f"{self.prefix}.self_attn")
        yield from self.mlp_norm.slots(f"{self.prefix}.post_attention_layernorm")
        yield from self.feed_forward.slots(f"{self.prefix}.mlp")

    def project(self, hidden: torch.Tensor, rotation: Rotation, rows: RowSet) -> Projected:
        """Write what the layer owns of every row; return what the rows themselves need further on."""
        parts = self.input.store(hidden, rotation, rows)
        return Projected(parts["q_proj" if self.query is None else "q_a_proj"], parts.get("indexer.weights_proj"))

    def finish(self, projected: Projected, hidden: torch.Tensor, rotation: Rotation, rows: RowSet) -> torch.Tensor:
        """Attention output and feed-forward, added to the residual stream ``hidden``."""
        hidden = self._attend(projected, rotation, rows).add_(hidden)
        return self.feed_forward(self.mlp_norm(hidden), hidden)

    def _attend(self, projected: Projected, rotation: Rotation, rows: RowSet) -> torch.Tensor:
        shape, plan = self._shape, rows.plans[self.attention.name]
        query, selection = projected.query, None
        if self.query_norm is not None:
            query = self.query_norm(query)
        if self.indexer is not None and self.attention.chooses(plan):
            assert projected.index_weights is not None
            selection = self.attention.select(
                *self.indexer.query_and_weights(query, projected.index_weights, rotation), plan
            )
        if self.query is not None:
            query = self.query(query)
        query = query.view(len(query), self.attention.heads, shape.head_dim)
        shape.rotate(rotation, query[..., shape.nope_dim :])
        attended = self.attention.attend(query, self.expansion.by_head, plan, selection)
        return self.output(attended.view(len(query), -1))


class Deepseek:
    """See the module. Subclasses implement ``shape_of`` and ``router`` and override what else differs."""

    def __init__(self, config: TextConfig, context: ModelContext) -> None:
        shape, weights = self.shape_of(config), context.weights
        names = [LayerName(f"model.layers.{index}.self_attn.attn") for index in range(shape.layers)]
        targets = context.sharing.resolve(names, declared={})
        attentions = [
            LatentAttention(
                name,
                heads=len(shape.heads_of(weights.ranks)),
                latent_dim=shape.latent_dim,
                rope_dim=shape.rope_dim,
                scale=shape.scale,
                cache_format=context.cache,
                backend=context.latent_backend,
                index=shape.index,
                kv_sharing_target_layer_name=targets.get(name),
            )
            for name in names
        ]
        validate_targets(attentions)
        last_owner = max(i for i, attention in enumerate(attentions) if attention.kv_cache_spec() is not None)
        self.vocab_size = shape.vocab_size
        self.hidden_size = shape.hidden_size
        self.cached_layers: Sequence[LatentAttention] = attentions
        self._rotary = RotaryTable(config, shape.rope_dim, context.max_model_len, weights.dtype, weights.device)
        self.embedding = Embedding(shape.vocab_size, shape.hidden_size, weights)

        def layer(index: int) -> DeepseekLayer:
            return DeepseekLayer(index, shape, attentions[index], self._feed_forward(config, index, weights), weights)

        self.before_last_owner = [layer(index) for index in range(last_owner)]
        self.stored_only: LayerInput | None = None
        self.from_last_owner: list[DeepseekLayer] = []
        if context.headless:
            self.stored_only = LayerInput(last_owner, shape, attentions[last_owner], weights, queries=False)
            return
        self.from_last_owner = [layer(index) for index in range(last_owner, shape.layers)]
        self.norm = RMSNorm(shape.hidden_size, shape.norm_epsilon, weights)
        self.head = LogitsHead(self.embedding, weights, tied=shape.tied_embeddings)

    @staticmethod
    def shape_of(config: TextConfig) -> DeepseekShape:
        """Read the sizes from a checkpoint's configuration."""
        raise NotImplementedError

    @staticmethod
    def router(config: TextConfig, weights: WeightFormat) -> Router:
        """How a mixture of experts chooses."""
        raise NotImplementedError

    @staticmethod
    def is_mixture(config: TextConfig, index: int) -> bool:
        """Whether layer ``index`` is a mixture of experts."""
        return bool(index >= config.first_k_dense_replace)

    def _feed_forward(self, config: TextConfig, index: int, weights: WeightFormat) -> FeedForward:
        hidden, width = config.hidden_size, config.moe_intermediate_size
        if not self.is_mixture(config, index):
            return GatedMLP(hidden, config.intermediate_size, weights)
        return MixtureOfExperts(
            Experts(config.n_routed_experts, hidden, width, weights),
            self.router(config, weights),
            weights,
            shared=SharedExpert("shared_experts", hidden, width * config.n_shared_experts, weights),
            gate_dtype=torch.float32,
        )

    def slots(self) -> Iterator[Slot]:
        """Weights by checkpoint name."""
        yield from self.embedding.slots("model.embed_tokens")
        for layer in (*self.before_last_owner, *self.from_last_owner):
            yield from layer.slots()
        if self.stored_only is not None:
            yield from self.stored_only.slots()
        else:
            yield from self.norm.slots("model.norm")
            yield from self.head.slots("lm_head")

    def forward(self, step: StepInputs) -> torch.Tensor | None:
        """See ``Model.forward``."""
        hidden = self.embedding(step.token_ids)
        rotation = self._rotary.at(step.rows.positions)
        for layer in self.before_last_owner:
            projected = layer.project(hidden, rotation, step.rows)
            hidden = layer.finish(projected, hidden, rotation, step.rows)
        if self.stored_only is not None:
            self.stored_only.store(hidden, rotation, step.rows)
            return None

        last_owner, *sharing = self.from_last_owner
        projected = last_owner.project(hidden, rotation, step.rows)
        if step.logit_rows is None:
            return None
        if step.logit_index is not None:
            hidden, projected = hidden.index_select(0, step.logit_index), projected.select(step.logit_index)
            rotation = rotation.select(step.logit_index)
        hidden = last_owner.finish(projected, hidden, rotation, step.logit_rows)
        for layer in sharing:
            projected = layer.project(hidden, rotation, step.logit_rows)
            hidden = layer.finish(projected, hidden, rotation, step.logit_rows)
        return self.head(self.norm(hidden))
