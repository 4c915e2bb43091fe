"""Hymba (Dong et al. 2024, arXiv 2411.13676) in its plainest form: the reference for a model that transformers lacks.

Written from the published description. Facts, and where they are from ([M]: modeling_hymba.py that is released with
nvidia/Hymba-1.5B-Base, [C]: its config.json, [S]: the authors' repository SWA-SinkMeta, [P]: the paper):

- Every layer has attention heads and a Mamba in parallel over the same normalised input. One ``in_proj`` without bias
  gives, in this order, queries, keys, values, the Mamba's input, and the Mamba's gate [M, HymbaBlock].
- A key has ``hidden_size / heads`` numbers, 64, but a value has ``mamba_expand`` times as many, 128, so that
  attention's output is as wide as the Mamba's, 3200 [M: ``v_hidden_size``; C: ``v_head_dim`` 128, ``kq_head_dim`` -1].
  Scores are scaled by the key's size. Queries and keys are not normalised [C: ``kq_norm`` "none"].
- Outputs of both branches get an RMSNorm each and are averaged, then projected by ``out_proj`` [M:
  ``pre_avg_layernorm1`` for attention, ``pre_avg_layernorm2`` for the Mamba]. The Mamba's gate is inside its branch.
- Layers of a ``kv_reuse_group`` after the first use its keys (after rope) and values. Their ``in_proj`` has no rows
  for keys and values; their Mamba is their own [M: ``reuse_kv``, ``latent_dim``; C: 14 groups, one of three layers].
- Layers in ``global_attn_idx`` (0, 15, 31) see everything. In the others the query at ``q`` sees the key at ``k`` if
  ``k <= q`` and either ``q - k <= sliding_window`` (1025 tokens with itself) or ``k < num_memory_tokens``: meta tokens
  stay visible for ever [M, HymbaFlexAttention; S; P, figure of the attention map]. That mask is the one of training and
  of prompts. The release's token-by-token decoding keeps one token less, ``sliding_window - 1`` before the current one
  [M: ``slicing_tokens = 1 - sliding_window``]; where the two differ, the mask stands here.
- Rope turns whole heads, first half against second half, with the base stretched once by the fixed lengths ("ntk"):
  ``theta * (2 * max / original - 1) ** (dim / (dim - 2))`` [M, LlamaRotaryEmbedding: ``factor`` 2; C].
- The Mamba is Mamba-1: a depthwise causal convolution of 4 with bias and SiLU, then ``x_proj`` to dt (rank 100), B and
  C (16 each), an RMSNorm on each of the three, ``dt_proj`` with bias, softplus, the scan in float32 with
  ``A = -exp(A_log)``, plus ``D`` times the convolution's output, times SiLU of the gate [M; C:
  ``mamba_inner_layernorms``]. Lists with one entry carry an index in their names: ``x_proj.0``, ``A_log.0``.
- 128 learned meta tokens, ``memory_tokens``, stand before every sequence and take positions 0 to 127; their outputs are
  cut off [M, HymbaModel.forward]. The feed-forward half is a SiLU-gated MLP named ``moe.experts.0`` after
  ``pre_moe_layernorm``, whatever ``num_experts`` says [M]. Embeddings are tied [C].
"""

from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput


class HymbaReferenceConfig(PretrainedConfig):
    """The published field names. ``kv_reuse_group`` lists layers; ``global_attn_idx`` those without a window."""

    model_type = "hymba"

    vocab_size: int = 32001
    hidden_size: int = 1600
    intermediate_size: int = 5504
    num_hidden_layers: int = 32
    num_attention_heads: int = 25
    num_key_value_heads: int = 5
    sliding_window: int = 1024
    global_attn_idx: Sequence[int] = (0, 15, 31)
    kv_reuse_group: Sequence[Sequence[int]] = ()
    num_memory_tokens: int = 128
    mamba_d_state: int = 16
    mamba_d_conv: int = 4
    mamba_expand: int = 2
    mamba_dt_rank: int = 100
    max_position_embeddings: int = 8192
    orig_max_position_embeddings: int = 2048
    rope: bool = True
    rope_type: str = "ntk"
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    hidden_act: str = "silu"
    mlp_hidden_act: str = "silu"
    kq_norm: str = "none"
    num_experts: int = 1
    attn_hidden_size: int = -1
    kq_head_dim: int = -1
    v_head_dim: int = -1
    tie_word_embeddings: bool = True


class RMSNorm(nn.Module):
    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.epsilon = epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.epsilon)


class Mixer(nn.Module):
    """Attention and Mamba of one layer over one sequence, ``[tokens, hidden]``."""

    def __init__(self, config: HymbaReferenceConfig, index: int) -> None:
        super().__init__()
        self.config = config
        self.reuses = any(index in group[1:] for group in config.kv_reuse_group)
        self.is_global = index in config.global_attn_idx
        hidden, inner = config.hidden_size, config.mamba_expand * config.hidden_size
        self.head_dim = hidden // config.num_attention_heads
        self.value_dim = inner // config.num_attention_heads
        kv_heads = config.num_key_value_heads
        key_value = [] if self.reuses else [kv_heads * self.head_dim, kv_heads * self.value_dim]
        self.widths = [hidden, *key_value, inner, inner]
        self.in_proj = nn.Linear(hidden, sum(self.widths), bias=False)
        self.conv1d = nn.Conv1d(inner, inner, config.mamba_d_conv, groups=inner, padding=config.mamba_d_conv - 1)
        rank, d_state = config.mamba_dt_rank, config.mamba_d_state
        self.x_proj = nn.ModuleList([nn.Linear(inner, rank + 2 * d_state, bias=False)])
        self.dt_proj = nn.ModuleList([nn.Linear(rank, inner)])
        self.A_log = nn.ParameterList([torch.zeros(inner, d_state)])
        self.D = nn.ParameterList([torch.ones(inner)])
        self.dt_layernorm = RMSNorm(rank, config.rms_norm_eps)
        self.B_layernorm = RMSNorm(d_state, config.rms_norm_eps)
        self.C_layernorm = RMSNorm(d_state, config.rms_norm_eps)
        self.pre_avg_layernorm1 = RMSNorm(inner, config.rms_norm_eps)
        self.pre_avg_layernorm2 = RMSNorm(inner, config.rms_norm_eps)
        self.out_proj = nn.Linear(inner, hidden, bias=False)

    def forward(
        self, x: torch.Tensor, group_kv: tuple[torch.Tensor, torch.Tensor] | None
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        query, *key_value, stream, gate = self.in_proj(x).split(self.widths, dim=-1)
        if self.reuses:
            assert group_kv is not None
            keys, values = group_kv
        else:
            keys = self.rotate(key_value[0].view(len(x), -1, self.head_dim))
            values = key_value[1].view(len(x), -1, self.value_dim)
        attended = self.attend(self.rotate(query.view(len(x), -1, self.head_dim)), keys, values)
        scanned = self.scan(stream) * F.silu(gate)
        mean = (self.pre_avg_layernorm1(attended) + self.pre_avg_layernorm2(scanned)) / 2
        return self.out_proj(mean), (keys, values)

    def rotate(self, heads: torch.Tensor) -> torch.Tensor:
        config, dim = self.config, self.head_dim
        base = config.rope_theta
        if config.rope_type == "ntk":
            stretch = 2 * config.max_position_embeddings / config.orig_max_position_embeddings - 1
            base *= stretch ** (dim / (dim - 2))
        angles = torch.arange(len(heads))[:, None] * base ** (-torch.arange(0, dim, 2) / dim)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        first, second = heads[..., : dim // 2], heads[..., dim // 2 :]
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

    def attend(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        tokens, heads = query.shape[:2]
        q, k = torch.arange(tokens)[:, None], torch.arange(tokens)[None, :]
        visible = k <= q
        if not self.is_global:
            visible &= (q - k <= self.config.sliding_window) | (k < self.config.num_memory_tokens)
        outputs = []
        for head in range(heads):
            kv_head = head * keys.shape[1] // heads
            scores = query[:, head] @ keys[:, kv_head].T / self.head_dim**0.5
            weights = scores.masked_fill(~visible, float("-inf")).softmax(dim=-1)
            outputs.append(weights @ values[:, kv_head])
        return torch.cat(outputs, dim=-1)

    def scan(self, stream: torch.Tensor) -> torch.Tensor:
        rank, d_state = self.config.mamba_dt_rank, self.config.mamba_d_state
        u = F.silu(self.conv1d(stream.T[None])[0, :, : len(stream)].T)
        dt, b, c = self.x_proj[0](u).split([rank, d_state, d_state], dim=-1)
        dt, b, c = self.dt_layernorm(dt), self.B_layernorm(b), self.C_layernorm(c)
        dt = F.softplus(self.dt_proj[0](dt))
        a = -self.A_log[0].exp()
        state = torch.zeros_like(a)
        rows = []
        for t in range(len(u)):
            state = (dt[t][:, None] * a).exp() * state + (dt[t] * u[t])[:, None] * b[t]
            rows.append(state @ c[t])
        return torch.stack(rows) + self.D[0] * u


class MLP(nn.Module):
    def __init__(self, config: HymbaReferenceConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class FeedForward(nn.Module):
    def __init__(self, config: HymbaReferenceConfig) -> None:
        super().__init__()
        self.experts = nn.ModuleList([MLP(config)])


class Layer(nn.Module):
    def __init__(self, config: HymbaReferenceConfig, index: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mamba = Mixer(config, index)
        self.pre_moe_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.moe = FeedForward(config)


class Body(nn.Module):
    def __init__(self, config: HymbaReferenceConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([Layer(config, index) for index in range(config.num_hidden_layers)])
        self.final_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.memory_tokens = nn.Parameter(torch.zeros(config.num_memory_tokens, config.hidden_size))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """One sequence, ``[tokens]``, to ``[tokens, hidden]``."""
        hidden = torch.cat([self.memory_tokens, self.embed_tokens(tokens)])
        first_of_group = {layer: group[0] for group in self.config.kv_reuse_group for layer in group[1:]}
        key_values: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for index, layer in enumerate(self.layers):
            group_kv = key_values.get(first_of_group.get(index, index))
            mixed, key_values[index] = layer.mamba(layer.input_layernorm(hidden), group_kv)
            hidden = hidden + mixed
            hidden = hidden + layer.moe.experts[0](layer.pre_moe_layernorm(hidden))
        return self.final_layernorm(hidden)[len(self.memory_tokens) :]


class HymbaForCausalLM(PreTrainedModel, GenerationMixin):
    """Named as a checkpoint's ``architectures`` has it. Logits are of the text's tokens only."""

    config_class = HymbaReferenceConfig
    _tied_weights_keys: ClassVar[dict[str, str]] = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: HymbaReferenceConfig) -> None:
        super().__init__(config)
        self.model = Body(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed_tokens

    def _init_weights(self, module: nn.Module) -> None:
        """None: tests write every weight."""

    def forward(self, input_ids: torch.Tensor, use_cache: bool = False) -> CausalLMOutput:
        """``[batch, tokens]`` to logits ``[batch, tokens, vocab]``, each sequence on its own; there is no cache."""
        assert not use_cache
        return CausalLMOutput(logits=torch.stack([self.lm_head(self.model(tokens)) for tokens in input_ids]))
