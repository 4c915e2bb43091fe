"""Gemma 4, the text model: wider heads in full attention, caches shared by the last layers, optional experts.

What varies between the releases is read from the configuration. Full layers may take their values from the keys'
projection (``attention_k_eq_v``): the weights are one, the cached keys and values are not. Small models share caches
(``num_kv_shared_layers``), give the layers that do so an MLP twice as wide (``use_double_wide_mlp``), and have
per-layer inputs; others have a mixture of experts beside the MLP (``enable_moe_block``).
"""

from collections.abc import Iterator
from dataclasses import replace

import torch

from worker.layers.linear import Linear
from worker.layers.moe import Experts
from worker.layers.per_layer_input import PerLayerGate, PerLayerInputs
from worker.layers.rms_norm import UnscaledRMSNorm
from worker.layers.router import SoftmaxRouter
from worker.layers.weights import Slot, WeightFormat
from worker.models.config_checks import (
    FULL,
    SLIDING,
    UnsupportedModel,
    require_at_most,
    require_head_dim,
    require_setting,
    require_sizes,
)
from worker.models.gemma import (
    CheckpointNames,
    FeedForward,
    GemmaDecoder,
    Hidden,
    NormalizedEntry,
    NormalizedMLP,
    Residual,
    gelu_mlp,
)
from worker.models.gemma_attention import GemmaShape, LayerShape, Values
from worker.models.gemma_checks import check_gemma, check_sharing
from worker.models.model import ModelContext
from worker.text_config import TextConfig

TEXT = CheckpointNames()
MULTIMODAL = CheckpointNames("model.language_model")
PER_LAYER_FIELDS = frozenset({"head_dim", "num_key_value_heads"})


def check_gemma4(config: TextConfig) -> None:
    """Refuse what this file does not compute."""
    require_setting(config, "model_type", "gemma4_text")
    # First, because other fields cannot be read while they differ from layer to layer.
    _check_per_layer_fields(config)
    check_gemma(config, ("default", "linear", "proportional"))
    check_sharing(config)
    require_sizes(config, "intermediate_size")
    # "vision" lets the tokens of an image see each other; without images it changes nothing.
    require_setting(config, "use_bidirectional_attention", None, "vision")
    if config.hidden_size_per_layer_input:
        require_sizes(config, "hidden_size_per_layer_input", "vocab_size_per_layer_input")
        require_at_most(config, "vocab_size", "vocab_size_per_layer_input")
    if config.enable_moe_block:
        require_sizes(config, "num_experts", "top_k_experts", "moe_intermediate_size")
        require_at_most(config, "top_k_experts", "num_experts")


def _check_per_layer_fields(config: TextConfig) -> None:
    others = (config.per_layer_attributes or set()) - PER_LAYER_FIELDS
    if others:
        raise UnsupportedModel(
            f"config.json: per_layer_config changes {', '.join(sorted(others))}, which is not supported"
        )
    shapes: dict[str, tuple[int, int]] = {}
    for index, (layer_type, layer) in enumerate(zip(config.layer_types, config.per_layer_config, strict=False)):
        if config.is_heterogeneous and layer.skip:
            raise UnsupportedModel(
                f"config.json: per_layer_config skips {layer.skip} of layer {index}, which is not supported"
            )
        require_sizes(layer, "num_key_value_heads")
        require_head_dim("head_dim", layer.head_dim)
        shape = (layer.num_key_value_heads, layer.head_dim)
        if shapes.setdefault(layer_type, shape) != shape:
            raise UnsupportedModel(
                f"config.json: layer {index} of layer_types {layer_type} has {shape[0]} KV heads of {shape[1]}, others "
                f"of that type have {shapes[layer_type][0]} of {shapes[layer_type][1]}; they must be alike"
            )
        if config.num_attention_heads % layer.num_key_value_heads:
            raise UnsupportedModel(
                f"config.json: num_attention_heads {config.num_attention_heads} is not a multiple of the "
                f"{layer.num_key_value_heads} KV heads of layer {index}"
            )


class ExpertRouter:
    """Scores experts by a row's direction alone, and weights the chosen ones by a learned scale of each."""

    def __init__(self, experts: int, top_k: int, shape: GemmaShape, weights: WeightFormat) -> None:
        self.norm = UnscaledRMSNorm(shape.norm_epsilon, weights)
        self.scale = weights.empty(shape.hidden_size)
        self.projection = Linear({"proj": experts}, shape.hidden_size, weights)
        self.expert_scale = weights.empty(experts)
        self._input_scale = shape.hidden_size**-0.5
        self._choose = SoftmaxRouter(top_k, renormalize=True)

    def slots(self, prefix: str) -> Iterator[Slot]:
        """Weights by checkpoint name; ``prefix`` is the router's."""
        yield Slot(f"{prefix}.scale", self.scale)
        yield from self.projection.slots(prefix)
        yield Slot(f"{prefix}.per_expert_scale", self.expert_scale)

    def __call__(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of ``[rows, hidden]``: expert ids and their weights, ``[rows, k]``."""
        directions = self.norm(hidden).mul_(self.scale).mul_(self._input_scale)
        experts, weights = self._choose(self.projection(directions).float())
        return experts, weights * self.expert_scale[experts]


class DenseAndExperts:
    """The sum of a gated MLP and a mixture of experts, each between norms of its own."""

    def __init__(self, shape: GemmaShape, dense: NormalizedMLP, config: TextConfig, weights: WeightFormat) -> None:
        self._ranks = weights.ranks
        self.dense = dense
        self.dense_norm = shape.norm(weights)
        self.router = ExpertRouter(config.num_experts, config.top_k_experts, shape, weights)
        self.experts_input_norm = shape.norm(weights)
        self.experts = Experts(
            config.num_experts,
            shape.hidden_size,
            config.moe_intermediate_size,
            weights,
            activate=weights.pointwise.gelu_and_multiply,
        )
        self.experts_norm = shape.norm(weights)

    def slots(self, prefix: str) -> Iterator[Slot]:
        """Weights by checkpoint name; the experts' are one tensor of each kind."""
        yield from self.dense.slots(prefix)
        yield from self.dense_norm.slots(f"{prefix}.post_feedforward_layernorm_1")
        yield from self.router.slots(f"{prefix}.router")
        yield from self.experts_input_norm.slots(f"{prefix}.pre_feedforward_layernorm_2")
        yield from self.experts.fused_slots(f"{prefix}.experts")
        yield from self.experts_norm.slots(f"{prefix}.post_feedforward_layernorm_2")

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[rows, hidden]`` in, a new tensor out."""
        experts, weights = self.router(hidden)
        sparse = self._ranks.sum(self.experts(self.experts_input_norm(hidden), experts, weights))
        return self.dense_norm(self.dense(hidden)).add_(self.experts_norm(sparse))


class Gemma4Layer(NormalizedEntry):
    """A residual stream to which attention, feed-forward and a per-layer input are added; then it is scaled."""

    def __init__(
        self,
        prefix: str,
        shape: GemmaShape,
        feed_forward: FeedForward,
        index: int,
        gate: PerLayerGate | None,
        weights: WeightFormat,
    ) -> None:
        super().__init__(prefix, shape, weights)
        self.residual = Residual(prefix, shape, feed_forward, weights)
        self.gate = gate
        self.scalar = weights.empty(1)
        self._index = index

    def slots(self) -> Iterator[Slot]:
        """Weights by checkpoint name."""
        yield from super().slots()
        yield from self.residual.slots()
        if self.gate is not None:
            yield from self.gate.slots(self._prefix)
        yield Slot(f"{self._prefix}.layer_scalar", self.scalar)

    def leave(self, hidden: Hidden, normed: torch.Tensor, attended: torch.Tensor) -> Hidden:
        """See ``Layer``."""
        del normed
        stream = self.residual.add_feed_forward(self.residual.add_attention(hidden.stream, attended))
        if self.gate is not None and hidden.per_layer is not None:
            stream = self.gate(stream, hidden.per_layer[:, self._index]).add_(stream)
        return replace(hidden, stream=stream.mul_(self.scalar))


class Gemma4(GemmaDecoder):
    """``Gemma4ForCausalLM``, and the text part of ``Gemma4ForConditionalGeneration``."""

    def __init__(self, config: TextConfig, context: ModelContext, names: CheckpointNames = TEXT) -> None:
        super().__init__(config, context, names, _shape(config))
        self.per_layer: PerLayerInputs | None = None
        if config.hidden_size_per_layer_input:
            self.per_layer = PerLayerInputs(
                config.vocab_size_per_layer_input,
                config.num_hidden_layers,
                config.hidden_size_per_layer_input,
                config.hidden_size,
                config.rms_norm_eps,
                self.weights,
                used_layers=self.computed_layers,
                projection_scale=config.hidden_size**-0.5,
                sum_scale=2.0**-0.5,
            )

    def entry(self, config: TextConfig, index: int) -> NormalizedEntry:
        """The norm before attention."""
        del config
        return NormalizedEntry(self.prefix(index), self.shape, self.weights)

    def layer(self, config: TextConfig, index: int) -> Gemma4Layer:
        """A layer with what the configuration gives it."""
        shape, weights = self.shape, self.weights
        # The width belongs to the checkpoint, whatever shares a cache here.
        wide = config.use_double_wide_mlp and index >= len(shape.layers) - shape.sharing_layers
        mlp = gelu_mlp(shape.hidden_size, config.intermediate_size * (2 if wide else 1), weights)
        feed_forward: FeedForward = NormalizedMLP(shape, mlp, weights)
        if config.enable_moe_block:
            feed_forward = DenseAndExperts(shape, NormalizedMLP(shape, mlp, weights), config, weights)
        width = config.hidden_size_per_layer_input
        gate = PerLayerGate(width, shape.hidden_size, shape.norm_epsilon, weights) if width else None
        return Gemma4Layer(self.prefix(index), shape, feed_forward, index, gate, weights)

    def embed(self, token_ids: torch.Tensor) -> Hidden:
        """The scaled embedding, and the per-layer inputs if there are any."""
        stream = self.embedding(token_ids)
        return Hidden(stream, None if self.per_layer is None else self.per_layer(token_ids, stream))

    def slots(self) -> Iterator[Slot]:
        """Weights by checkpoint name."""
        yield from super().slots()
        if self.per_layer is not None:
            yield from self.per_layer.slots(self.names.body)


def _shape(config: TextConfig) -> GemmaShape:
    layers = config.per_layer_config or [config] * config.num_hidden_layers
    return GemmaShape(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        layers=tuple(
            LayerShape(
                layer_type,
                heads=config.num_attention_heads,
                kv_heads=layer.num_key_value_heads,
                head_dim=layer.head_dim,
                window=config.sliding_window if layer_type == SLIDING else None,
                scale=1.0,
                values=Values.NORMALIZED_KEYS if config.attention_k_eq_v and layer_type == FULL else Values.NORMALIZED,
            )
            for layer_type, layer in zip(config.layer_types, layers, strict=True)
        ),
        norm_epsilon=config.rms_norm_eps,
        attention_bias=config.attention_bias,
        tied_embeddings=config.tie_word_embeddings,
        soft_cap=config.final_logit_softcapping,
        sharing_layers=config.num_kv_shared_layers,
    )
