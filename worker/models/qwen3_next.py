"""Qwen3-Next: gated delta nets and, every few layers, gated attention; mixtures of experts as feed-forward.

A layer's mixer works in two halves, whatever it is: ``project`` needs every row and stores what later rows need,
``finish`` only the rows that go on. What passes between them is a pair: what the row asks or has read, and a gate.
All norms but the delta net's own scale by 1 + weight.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F

from kernels.pages import KEY_VALUE
from worker.kv_cache.sharing import validate_targets
from worker.kv_cache.specs import LayerName
from worker.layers.attention import Attention
from worker.layers.cached_layer import CachedLayer
from worker.layers.delta_recurrence import DeltaNetShape, DeltaRecurrence
from worker.layers.embedding import Embedding, LogitsHead
from worker.layers.gated_mlp import FeedForward, GatedMLP
from worker.layers.linear import Linear, SummedLinear
from worker.layers.moe import Experts, MixtureOfExperts, SharedExpert
from worker.layers.rms_norm import RMSNorm
from worker.layers.rotary import RotaryTable, Rotation
from worker.layers.router import SoftmaxRouter
from worker.layers.weights import Slot
from worker.models.config_checks import (
    FULL,
    UnsupportedModel,
    require_at_most,
    require_entries,
    require_head_dim,
    require_multiple,
    require_positive,
    require_rope,
    require_setting,
    require_setting_if_given,
    require_sizes,
)
from worker.models.model import ModelContext, RowSet, StepInputs
from worker.ranks.heads import Heads
from worker.text_config import TextConfig

DELTA_NET = "linear_attention"

_ATTENTION_MODULE = "model.layers.{}.self_attn"
_DELTA_NET_MODULE = "model.layers.{}.linear_attn"


def check_qwen3_next(config: TextConfig) -> None:
    """Refuse what this file does not compute."""
    require_sizes(
        config,
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "max_position_embeddings",
        "linear_num_key_heads",
        "linear_num_value_heads",
        "linear_key_head_dim",
        "linear_value_head_dim",
        "linear_conv_kernel_dim",
        "decoder_sparse_step",
    )
    require_head_dim("head_dim", config.head_dim)
    require_positive("rms_norm_eps", config.rms_norm_eps)
    require_multiple(config, "num_attention_heads", "num_key_value_heads")
    require_multiple(config, "linear_num_value_heads", "linear_num_key_heads")
    require_setting(config, "hidden_act", "silu")
    require_rope(config, config.head_dim)
    if config.linear_conv_kernel_dim < 2:
        raise UnsupportedModel("config.json: linear_conv_kernel_dim is 1; a convolution needs at least 2 inputs")
    require_setting_if_given(config, "use_sliding_window", False, None)
    _check_layers(config)


def _check_layers(config: TextConfig) -> None:
    layers = config.num_hidden_layers
    require_entries(config, "layer_types", (FULL, DELTA_NET))
    if FULL not in config.layer_types:
        raise UnsupportedModel(f"config.json: layer_types has no {FULL!r}: at least one such layer is needed")
    for index in config.mlp_only_layers:
        if not 0 <= index < layers:
            raise UnsupportedModel(f"config.json: mlp_only_layers names layer {index} of {layers} layers")
    if any(_is_sparse(config, index) for index in range(layers)):
        require_sizes(config, "moe_intermediate_size", "shared_expert_intermediate_size", "num_experts_per_tok")
        require_at_most(config, "num_experts_per_tok", "num_experts")


class TokenMixer(Protocol):
    """See the module."""

    def slots(self) -> Iterator[Slot]:
        """Weights by checkpoint name."""
        ...

    def project(self, hidden: torch.Tensor, rotation: Rotation, rows: RowSet) -> tuple[torch.Tensor, torch.Tensor]:
        """``[rows, hidden]`` to a pair of ``[rows, heads, head_dim]``; stores what is to be stored."""
        ...

    def finish(self, states: torch.Tensor, gate: torch.Tensor, rows: RowSet) -> torch.Tensor:
        """That pair to ``[rows, hidden]``."""
        ...


class KeyValueWriter:
    """The way of keys and values from their projection into the cache. ``prefix`` is the attention module's."""

    def __init__(self, prefix: str, attention: Attention, config: TextConfig, context: ModelContext) -> None:
        self._prefix = prefix
        self._attention = attention
        self.norm = RMSNorm(attention.head_dim, config.rms_norm_eps, context.weights, offset=1.0)

    def slots(self) -> Iterator[Slot]:
        """The norm of the keys."""
        yield from self.norm.slots(f"{self._prefix}.k_norm")

    def write(self, projected: torch.Tensor, rotation: Rotation, rows: RowSet) -> None:
        """``[rows, 2 * kv_heads * head_dim]``, keys first; changed in place."""
        attention = self._attention
        key_value = projected.view(len(projected), KEY_VALUE, attention.kv_heads, attention.head_dim)
        keys = key_value[:, 0]
        keys.copy_(self.norm(keys))
        rotation.apply(keys)
        attention.write(key_value, rows.plans[attention.name])


class GatedAttention:
    """Attention whose output is gated per head and channel before it is projected (Qiu et al. 2025)."""

    def __init__(self, prefix: str, attention: Attention, config: TextConfig, context: ModelContext) -> None:
        weights, bias = context.weights, config.attention_bias
        self._prefix = prefix
        self._attention = attention
        heads = _heads(config, context)
        # Each head's query is followed by its gate.
        parts = {"q_proj": heads.query.times(2 * attention.head_dim)}
        self._query_width = len(parts["q_proj"])
        self.writer: KeyValueWriter | None = None
        if attention.owns_cache:
            parts |= dict.fromkeys(("k_proj", "v_proj"), heads.key_value.times(attention.head_dim))
            self.writer = KeyValueWriter(prefix, attention, config, context)
        self.projection = Linear(parts, config.hidden_size, weights, bias=bias)
        self.query_norm = RMSNorm(attention.head_dim, config.rms_norm_eps, weights, offset=1.0)
        width = heads.query.times(attention.head_dim)
        self.output = SummedLinear("o_proj", config.hidden_size, width, weights, bias=bias)

    def slots(self) -> Iterator[Slot]:
        """Weights by checkpoint name."""
        yield from self.projection.slots(self._prefix)
        yield from self.query_norm.slots(f"{self._prefix}.q_norm")
        if self.writer is not None:
            yield from self.writer.slots()
        yield from self.output.slots(self._prefix)

    def project(self, hidden: torch.Tensor, rotation: Rotation, rows: RowSet) -> tuple[torch.Tensor, torch.Tensor]:
        """Write keys and values, return rotated queries and gates."""
        projected = self.projection(hidden)
        query, gate = projected[:, : self._query_width].view(len(hidden), self._attention.heads, -1).chunk(2, dim=-1)
        query = self.query_norm(query)
        rotation.apply(query)
        if self.writer is not None:
            self.writer.write(projected[:, self._query_width :], rotation, rows)
        return query, gate

    def finish(self, states: torch.Tensor, gate: torch.Tensor, rows: RowSet) -> torch.Tensor:
        """Attend."""
        attended = self._attention.attend(states, rows.plans[self._attention.name])
        return self.output((attended * gate.sigmoid()).flatten(1))


class GatedDeltaNet:
    """A delta recurrence (Yang et al. 2024), its output normalised per head and gated."""

    def __init__(self, prefix: str, recurrence: DeltaRecurrence, config: TextConfig, context: ModelContext) -> None:
        self._prefix = prefix
        self._recurrence = recurrence
        self.norm = RMSNorm(config.linear_value_head_dim, config.rms_norm_eps, context.weights)
        width = recurrence.value_heads.times(config.linear_value_head_dim)
        self.output = SummedLinear("out_proj", config.hidden_size, width, context.weights)

    def slots(self) -> Iterator[Slot]:
        """Weights by checkpoint name."""
        yield from self._recurrence.slots(self._prefix)
        yield from self.norm.slots(f"{self._prefix}.norm")
        yield from self.output.slots(self._prefix)

    def project(self, hidden: torch.Tensor, rotation: Rotation, rows: RowSet) -> tuple[torch.Tensor, torch.Tensor]:
        """Update the state, return what was read and gates. Positions play no part."""
        del rotation
        return self._recurrence(hidden, rows.plans[self._recurrence.state.name])

    def finish(self, states: torch.Tensor, gate: torch.Tensor, rows: RowSet) -> torch.Tensor:
        """Normalise and gate, in float32 at least."""
        del rows
        gated = self.norm(states) * F.silu(gate.to(torch.promote_types(gate.dtype, torch.float32)))
        return self.output(gated.to(states.dtype).flatten(1))


class Layer:
    """A mixer and a feed-forward on one residual stream, in the mixer's two halves."""

    def __init__(self, index: int, mixer: TokenMixer, config: TextConfig, context: ModelContext) -> None:
        self._prefix = f"model.layers.{index}"
        self._mixer = mixer
        self.input_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, context.weights, offset=1.0)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, context.weights, offset=1.0)
        self.feed_forward = _feed_forward(config, index, context)

    def slots(self) -> Iterator[Slot]:
        """Weights by checkpoint name."""
        yield from self.input_norm.slots(f"{self._prefix}.input_layernorm")
        yield from self._mixer.slots()
        yield from self.mlp_norm.slots(f"{self._prefix}.post_attention_layernorm")
        yield from self.feed_forward.slots(f"{self._prefix}.mlp")

    def project(self, hidden: torch.Tensor, rotation: Rotation, rows: RowSet) -> tuple[torch.Tensor, torch.Tensor]:
        """Of every row; see ``TokenMixer``."""
        return self._mixer.project(self.input_norm(hidden), rotation, rows)

    def finish(self, states: torch.Tensor, gate: torch.Tensor, hidden: torch.Tensor, rows: RowSet) -> torch.Tensor:
        """The mixer's output and the feed-forward, added to ``hidden``."""
        hidden = self._mixer.finish(states, gate, rows).add_(hidden)
        return self.feed_forward(self.mlp_norm(hidden), hidden)


class StateWriter(Protocol):
    """The part of a mixer that later rows depend on."""

    def slots(self) -> Iterator[Slot]:
        """Weights by checkpoint name."""
        ...

    def store(self, hidden: torch.Tensor, rotation: Rotation, rows: RowSet) -> None:
        """Store what ``[rows, hidden]`` says."""
        ...


class LastKeys:
    """Of an attention layer: keys and values."""

    def __init__(self, prefix: str, attention: Attention, config: TextConfig, context: ModelContext) -> None:
        self._prefix = prefix
        width = _heads(config, context).key_value.times(attention.head_dim)
        self.projection = Linear(
            {"k_proj": width, "v_proj": width}, config.hidden_size, context.weights, bias=config.attention_bias
        )
        self.writer = KeyValueWriter(prefix, attention, config, context)

    def slots(self) -> Iterator[Slot]:
        """Weights by checkpoint name."""
        yield from self.projection.slots(self._prefix)
        yield from self.writer.slots()

    def store(self, hidden: torch.Tensor, rotation: Rotation, rows: RowSet) -> None:
        """Write keys and values."""
        self.writer.write(self.projection(hidden), rotation, rows)


class LastState:
    """Of a gated delta net: the recurrence."""

    def __init__(self, prefix: str, recurrence: DeltaRecurrence) -> None:
        self._prefix = prefix
        self._recurrence = recurrence

    def slots(self) -> Iterator[Slot]:
        """Weights by checkpoint name."""
        yield from self._recurrence.slots(self._prefix)

    def store(self, hidden: torch.Tensor, rotation: Rotation, rows: RowSet) -> None:
        """Update the state."""
        del rotation
        self._recurrence(hidden, rows.plans[self._recurrence.state.name])


class LastOwner:
    """All that a headless model keeps of the last layer that stores anything."""

    def __init__(self, index: int, writer: StateWriter, config: TextConfig, context: ModelContext) -> None:
        self._prefix = f"model.layers.{index}"
        self._writer = writer
        self.input_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, context.weights, offset=1.0)

    def slots(self) -> Iterator[Slot]:
        """Weights by checkpoint name."""
        yield from self.input_norm.slots(f"{self._prefix}.input_layernorm")
        yield from self._writer.slots()

    def store(self, hidden: torch.Tensor, rotation: Rotation, rows: RowSet) -> None:
        """Of every row."""
        self._writer.store(self.input_norm(hidden), rotation, rows)


class Qwen3Next:
    """``Qwen3NextForCausalLM``."""

    def __init__(self, config: TextConfig, context: ModelContext) -> None:
        self.vocab_size = config.vocab_size
        self.hidden_size = config.hidden_size
        cores = _cores(config, context)
        self.cached_layers: Sequence[CachedLayer] = [
            core if isinstance(core, Attention) else core.state for core in cores
        ]
        last_owner = max(i for i, layer in enumerate(self.cached_layers) if layer.kv_cache_spec() is not None)
        self._rotary = RotaryTable(
            config, config.head_dim, context.max_model_len, context.weights.dtype, context.weights.device
        )
        self.embedding = Embedding(config.vocab_size, config.hidden_size, context.weights)

        def layer(index: int) -> Layer:
            return Layer(index, _mixer(index, cores[index], config, context), config, context)

        self.before_last_owner = [layer(index) for index in range(last_owner)]
        self.last_owner_only: LastOwner | None = None
        self.from_last_owner: list[Layer] = []
        if context.headless:
            writer = _state_writer(last_owner, cores[last_owner], config, context)
            self.last_owner_only = LastOwner(last_owner, writer, config, context)
            return
        self.from_last_owner = [layer(index) for index in range(last_owner, len(cores))]
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, context.weights, offset=1.0)
        self.head = LogitsHead(self.embedding, context.weights, tied=config.tie_word_embeddings)

    def slots(self) -> Iterator[Slot]:
        """Weights by checkpoint name."""
        yield from self.embedding.slots("model.embed_tokens")
        for layer in (*self.before_last_owner, *self.from_last_owner):
            yield from layer.slots()
        if self.last_owner_only is not None:
            yield from self.last_owner_only.slots()
        else:
            yield from self.norm.slots("model.norm")
            yield from self.head.slots("lm_head")

    def forward(self, step: StepInputs) -> torch.Tensor | None:
        """See ``Model.forward``."""
        hidden = self.embedding(step.token_ids)
        rotation = self._rotary.at(step.rows.positions)
        for layer in self.before_last_owner:
            hidden = layer.finish(*layer.project(hidden, rotation, step.rows), hidden, step.rows)
        if self.last_owner_only is not None:
            self.last_owner_only.store(hidden, rotation, step.rows)
            return None

        last_owner, *sharing = self.from_last_owner
        states, gate = last_owner.project(hidden, rotation, step.rows)
        if step.logit_rows is None:
            return None
        if step.logit_index is not None:
            states, gate, hidden = (part.index_select(0, step.logit_index) for part in (states, gate, hidden))
            rotation = rotation.select(step.logit_index)
        hidden = last_owner.finish(states, gate, hidden, step.logit_rows)
        for layer in sharing:
            hidden = layer.finish(*layer.project(hidden, rotation, step.logit_rows), hidden, step.logit_rows)
        return self.head(self.norm(hidden))


def _heads(config: TextConfig, context: ModelContext) -> Heads:
    """Those of this rank, in every layer with attention."""
    return Heads.of(context.weights.ranks, config.num_attention_heads, config.num_key_value_heads)


def _cores(config: TextConfig, context: ModelContext) -> list[Attention | DeltaRecurrence]:
    """What each layer has a cache for. Only attention can share."""
    names = {
        index: LayerName(f"model.layers.{index}.self_attn.attn")
        for index, kind in enumerate(config.layer_types)
        if kind == FULL
    }
    targets = context.sharing.resolve(list(names.values()), declared={})
    heads = _heads(config, context)
    attentions = {
        index: Attention(
            name,
            heads=len(heads.query),
            kv_heads=len(heads.key_value),
            head_dim=config.head_dim,
            scale=config.head_dim**-0.5,
            cache_format=context.cache,
            backend=context.backend,
            kv_sharing_target_layer_name=targets.get(name),
        )
        for index, name in names.items()
    }
    validate_targets(attentions.values())
    shape = DeltaNetShape(
        hidden_size=config.hidden_size,
        key_heads=config.linear_num_key_heads,
        value_heads=config.linear_num_value_heads,
        key_dim=config.linear_key_head_dim,
        value_dim=config.linear_value_head_dim,
        kernel=config.linear_conv_kernel_dim,
    )
    return [
        attentions[index]
        if index in attentions
        else DeltaRecurrence(
            LayerName(f"model.layers.{index}.linear_attn.state"), shape, context.weights, context.cache.dtype
        )
        for index in range(config.num_hidden_layers)
    ]


def _mixer(index: int, core: Attention | DeltaRecurrence, config: TextConfig, context: ModelContext) -> TokenMixer:
    if isinstance(core, Attention):
        return GatedAttention(_ATTENTION_MODULE.format(index), core, config, context)
    return GatedDeltaNet(_DELTA_NET_MODULE.format(index), core, config, context)


def _state_writer(
    index: int, core: Attention | DeltaRecurrence, config: TextConfig, context: ModelContext
) -> StateWriter:
    if isinstance(core, Attention):
        return LastKeys(_ATTENTION_MODULE.format(index), core, config, context)
    return LastState(_DELTA_NET_MODULE.format(index), core)


def _is_sparse(config: TextConfig, index: int) -> bool:
    """Whether a layer's feed-forward is a mixture of experts."""
    if index in config.mlp_only_layers or config.num_experts == 0:
        return False
    return bool((index + 1) % config.decoder_sparse_step == 0)


def _feed_forward(config: TextConfig, index: int, context: ModelContext) -> FeedForward:
    hidden_size, weights = config.hidden_size, context.weights
    if not _is_sparse(config, index):
        return GatedMLP(hidden_size, config.intermediate_size, weights)
    return MixtureOfExperts(
        Experts(config.num_experts, hidden_size, config.moe_intermediate_size, weights),
        SoftmaxRouter(config.num_experts_per_tok, renormalize=config.norm_topk_prob),
        weights,
        shared=SharedExpert(
            "shared_expert",
            hidden_size,
            config.shared_expert_intermediate_size,
            weights,
            gated=True,
            field="shared_expert_intermediate_size",
        ),
    )
