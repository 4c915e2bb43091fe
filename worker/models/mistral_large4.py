"""Mistral Large 4, the text model: latent attention to tokens that an indexer chose, and a mixture of experts.

Every layer has queries of its own. What it stores is up to the configuration: latents (``kv_source_layers``), index
keys (``indexer_types``), both, or nothing. A layer without latents reads an earlier one's; a layer without an indexer
attends to the tokens that the last indexer before it chose in the same step. ``no_rope_layers`` marks with 0 the layers
that do not know positions: their heads are as wide, but their latents have no rotary part.

Tensors have Mistral's own names in a checkpoint, not those of transformers' modules.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from kernels.attention.latent import Selection
from worker.kv_cache.sharing import validate_targets
from worker.kv_cache.specs import LayerName
from worker.layers.cached_layer import StepPlan
from worker.layers.embedding import Embedding, LogitsHead
from worker.layers.gated_mlp import FeedForward, GatedMLP
from worker.layers.latent_attention import IndexShape, LatentAttention
from worker.layers.latent_expansion import LatentExpansion
from worker.layers.layer_norm import LayerNorm
from worker.layers.learned_rotary import LearnedRotary
from worker.layers.linear import Linear, SummedLinear
from worker.layers.moe import Experts, MixtureOfExperts, SharedExpert
from worker.layers.query_scaling import QueryScaling
from worker.layers.rms_norm import RMSNorm
from worker.layers.rotary import Rotation, score_factor
from worker.layers.router import SoftmaxRouter
from worker.layers.weights import Slot, WeightFormat
from worker.models.config_checks import (
    UnsupportedModel,
    require_at_most,
    require_entries,
    require_full_rope,
    require_head_dim,
    require_positive,
    require_rope_type,
    require_setting,
    require_sizes,
)
from worker.models.model import ModelContext, RowSet, StepInputs
from worker.ranks.rank_group import split
from worker.ranks.span import Span
from worker.text_config import TextConfig

INDEXER_EPSILON = 1e-6

PROJECTION_NAMES = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
"""A gated MLP's projections as they are called in a checkpoint."""


@dataclass(frozen=True, slots=True)
class LayerKind:
    """What the configuration says of one layer. ``source`` is the layer whose latents it reads, maybe its own."""

    rope: bool
    source: int
    indexer: bool
    sparse_feed_forward: bool


def layer_kinds(config: TextConfig) -> list[LayerKind]:
    """The kinds of all layers."""
    return [
        LayerKind(bool(rope), source, indexer == "full", feed_forward == "sparse")
        for rope, source, indexer, feed_forward in zip(
            config.no_rope_layers,
            config.kv_source_layers,
            config.indexer_types,
            config.mlp_layer_types,
            strict=True,
        )
    ]


@dataclass(frozen=True, slots=True)
class LayerRows:
    """Some rows of a step as layers need them; ``log_positions`` ``[rows, 1]`` is of positions counted from 1."""

    rotation: Rotation
    log_positions: torch.Tensor
    plans: Mapping[LayerName, StepPlan]

    def select(self, index: torch.Tensor, rows: RowSet) -> "LayerRows":
        """Some of these rows, given by index, with plans of their own."""
        return LayerRows(self.rotation.select(index), self.log_positions.index_select(0, index), rows.plans)


class StoredStates:
    """What an attention layer stores of every row: a latent, an index key, or both, from one product."""

    def __init__(self, config: TextConfig, attention: LatentAttention, weights: WeightFormat, *, rope: bool) -> None:
        self._attention = attention
        self._rope = rope
        self._latent_dim = config.kv_lora_rank
        widths = {}
        self.latent_norm: RMSNorm | None = None
        self.key_norm: LayerNorm | None = None
        if attention.owns_latents:
            widths["wkv_a_with_mqa"] = attention.head_dim
            self.latent_norm = RMSNorm(config.kv_lora_rank, config.rms_norm_eps, weights)
        if attention.index is not None:
            widths["indexer.wk"] = attention.index.head_dim
            self.key_norm = LayerNorm(attention.index.head_dim, INDEXER_EPSILON, weights)
        self.projection = Linear(widths, config.hidden_size, weights)

    def slots(self, prefix: str) -> Iterator[Slot]:
        """Weights by checkpoint name; ``prefix`` is the attention module's."""
        yield from self.projection.slots(prefix)
        if self.latent_norm is not None:
            yield from self.latent_norm.slots(f"{prefix}.kv_a_norm")
        if self.key_norm is not None:
            yield from self.key_norm.slots(f"{prefix}.indexer.k_norm")

    def write(self, normed: torch.Tensor, rows: LayerRows) -> None:
        """From the layer's normalised input ``[rows, hidden]`` into the cache."""
        attention, plan = self._attention, rows.plans[self._attention.name]
        states = self.projection(normed)
        if self.latent_norm is not None:
            latents = states[:, : attention.head_dim]
            self.latent_norm.in_place(latents[:, : self._latent_dim])
            if self._rope:
                rows.rotation.apply_interleaved(latents[:, None, self._latent_dim :])
            attention.write(latents, plan)
        if self.key_norm is not None:
            assert attention.index is not None
            keys = self.key_norm(states[:, -attention.index.head_dim :])
            if self._rope:
                rows.rotation.apply_interleaved(keys[:, None])
            attention.write_index_keys(keys, plan)


class IndexQueries:
    """How an indexer asks which tokens to attend to."""

    def __init__(self, hidden_size: int, index: IndexShape, weights: WeightFormat, *, rope: bool) -> None:
        self._index = index
        self._rope = rope
        self._weight_scale = (index.head_dim * index.heads) ** -0.5
        self.input_norm = LayerNorm(hidden_size, INDEXER_EPSILON, weights)
        self.projection = Linear({"wq_b": index.heads * index.head_dim}, hidden_size, weights)
        self.head_weights = Linear({"weights_proj": index.heads}, hidden_size, weights)
        self.scaling = QueryScaling(Span(0, index.heads, index.heads), weights)

    def slots(self, prefix: str) -> Iterator[Slot]:
        """Weights by checkpoint name; ``prefix`` is the indexer's."""
        yield from self.input_norm.slots(f"{prefix}.q_input_norm")
        yield from self.projection.slots(prefix)
        yield from self.head_weights.slots(prefix)
        yield from self.scaling.slots(f"{prefix}.ssmax_scaling")

    def __call__(self, normed: torch.Tensor, rows: LayerRows) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries ``[rows, index heads, index head_dim]`` and every head's weight, scales included."""
        query = self.projection(self.input_norm(normed)).view(-1, self._index.heads, self._index.head_dim)
        self.scaling.apply(query, rows.log_positions)
        if self._rope:
            rows.rotation.apply_interleaved(query)
        weights = self.head_weights(normed)
        return query, weights.to(torch.promote_types(weights.dtype, torch.float32)) * self._weight_scale


class StoringLayer:
    """A layer as far as what it stores: all that a headless model keeps of its last owner."""

    def __init__(
        self, index: int, config: TextConfig, attention: LatentAttention, context: ModelContext, *, rope: bool
    ) -> None:
        self.prefix = f"layers.{index}"
        self.attention = attention
        self.input_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, context.weights)
        stores = attention.kv_cache_spec() is not None
        self.stored = StoredStates(config, attention, context.weights, rope=rope) if stores else None

    def slots(self) -> Iterator[Slot]:
        """Weights by checkpoint name."""
        yield from self.input_norm.slots(f"{self.prefix}.attention_norm")
        if self.stored is not None:
            yield from self.stored.slots(f"{self.prefix}.attention")

    def store(self, hidden: torch.Tensor, rows: LayerRows) -> torch.Tensor:
        """Write what the layer stores of every row; return its normalised input."""
        normed = self.input_norm(hidden)
        if self.stored is not None:
            self.stored.write(normed, rows)
        return normed


class Layer(StoringLayer):
    """A whole layer: ``store`` needs every row, ``finish`` only those that go on."""

    def __init__(
        self, index: int, config: TextConfig, attention: LatentAttention, context: ModelContext, kind: LayerKind
    ) -> None:
        super().__init__(index, config, attention, context, rope=kind.rope)
        weights = context.weights
        self._rope = kind.rope
        self._head_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
        self._key_dim = config.qk_nope_head_dim if kind.rope else self._head_dim
        heads = _heads(config, context)
        self.query = Linear({"wq": heads.times(self._head_dim)}, config.hidden_size, weights)
        self.scaling = QueryScaling(heads, weights)
        self.expansion = LatentExpansion(heads, config.kv_lora_rank, self._key_dim, config.v_head_dim, weights)
        self.index_queries = (
            None
            if attention.index is None
            else IndexQueries(config.hidden_size, attention.index, weights, rope=kind.rope)
        )
        self.output = SummedLinear("wo", config.hidden_size, heads.times(config.v_head_dim), weights)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, weights)
        self.feed_forward: FeedForward
        if kind.sparse_feed_forward:
            self._feed_forward_prefix = self.prefix
            self.feed_forward = _mixture_of_experts(config, weights)
        else:
            self._feed_forward_prefix = f"{self.prefix}.feed_forward"
            self.feed_forward = GatedMLP(config.hidden_size, config.intermediate_size, weights)

    def slots(self) -> Iterator[Slot]:
        """Weights by checkpoint name."""
        yield from super().slots()
        yield from self.query.slots(f"{self.prefix}.attention")
        yield from self.scaling.slots(f"{self.prefix}.attention.ssmax_scaling")
        yield from self.expansion.slots(f"{self.prefix}.attention.wkv_b")
        if self.index_queries is not None:
            yield from self.index_queries.slots(f"{self.prefix}.attention.indexer")
        yield from self.output.slots(f"{self.prefix}.attention")
        yield from self.mlp_norm.slots(f"{self.prefix}.ffn_norm")
        for slot in self.feed_forward.slots(self._feed_forward_prefix):
            yield replace(slot, name=_checkpoint_name(slot.name))

    def select(self, normed: torch.Tensor, rows: LayerRows, earlier: Selection | None) -> Selection | None:
        """The tokens that rows attend to: what the layer's indexer chooses, or what the last one before it chose."""
        if self.index_queries is None:
            return earlier
        plan = rows.plans[self.attention.name]
        if not self.attention.chooses(plan):
            return None
        query, weights = self.index_queries(normed, rows)
        return self.attention.select(query, weights, plan)

    def finish(
        self, normed: torch.Tensor, hidden: torch.Tensor, rows: LayerRows, selection: Selection | None
    ) -> torch.Tensor:
        """Attention output and feed-forward, added to the residual stream ``hidden``."""
        query = self.query(normed).view(-1, self.attention.heads, self._head_dim)
        self.scaling.apply(query, rows.log_positions)
        if self._rope:
            rows.rotation.apply_interleaved(query[..., self._key_dim :])
        plan = rows.plans[self.attention.name]
        attended = self.attention.attend(query, self.expansion.by_head, plan, selection)
        hidden = self.output(attended.flatten(1), hidden)
        return self.feed_forward(self.mlp_norm(hidden), hidden)


class MistralLarge4:
    """See the module."""

    def __init__(self, config: TextConfig, context: ModelContext) -> None:
        self.vocab_size = config.vocab_size
        self.hidden_size = config.hidden_size
        weights, kinds = context.weights, layer_kinds(config)
        self.cached_layers = _attention_layers(config, kinds, context)
        last_owner = max(i for i, layer in enumerate(self.cached_layers) if layer.kv_cache_spec() is not None)
        self._dtype = weights.dtype
        self.embedding = Embedding(config.vocab_size, config.hidden_size, weights)
        self.rotary = LearnedRotary(config, weights)

        def layer(index: int) -> Layer:
            return Layer(index, config, self.cached_layers[index], context, kinds[index])

        self.before_last_owner = [layer(index) for index in range(last_owner)]
        self.last_stored: StoringLayer | None = None
        self.from_last_owner: list[Layer] = []
        if context.headless:
            attention, rope = self.cached_layers[last_owner], kinds[last_owner].rope
            self.last_stored = StoringLayer(last_owner, config, attention, context, rope=rope)
            return
        self.from_last_owner = [layer(index) for index in range(last_owner, len(kinds))]
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, weights)
        self.head = LogitsHead(
            self.embedding, weights, tied=config.tie_word_embeddings, soft_cap=config.final_logit_softcapping
        )

    def slots(self) -> Iterator[Slot]:
        """Weights by checkpoint name."""
        yield from self.embedding.slots("tok_embeddings")
        yield from self.rotary.slots("lerope")
        for layer in (*self.before_last_owner, *self.from_last_owner):
            yield from layer.slots()
        if self.last_stored is not None:
            yield from self.last_stored.slots()
        else:
            yield from self.norm.slots("norm")
            yield from self.head.slots("output")

    def forward(self, step: StepInputs) -> torch.Tensor | None:
        """See ``Model.forward``."""
        hidden = self.embedding(step.token_ids)
        positions = step.rows.positions
        log_positions = (positions + 1).float().log().to(self._dtype)[:, None]
        rows = LayerRows(self.rotary.at(positions), log_positions, step.rows.plans)
        selection: Selection | None = None
        for layer in self.before_last_owner:
            normed = layer.store(hidden, rows)
            selection = layer.select(normed, rows, selection)
            hidden = layer.finish(normed, hidden, rows, selection)
        if self.last_stored is not None:
            self.last_stored.store(hidden, rows)
            return None

        last_owner, *others = self.from_last_owner
        normed = last_owner.store(hidden, rows)
        if step.logit_rows is None:
            return None
        if step.logit_index is not None:
            hidden, normed = hidden.index_select(0, step.logit_index), normed.index_select(0, step.logit_index)
            rows = rows.select(step.logit_index, step.logit_rows)
            selection = None if selection is None else selection.select(step.logit_index)
        selection = last_owner.select(normed, rows, selection)
        hidden = last_owner.finish(normed, hidden, rows, selection)
        for layer in others:
            normed = layer.store(hidden, rows)
            hidden = layer.finish(normed, hidden, rows, selection)
        return self.head(self.norm(hidden))


def _attention_layers(config: TextConfig, kinds: Sequence[LayerKind], context: ModelContext) -> list[LatentAttention]:
    names = [LayerName(f"model.layers.{index}.self_attn.attn") for index in range(len(kinds))]
    declared = {names[i]: names[kind.source] for i, kind in enumerate(kinds) if kind.source != i}
    targets = context.sharing.resolve(names, declared=declared)
    index = IndexShape(config.index_n_heads, config.index_head_dim, config.index_topk)
    head_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
    scale = head_dim**-0.5 * score_factor(config.rope_parameters)
    layers = [
        LatentAttention(
            name,
            heads=len(_heads(config, context)),
            latent_dim=config.kv_lora_rank,
            rope_dim=config.qk_rope_head_dim if kind.rope else 0,
            scale=scale,
            cache_format=context.cache,
            backend=context.latent_backend,
            index=index if kind.indexer else None,
            kv_sharing_target_layer_name=targets.get(name),
        )
        for name, kind in zip(names, kinds, strict=True)
    ]
    validate_targets(layers)
    return layers


def _heads(config: TextConfig, context: ModelContext) -> Span:
    """The query heads of this rank."""
    return split(context.weights.ranks, config.num_attention_heads, "num_attention_heads")


def _mixture_of_experts(config: TextConfig, weights: WeightFormat) -> MixtureOfExperts:
    width = config.moe_intermediate_size
    return MixtureOfExperts(
        Experts(config.n_routed_experts, config.hidden_size, width, weights),
        SoftmaxRouter(config.num_experts_per_tok, renormalize=True, scale=config.routed_scaling_factor),
        weights,
        shared=SharedExpert("shared_experts", config.hidden_size, width * config.n_shared_experts, weights),
        gate_dtype=torch.float32,
    )


def _checkpoint_name(name: str) -> str:
    return ".".join(PROJECTION_NAMES.get(part, part) for part in name.split("."))


def check_mistral_large4(config: TextConfig) -> None:
    """Refuse what this file does not compute, and what transformers would compute differently than it says."""
    require_setting(config, "model_type", "mistral_large4_text")
    require_sizes(
        config,
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "moe_intermediate_size",
        "n_routed_experts",
        "n_shared_experts",
        "num_experts_per_tok",
        "num_attention_heads",
        "kv_lora_rank",
        "qk_nope_head_dim",
        "v_head_dim",
        "index_n_heads",
        "index_head_dim",
        "index_topk",
        "max_position_embeddings",
    )
    require_head_dim("qk_rope_head_dim", config.qk_rope_head_dim)
    for field in ("rms_norm_eps", "routed_scaling_factor", "final_logit_softcapping"):
        require_positive(field, getattr(config, field))
    require_setting(config, "num_key_value_heads", config.num_attention_heads)
    require_setting(config, "hidden_act", "silu")
    require_setting(config, "attention_bias", False)
    require_setting(config, "n_group", 1)
    require_setting(config, "topk_group", 1)
    # An index key begins with its rotary part.
    require_at_most(config, "qk_rope_head_dim", "index_head_dim")
    require_at_most(config, "num_experts_per_tok", "n_routed_experts")
    require_rope_type(config, "default", "linear", "llama3", "yarn")
    require_full_rope(config)
    # transformers' own class checks the length of kv_source_layers.
    require_entries(config, "layer_types", ("indexed_attention",))
    require_entries(config, "mlp_layer_types", ("dense", "sparse"))
    require_entries(config, "indexer_types", ("full", "shared"))
    require_entries(config, "no_rope_layers", (0, 1))
    if config.indexer_types[0] == "shared":
        raise UnsupportedModel('config.json: indexer_types begins with "shared": no earlier layer has an indexer')
    _check_sources(layer_kinds(config))


def _check_sources(kinds: Sequence[LayerKind]) -> None:
    """In transformers a layer reads the latest latents that were stored for sharing by a layer of its own kind."""
    sources = {kind.source for index, kind in enumerate(kinds) if kind.source != index}
    latest: dict[bool, int] = {}
    for index, kind in enumerate(kinds):
        if kind.source == index:
            if index in sources:
                latest[kind.rope] = index
        elif kind.source != latest.get(kind.rope):
            name = "rope" if kind.rope else "no-rope"
            found = f"is layer {latest[kind.rope]}" if kind.rope in latest else "does not exist"
            raise UnsupportedModel(
                f"config.json: kv_source_layers[{index}] is {kind.source}, but the latest {name} layer before it that "
                f"stores latents for others {found}, and a {name} layer can read no others"
            )
