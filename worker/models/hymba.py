"""Hymba (Dong et al. 2024): attention heads and a Mamba side by side in every layer, over the same input.

Both branches' outputs are normalised, averaged and projected. Values are as wide, over all heads, as the Mamba's
channels, so a value has ``mamba_expand`` times as many numbers as a key. Learned meta tokens stand before every
sequence: their ids follow the vocabulary's, and windows never lose sight of them. Most layers use the keys and values
of the layer before; each has a Mamba of its own, so the last layer stores something in any case.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F

from worker.kv_cache.sharing import Targets, validate_targets
from worker.kv_cache.specs import LayerName
from worker.layers.attention import Attention
from worker.layers.cached_layer import CachedLayer
from worker.layers.embedding import Embedding, LogitsHead
from worker.layers.gated_mlp import GatedMLP
from worker.layers.linear import Linear
from worker.layers.mamba import Mamba, MambaShape
from worker.layers.rms_norm import RMSNorm
from worker.layers.rotary import RotaryTable, Rotation
from worker.layers.weights import Slot, WeightFormat
from worker.models.config_checks import (
    UnsupportedModel,
    require_full_rope,
    require_head_dim,
    require_multiple,
    require_positive,
    require_setting,
    require_sizes,
)
from worker.models.model import ModelContext, RowSet, StepInputs
from worker.ranks.rank_group import CannotSplit
from worker.ranks.span import Span
from worker.text_config import TextConfig

MAX_META_TOKENS = 1 << 16


def check_hymba(config: TextConfig) -> None:
    """Raise ``UnsupportedModel`` for sizes that make no sense and for what the published code can but we cannot."""
    require_sizes(
        config,
        "vocab_size",
        "num_key_value_heads",
        "intermediate_size",
        "num_memory_tokens",
        "mamba_d_state",
        "mamba_d_conv",
        "mamba_expand",
        "mamba_dt_rank",
    )
    if config.num_memory_tokens > MAX_META_TOKENS:
        raise UnsupportedModel(
            f"config.json: num_memory_tokens is {config.num_memory_tokens}, more than {MAX_META_TOKENS}"
        )
    require_multiple(config, "hidden_size", "num_attention_heads")
    require_multiple(config, "num_attention_heads", "num_key_value_heads")
    head_dim = config.hidden_size // config.num_attention_heads
    require_head_dim("hidden_size / num_attention_heads", head_dim)
    require_setting(config, "attn_hidden_size", -1, config.hidden_size)
    require_setting(config, "kq_head_dim", -1, head_dim)
    require_setting(config, "v_head_dim", -1, head_dim * config.mamba_expand)
    require_setting(config, "kq_norm", "none")
    require_setting(config, "rope", True)
    require_setting(config, "rope_type", None, "default", "ntk")
    require_full_rope(config)
    require_positive("rms_norm_eps", config.rms_norm_eps)
    require_setting(config, "kv_reuse_every_i_layer", -1, 0)
    require_setting(config, "kv_weight_reuse", False)
    require_setting(config, "memory_tokens_interspersed_every", 0)
    require_setting(config, "num_mamba", 1)
    require_setting(config, "mamba_conv_bias", True)
    require_setting(config, "mamba_proj_bias", False)
    require_setting(config, "mamba_inner_layernorms", True)
    require_setting(config, "hidden_act", "silu")
    require_setting(config, "mlp_hidden_act", "silu")
    require_setting(config, "num_experts", 1)
    if config.layer_type not in (None, ["h"] * config.num_hidden_layers):
        raise UnsupportedModel(f"config.json: layer_type is {config.layer_type!r}; supported: 'h' for every layer")
    if config.sliding_window is not None:
        require_sizes(config, "sliding_window")
        _require_layers(config, "global_attn_idx", config.global_attn_idx)
    groups = config.kv_reuse_group
    if groups is not None:
        if not (isinstance(groups, list) and all(isinstance(group, list) and group for group in groups)):
            raise UnsupportedModel(f"config.json: kv_reuse_group is {groups!r}, not a list of lists of layers")
        _require_layers(config, "kv_reuse_group", [layer for group in groups for layer in group])


def _require_layers(config: TextConfig, field: str, layers: object) -> None:
    """Raise unless ``layers`` is a list of different layer indices."""
    every = range(config.num_hidden_layers)
    if not (isinstance(layers, list) and all(type(layer) is int and layer in every for layer in layers)):
        raise UnsupportedModel(f"config.json: {field} names {layers!r}; the model has layers 0 to {every[-1]}")
    if len(set(layers)) < len(layers):
        raise UnsupportedModel(f"config.json: {field} names a layer twice: {layers!r}")


def meta_tokens(config: TextConfig) -> tuple[int, ...]:
    """The ids that stand before every sequence."""
    return tuple(range(config.vocab_size, config.vocab_size + config.num_memory_tokens))


class MetaTokenEmbedding(Embedding):
    """Ids after the vocabulary are meta tokens. ``weight`` is the vocabulary's part of the table."""

    def __init__(self, vocab_size: int, meta_tokens: int, hidden_size: int, weight_format: WeightFormat) -> None:
        super().__init__(vocab_size + meta_tokens, hidden_size, weight_format)
        self._table = self.weight
        self.weight, self.meta_tokens = self._table.split_with_sizes([vocab_size, meta_tokens])
        self.rows = Span(0, vocab_size, vocab_size)

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Int64 ``[rows]`` to ``[rows, hidden]``."""
        return F.embedding(token_ids, self._table)


class LayerStorage:
    """What a layer does for later tokens' sake: keys and values, unless it shares them, and the Mamba's state.

    ``in_proj`` is one matrix for both branches; its rows are queries, keys, values, the Mamba's input, its gate.
    """

    def __init__(self, index: int, config: TextConfig, attention: Attention, context: ModelContext) -> None:
        hidden = config.hidden_size
        channels = config.mamba_expand * hidden
        self.prefix = f"model.layers.{index}"
        self.attention = attention
        keys = attention.kv_heads * attention.head_dim
        widths = [keys, keys * attention.value_parts, channels]
        # A layer that shares by --kv-sharing, not by the checkpoint, has rows that go unused.
        has_key_value = attention.owns_cache or index not in _sharing_layers(config)
        stream_begin = hidden + (sum(widths[:2]) if has_key_value else 0)
        self.input_norm = RMSNorm(hidden, config.rms_norm_eps, context.weights)
        self.in_proj = Linear({"in_proj": stream_begin + 2 * channels}, hidden, context.weights)
        self._query = self.in_proj.weight[:hidden]
        self._stored_widths = widths if attention.owns_cache else [0, 0, channels]
        stored_end = stream_begin + channels
        self._stored = self.in_proj.weight[stored_end - sum(self._stored_widths) : stored_end]
        self._gate = self.in_proj.weight[-channels:]
        shape = MambaShape(
            channels, config.mamba_d_state, config.mamba_dt_rank, config.mamba_d_conv, config.rms_norm_eps
        )
        name = LayerName(f"{self.prefix}.mamba.state")
        self.mamba = Mamba(name, shape, context.weights, context.cache.dtype)

    def slots(self) -> Iterator[Slot]:
        """Weights by checkpoint name."""
        yield from self.input_norm.slots(f"{self.prefix}.input_layernorm")
        yield from self.in_proj.slots(f"{self.prefix}.mamba")
        yield from self.mamba.slots(f"{self.prefix}.mamba")

    def store(self, normed: torch.Tensor, rotation: Rotation, rows: RowSet) -> torch.Tensor:
        """Write keys, values and state of every row; return what the Mamba reads, ``[rows, channels]`` in float32."""
        keys, values, stream = F.linear(normed, self._stored).split_with_sizes(self._stored_widths, dim=1)
        if self.attention.owns_cache:
            heads = (len(normed), self.attention.kv_heads, -1, self.attention.head_dim)
            keys, values = keys.view(heads), values.view(heads)
            rotation.apply(keys[:, :, 0])
            key_value = torch.cat([keys, values], dim=2).transpose(1, 2)
            self.attention.write(key_value, rows.plans[self.attention.name])
        return self.mamba(stream, rows.plans[self.mamba.state.name])

    def query(self, normed: torch.Tensor) -> torch.Tensor:
        """``[rows, heads, head_dim]``, not rotated."""
        return F.linear(normed, self._query).view(len(normed), self.attention.heads, -1)

    def gate(self, normed: torch.Tensor) -> torch.Tensor:
        """The gate on what the Mamba reads, ``[rows, channels]``."""
        return F.silu(F.linear(normed, self._gate))


class HymbaLayer:
    """One layer: what it stores, which needs every row, and what it adds to the rows that go on."""

    def __init__(self, index: int, config: TextConfig, attention: Attention, context: ModelContext) -> None:
        weights, epsilon = context.weights, config.rms_norm_eps
        channels = config.mamba_expand * config.hidden_size
        self.storage = LayerStorage(index, config, attention, context)
        self.attention_norm = RMSNorm(channels, epsilon, weights)
        self.mamba_norm = RMSNorm(channels, epsilon, weights)
        self.output = Linear({"out_proj": config.hidden_size}, channels, weights)
        self.mlp_norm = RMSNorm(config.hidden_size, epsilon, weights)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, weights)

    def slots(self) -> Iterator[Slot]:
        """Weights by checkpoint name."""
        prefix = self.storage.prefix
        yield from self.storage.slots()
        yield from self.attention_norm.slots(f"{prefix}.mamba.pre_avg_layernorm1")
        yield from self.mamba_norm.slots(f"{prefix}.mamba.pre_avg_layernorm2")
        yield from self.output.slots(f"{prefix}.mamba")
        yield from self.mlp_norm.slots(f"{prefix}.pre_moe_layernorm")
        yield from self.mlp.slots(f"{prefix}.moe.experts.0")

    def finish(
        self, hidden: torch.Tensor, normed: torch.Tensor, read: torch.Tensor, rotation: Rotation, rows: RowSet
    ) -> torch.Tensor:
        """Both branches and the feed-forward half, added to the residual stream ``hidden``."""
        query = self.storage.query(normed)
        rotation.apply(query)
        attention = self.storage.attention
        attended = attention.attend(query, rows.plans[attention.name]).flatten(1)
        gated = (read * self.storage.gate(normed)).to(hidden.dtype)
        mean = self.attention_norm(attended).add_(self.mamba_norm(gated)).div_(2)
        hidden = self.output(mean).add_(hidden)
        return self.mlp(self.mlp_norm(hidden), hidden)


class Hymba:
    """See the module."""

    def __init__(self, config: TextConfig, context: ModelContext) -> None:
        if context.weights.ranks.size > 1:
            raise CannotSplit("the architecture is HymbaForCausalLM, of which every layer is computed on one rank")
        names = [LayerName(f"model.layers.{i}.mamba.self_attn.attn") for i in range(config.num_hidden_layers)]
        declared = {names[i]: names[owner] for i, owner in _sharing_layers(config).items()}
        targets = context.sharing.resolve(names, declared=declared)
        attentions = [_attention(i, name, config, context, targets) for i, name in enumerate(names)]
        validate_targets(attentions)
        self.vocab_size = config.vocab_size
        self.hidden_size = config.hidden_size
        self._rotary = RotaryTable(
            config,
            attentions[0].head_dim,
            context.max_model_len,
            context.weights.dtype,
            context.weights.device,
        )
        self.embedding = MetaTokenEmbedding(
            config.vocab_size, config.num_memory_tokens, config.hidden_size, context.weights
        )
        last = len(names) - 1
        self.layers = [HymbaLayer(i, config, attentions[i], context) for i in range(last)]
        self.storage_only: LayerStorage | None = None
        if context.headless:
            self.storage_only = LayerStorage(last, config, attentions[last], context)
        else:
            self.layers.append(HymbaLayer(last, config, attentions[last], context))
            self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, context.weights)
            self.head = LogitsHead(self.embedding, context.weights, tied=config.tie_word_embeddings)
        storages = [layer.storage for layer in self.layers] + ([self.storage_only] if self.storage_only else [])
        self.cached_layers: Sequence[CachedLayer] = [
            cached for storage in storages for cached in (storage.attention, storage.mamba.state)
        ]

    def slots(self) -> Iterator[Slot]:
        """Weights by checkpoint name."""
        yield from self.embedding.slots("model.embed_tokens")
        yield Slot("model.memory_tokens", self.embedding.meta_tokens)
        for layer in self.layers:
            yield from layer.slots()
        if self.storage_only is not None:
            yield from self.storage_only.slots()
        else:
            yield from self.norm.slots("model.final_layernorm")
            yield from self.head.slots("lm_head")

    def forward(self, step: StepInputs) -> torch.Tensor | None:
        """See ``Model.forward``."""
        hidden = self.embedding(step.token_ids)
        rotation = self._rotary.at(step.rows.positions)
        before_last = self.layers if self.storage_only is not None else self.layers[:-1]
        for layer in before_last:
            normed = layer.storage.input_norm(hidden)
            read = layer.storage.store(normed, rotation, step.rows)
            hidden = layer.finish(hidden, normed, read, rotation, step.rows)

        storage = self.storage_only or self.layers[-1].storage
        normed = storage.input_norm(hidden)
        read = storage.store(normed, rotation, step.rows)
        if self.storage_only is not None or step.logit_rows is None:
            return None
        if step.logit_index is not None:
            hidden, normed, read = (rows.index_select(0, step.logit_index) for rows in (hidden, normed, read))
            rotation = rotation.select(step.logit_index)
        hidden = self.layers[-1].finish(hidden, normed, read, rotation, step.logit_rows)
        return self.head(self.norm(hidden))


def _sharing_layers(config: TextConfig) -> dict[int, int]:
    """From each layer without keys and values of its own, by the checkpoint, to the first of its group."""
    return {layer: group[0] for group in config.kv_reuse_group or () for layer in group[1:]}


def _attention(index: int, name: LayerName, config: TextConfig, context: ModelContext, targets: Targets) -> Attention:
    head_dim = config.hidden_size // config.num_attention_heads
    slides = config.sliding_window is not None and index not in config.global_attn_idx
    return Attention(
        name,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        value_head_dim=config.mamba_expand * head_dim,
        scale=head_dim**-0.5,
        cache_format=context.cache,
        backend=context.backend,
        # The published mask compares distances with it: that many tokens, and the query's own.
        window=config.sliding_window + 1 if slides else None,
        sinks=config.num_memory_tokens if slides else 0,
        kv_sharing_target_layer_name=targets.get(name),
    )
