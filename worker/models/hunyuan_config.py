"""The configurations of Hunyuan's releases, which transformers reads only in part."""

from typing import Any

from transformers import PretrainedConfig


class HunyuanConfig(PretrainedConfig):  # type: ignore[misc]  # transformers has no types here
    """What released configurations say, of which transformers' classes read a part; defaults are what they compute.

    ``num_experts``, ``moe_topk``, ``num_shared_expert`` and ``moe_intermediate_size`` (None: ``intermediate_size``) may
    be lists with one entry per layer. "Dynamic" rope scaling by a fixed ``alpha`` depends on no length: it becomes a
    plain rope with a greater base.
    """

    model_type = "hunyuan_v1_moe"

    vocab_size: int = 290943
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    attention_head_dim: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-5
    rope_parameters: dict[str, Any] | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    num_experts: int | list[int] = 1
    moe_topk: int | list[int] = 1
    num_shared_expert: int | list[int] = 1
    moe_intermediate_size: int | list[int] | None = None
    moe_layer_num_skipped: int = 0
    use_mixed_mlp_moe: bool = True
    use_qk_norm: bool = True
    use_cla: bool = False
    cla_share_factor: int | None = 1
    norm_type: str = "rms"
    use_rotary_pos_emb: bool = True
    use_mla: bool = False
    mamba: bool = False
    position_embedding_xdrope: bool = False
    group_limited_greedy: bool = False
    moe_drop_tokens: bool = False
    moe_random_routing_dropped_token: bool = False
    add_classification_head: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        self.num_key_value_heads = self.num_key_value_heads or self.num_attention_heads
        self.head_dim = self.head_dim or self.attention_head_dim or self.hidden_size // self.num_attention_heads
        super().__post_init__(**kwargs)
        rope = self.rope_parameters or {}
        alpha = rope.get("alpha")
        if rope.get("rope_type") == "dynamic" and alpha and rope.get("factor", 1.0) == 1.0 and self.head_dim > 2:
            base = rope["rope_theta"] * alpha ** (self.head_dim / (self.head_dim - 2))
            self.rope_parameters = {"rope_type": "default", "rope_theta": base}


class HunyuanLargeConfig(HunyuanConfig):
    """The defaults of Hunyuan-Large's own release."""

    model_type = "hunyuan"

    use_mixed_mlp_moe: bool = False
    use_qk_norm: bool = False
