"""The configuration of Hymba's releases, which transformers does not know."""

import math

from transformers import PretrainedConfig

from worker.models.config_checks import UnsupportedModel, require_sizes


class HymbaConfig(PretrainedConfig):  # type: ignore[misc]  # transformers has no types here
    """The published fields. ``rope_parameters`` is made of them: "ntk" is a plain rope with another base."""

    model_type = "hymba"

    vocab_size: int = 32001
    hidden_size: int = 1600
    intermediate_size: int = 5504
    num_hidden_layers: int = 32
    num_attention_heads: int = 25
    num_key_value_heads: int = 5
    attn_hidden_size: int = -1
    kq_head_dim: int = -1
    v_head_dim: int = -1
    kq_norm: str = "none"
    sliding_window: int | None = None
    global_attn_idx: list[int] | None = None
    kv_reuse_group: list[list[int]] | None = None
    kv_reuse_every_i_layer: int = -1
    kv_weight_reuse: bool = False
    num_memory_tokens: int = 0
    memory_tokens_interspersed_every: int = 0
    num_mamba: int = 1
    mamba_d_state: int = 16
    mamba_d_conv: int = 4
    mamba_expand: int = 2
    mamba_dt_rank: int | str = "auto"
    mamba_conv_bias: bool = True
    mamba_proj_bias: bool = False
    mamba_inner_layernorms: bool = True
    layer_type: list[str] | None = None
    hidden_act: str = "silu"
    mlp_hidden_act: str = "silu"
    num_experts: int = 1
    max_position_embeddings: int = 8192
    orig_max_position_embeddings: int | None = None
    rope: bool = True
    rope_type: str | None = None
    rope_theta: float = 10000.0
    rope_parameters: dict[str, object] | None = None
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = True

    def __post_init__(self, **kwargs: object) -> None:
        require_sizes(self, "hidden_size", "num_attention_heads", "max_position_embeddings")
        base = self.rope_theta
        if self.rope_type == "ntk":
            # Stretched once, by fixed lengths, for twice the context that it was trained for.
            require_sizes(self, "orig_max_position_embeddings")
            original = self.orig_max_position_embeddings
            assert original is not None
            if original > self.max_position_embeddings:
                raise UnsupportedModel(
                    f"orig_max_position_embeddings {original} is more than max_position_embeddings "
                    f"{self.max_position_embeddings}"
                )
            head_dim = self.hidden_size // self.num_attention_heads
            # A head of two numbers turns at a rate of 1, whatever the base.
            base *= (2 * self.max_position_embeddings / original - 1) ** (head_dim / max(head_dim - 2, 1))
        self.rope_parameters = {"rope_type": "default", "rope_theta": base}
        if self.mamba_dt_rank == "auto":
            self.mamba_dt_rank = math.ceil(self.hidden_size / 16)
        super().__post_init__(**kwargs)
