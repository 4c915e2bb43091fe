"""Hunyuan-Large with cross-layer attention as plainly as it can be said, for comparison: whole sequences, no cache.

Written from the release of Tencent-Hunyuan-Large (modeling_hunyuan.py, config.json) and its paper (Sun et al. 2024):

- the first layer of each ``cla_share_factor`` has projections to keys and values, the others only to queries; what they
  share are the keys as projected, so that every layer rotates them and applies its own key norm;
- a single chosen expert is weighted by its probability, several by probabilities that sum to 1;
- "dynamic" rope scaling by ``alpha`` enlarges the base of the frequencies once and for all.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput


class HunYuanConfig(PretrainedConfig):
    """The fields that the computation reads; every other one of the release keeps its default."""

    model_type = "hunyuan"

    vocab_size: int = 128
    hidden_size: int = 64
    intermediate_size: int = 64
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    rms_norm_eps: float = 1e-5
    hidden_act: str = "silu"
    max_position_embeddings: int = 512
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None
    tie_word_embeddings: bool = True
    use_qk_norm: bool = True
    use_cla: bool = True
    cla_share_factor: int = 2
    num_experts: int = 4
    moe_topk: int = 1
    moe_layer_num_skipped: int = 0
    num_shared_expert: int = 1
    use_mixed_mlp_moe: bool = True


class RMSNorm(nn.Module):
    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.epsilon = epsilon

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.weight * hidden / (hidden.square().mean(dim=-1, keepdim=True) + self.epsilon).sqrt()


class MLP(nn.Module):
    def __init__(self, config: HunYuanConfig, width: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.down_proj = nn.Linear(width, config.hidden_size, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))


class Gate(nn.Module):
    def __init__(self, config: HunYuanConfig) -> None:
        super().__init__()
        self.wg = nn.Linear(config.hidden_size, config.num_experts, bias=False)


class MixtureOfExperts(nn.Module):
    """Every expert for every token, weighted by a matrix that is mostly zero."""

    def __init__(self, config: HunYuanConfig) -> None:
        super().__init__()
        self.top_k = config.moe_topk
        self.gate = Gate(config)
        self.experts = nn.ModuleList(MLP(config, config.intermediate_size) for _ in range(config.num_experts))
        self.shared_mlp = (
            MLP(config, config.intermediate_size * config.num_shared_expert) if config.use_mixed_mlp_moe else None
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        probabilities = F.softmax(self.gate.wg(hidden), dim=-1)
        threshold = probabilities.sort(dim=-1, descending=True).values[..., self.top_k - 1, None]
        weights = probabilities * (probabilities >= threshold)
        if self.top_k > 1:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        output = sum(weights[..., i, None] * expert(hidden) for i, expert in enumerate(self.experts))
        return output if self.shared_mlp is None else output + self.shared_mlp(hidden)


class Attention(nn.Module):
    def __init__(self, config: HunYuanConfig, computes_keys: bool) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.size = config.hidden_size // self.heads
        self.base = config.rope_theta
        if config.rope_scaling is not None:
            self.base *= config.rope_scaling["alpha"] ** (self.size / (self.size - 2))
        self.q_proj = nn.Linear(config.hidden_size, self.heads * self.size, bias=False)
        if computes_keys:
            self.k_proj = nn.Linear(config.hidden_size, self.kv_heads * self.size, bias=False)
            self.v_proj = nn.Linear(config.hidden_size, self.kv_heads * self.size, bias=False)
        self.o_proj = nn.Linear(self.heads * self.size, config.hidden_size, bias=False)
        self.use_norm = config.use_qk_norm
        if self.use_norm:
            self.query_layernorm = RMSNorm(self.size, config.rms_norm_eps)
            self.key_layernorm = RMSNorm(self.size, config.rms_norm_eps)
        self.computes_keys = computes_keys

    def rotated(self, heads: torch.Tensor) -> torch.Tensor:
        """``[batch, tokens, heads, size]``, as complex numbers of a first and a second half."""
        half = self.size // 2
        frequencies = self.base ** (-torch.arange(half).double() / half)
        angles = (torch.arange(heads.shape[1])[:, None] * frequencies)[:, None, :]
        turned = torch.complex(*heads.double().split(half, dim=-1)) * torch.polar(torch.ones_like(angles), angles)
        return torch.cat([turned.real, turned.imag], dim=-1).to(heads.dtype)

    def forward(
        self, hidden: torch.Tensor, shared: tuple[torch.Tensor, torch.Tensor] | None
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        batch, tokens, _ = hidden.shape
        query = self.rotated(self.q_proj(hidden).view(batch, tokens, self.heads, self.size))
        if self.computes_keys:
            shape = (batch, tokens, self.kv_heads, self.size)
            shared = self.k_proj(hidden).view(shape), self.v_proj(hidden).view(shape)
        assert shared is not None
        key, value = self.rotated(shared[0]), shared[1]
        if self.use_norm:
            query, key = self.query_layernorm(query), self.key_layernorm(key)
        groups = self.heads // self.kv_heads
        key, value = key.repeat_interleave(groups, dim=2), value.repeat_interleave(groups, dim=2)
        scores = torch.einsum("bqhd,bkhd->bhqk", query, key) / self.size**0.5
        future = torch.ones(tokens, tokens, dtype=torch.bool).triu(diagonal=1)
        weights = scores.masked_fill(future, -torch.inf).softmax(dim=-1)
        return self.o_proj(torch.einsum("bhqk,bkhd->bqhd", weights, value).reshape(batch, tokens, -1)), shared


class Layer(nn.Module):
    def __init__(self, config: HunYuanConfig, index: int) -> None:
        super().__init__()
        self.self_attn = Attention(config, not config.use_cla or index % config.cla_share_factor == 0)
        sparse = index >= config.moe_layer_num_skipped
        self.mlp = MixtureOfExperts(config) if sparse else MLP(config, config.intermediate_size)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class HunYuanModel(nn.Module):
    def __init__(self, config: HunYuanConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, index) for index in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden, shared = self.embed_tokens(input_ids), None
        for layer in self.layers:
            attended, shared = layer.self_attn(layer.input_layernorm(hidden), shared)
            hidden = hidden + attended
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return self.norm(hidden)


class HunYuanForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = HunYuanConfig

    def __init__(self, config: HunYuanConfig) -> None:
        super().__init__(config)
        self.model = HunYuanModel(config)
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids: torch.Tensor, **unused: Any) -> CausalLMOutput:
        hidden = self.model(input_ids)
        head = self.model.embed_tokens if self.config.tie_word_embeddings else self.lm_head
        return CausalLMOutput(logits=F.linear(hidden, head.weight))
