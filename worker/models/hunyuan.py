"""Hunyuan, dense and with experts, and Hunyuan-Large, whose layers share KV in groups (cross-layer attention, CLA).

Queries and keys are normalised after they were rotated. In a group of ``cla_share_factor`` layers the first computes
keys and values for all, but each layer has a key norm of its own, which comes after what is shared. So the cache holds
keys that are normalised and not yet scaled, and a layer scales its queries by its key norm's weight instead:
``(w * query) · key = query · (w * key)``.

transformers has the first two, without CLA and with fewer settings than their configurations; Hunyuan-Large's
architecture is that of its own release (Sun et al. 2024).
"""

from collections.abc import Iterator, Sequence

import torch

from worker.kv_cache.sharing import NoSharing, SharingError, Targets
from worker.kv_cache.specs import LayerName
from worker.layers.attention import Attention
from worker.layers.gated_mlp import FeedForward
from worker.layers.moe import Experts, MixtureOfExperts, SharedExpert
from worker.layers.rms_norm import RMSNorm, UnscaledRMSNorm
from worker.layers.rotary import Rotation
from worker.layers.router import SoftmaxRouter
from worker.layers.weights import Slot
from worker.models.config_checks import (
    UnsupportedModel,
    check_plain_decoder,
    require_setting,
    require_setting_if_given,
    require_sizes,
)
from worker.models.decoder import Decoder, DecoderLayer, DecoderShape, LastOwnerKeys
from worker.models.model import ModelContext
from worker.text_config import TextConfig


def check_hunyuan(config: TextConfig) -> None:
    """A plain decoder's settings; lists that fit the layers; nothing of the family's experiments."""
    check_plain_decoder(config)
    require_setting_if_given(config, "sliding_window", None)
    if config.rope_parameters.get("alpha"):
        raise UnsupportedModel(
            f"config.json: a rope scaling alpha is supported with type 'dynamic' and factor 1.0, not in "
            f"{config.rope_parameters}"
        )
    require_setting(config, "mlp_bias", False)
    require_setting(config, "norm_type", "rms", "hf_rms", "fused")
    require_setting(config, "use_rotary_pos_emb", True)
    for experiment in (
        "use_mla",
        "mamba",
        "position_embedding_xdrope",
        "group_limited_greedy",
        "moe_drop_tokens",
        "moe_random_routing_dropped_token",
        "add_classification_head",
    ):
        require_setting(config, experiment, False)
    if config.use_cla:
        require_sizes(config, "cla_share_factor")
    experts, chosen = _per_layer(config, "num_experts"), _per_layer(config, "moe_topk")
    for layer, (count, top_k) in enumerate(zip(experts, chosen, strict=True)):
        if top_k > count:
            raise UnsupportedModel(f"config.json: moe_topk of layer {layer} is {top_k}, num_experts only {count}")
    if config.use_mixed_mlp_moe:
        _per_layer(config, "num_shared_expert")
    if config.moe_intermediate_size is not None:
        _per_layer(config, "moe_intermediate_size")


def check_hunyuan_dense(config: TextConfig) -> None:
    """No experts."""
    check_hunyuan(config)
    require_setting(config, "num_experts", 1)


def check_hunyuan_moe(config: TextConfig) -> None:
    """Experts in every layer, as transformers computes it."""
    check_hunyuan(config)
    if 1 in _per_layer(config, "num_experts"):
        raise UnsupportedModel("config.json: num_experts is 1: that is HunYuanDenseV1ForCausalLM")


class HunyuanLastOwnerKeys(LastOwnerKeys):
    """Keys are rotated, then normalised and left unscaled."""

    def __init__(self, index: int, shape: DecoderShape, attention: Attention, context: ModelContext) -> None:
        super().__init__(index, shape, attention, context)
        self._unscaled = UnscaledRMSNorm(shape.norm_epsilon, context.weights)

    def rotate(self, key: torch.Tensor, rotation: Rotation) -> None:
        """See the base class."""
        super().rotate(key, rotation)
        key[:] = self._unscaled(key)


class HunyuanLayer(DecoderLayer):
    """Queries carry both norms' weights, keys neither's: see the module."""

    keys_class = HunyuanLastOwnerKeys

    def __init__(
        self, index: int, shape: DecoderShape, attention: Attention, feed_forward: FeedForward, context: ModelContext
    ) -> None:
        super().__init__(index, shape, attention, feed_forward, context)
        self._unscaled = UnscaledRMSNorm(shape.norm_epsilon, context.weights)
        self._query_layernorm = RMSNorm(shape.head_dim, shape.norm_epsilon, context.weights)
        self._key_scale = context.weights.empty(shape.head_dim)

    def slots(self) -> Iterator[Slot]:
        """The plain layer's, and both norms."""
        yield from super().slots()
        yield from self._query_layernorm.slots(f"{self.prefix}.self_attn.query_layernorm")
        yield Slot(f"{self.prefix}.self_attn.key_layernorm.weight", self._key_scale)

    def rotate(self, query_key: torch.Tensor, rotation: Rotation) -> None:
        """See the base class."""
        super().rotate(query_key, rotation)
        query, key = query_key[:, : self.attention.heads], query_key[:, self.attention.heads :]
        torch.mul(self._query_layernorm(query), self._key_scale, out=query)
        key[:] = self._unscaled(key)


class Hunyuan(Decoder):
    """``HunYuanDenseV1ForCausalLM`` and ``HunYuanMoEV1ForCausalLM``."""

    @staticmethod
    def shape_of(config: TextConfig) -> DecoderShape:
        """Biases in attention as the configuration says; norms on heads are the layers' own affair."""
        return DecoderShape.of(config, qkv_bias=config.attention_bias, output_bias=config.attention_bias)

    @staticmethod
    def layer_class(config: TextConfig) -> type[DecoderLayer]:
        """With norms on heads, or plain."""
        return HunyuanLayer if config.use_qk_norm else DecoderLayer

    def feed_forward(self, config: TextConfig, index: int, context: ModelContext) -> FeedForward:
        """Experts and what is shared beside them, or the plain MLP."""
        count = _per_layer(config, "num_experts")[index]
        if count == 1 or index < config.moe_layer_num_skipped:
            return super().feed_forward(config, index, context)
        top_k, shared = _per_layer(config, "moe_topk")[index], None
        if config.use_mixed_mlp_moe:
            width = config.intermediate_size * _per_layer(config, "num_shared_expert")[index]
            shared = SharedExpert(
                "shared_mlp", config.hidden_size, width, context.weights, field="intermediate_size * num_shared_expert"
            )
        field = "intermediate_size" if config.moe_intermediate_size is None else "moe_intermediate_size"
        return MixtureOfExperts(
            Experts(count, config.hidden_size, _expert_width(config, index), context.weights, field=field),
            SoftmaxRouter(top_k, renormalize=self.renormalizes(top_k)),
            context.weights,
            shared=shared,
            gate="gate.wg",
            gate_dtype=torch.float32,
        )

    @staticmethod
    def renormalizes(top_k: int) -> bool:
        """Whether the weights of the chosen experts sum to 1."""
        del top_k
        return True

    def declared_sharing(self, config: TextConfig, names: Sequence[LayerName]) -> Targets:
        """With CLA each layer uses the cache of the first of its group."""
        if not config.use_cla:
            return {}
        size = config.cla_share_factor
        return {name: names[i - i % size] for i, name in enumerate(names) if i % size}

    def sharing_targets(self, config: TextConfig, names: Sequence[LayerName], context: ModelContext) -> Targets:
        """Any rule under which layers share that have nothing of their own; without weights also none, to compare."""
        targets = super().sharing_targets(config, names, context)
        lonely = [name for name in self.declared_sharing(config, names) if name not in targets]
        compared = isinstance(context.sharing, NoSharing) and context.weights.device.type == "meta"
        if lonely and not compared:
            raise SharingError(
                f"--kv-sharing: {lonely[0]} has no key and value projections in this model (config.json: use_cla, "
                f"cla_share_factor {config.cla_share_factor}), so it has to share; use --kv-sharing model"
            )
        return targets


class HunyuanLarge(Hunyuan):
    """``HunYuanForCausalLM``: a single chosen expert counts as much as it is probable."""

    @staticmethod
    def renormalizes(top_k: int) -> bool:
        """Only among several."""
        return top_k > 1


def _per_layer(config: TextConfig, field: str) -> list[int]:
    """A field's value in every layer; raises unless all are whole numbers of at least 1."""
    value, layers = getattr(config, field), config.num_hidden_layers
    values = value if isinstance(value, list) else [value] * layers
    if len(values) != layers or not all(isinstance(one, int) and one > 0 for one in values):
        raise UnsupportedModel(
            f"config.json: {field} is {value!r}, neither a positive whole number nor a list of {layers} of them"
        )
    return values


def _expert_width(config: TextConfig, index: int) -> int:
    if config.moe_intermediate_size is None:
        return int(config.intermediate_size)
    return _per_layer(config, "moe_intermediate_size")[index]
