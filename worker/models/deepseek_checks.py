"""What a DeepSeek configuration must satisfy; each version's own check is made of these and of its own fields."""

from worker.models.config_checks import (
    UnsupportedModel,
    require_at_most,
    require_full_rope,
    require_head_dim,
    require_multiple,
    require_positive,
    require_rope_type,
    require_setting,
    require_setting_if_given,
    require_sizes,
)
from worker.text_config import TextConfig


def check_deepseek(config: TextConfig) -> None:
    """What all versions have in common. Fields that are read by released code only are checked where they are given."""
    require_sizes(
        config,
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "moe_intermediate_size",
        "num_attention_heads",
        "kv_lora_rank",
        "qk_nope_head_dim",
        "v_head_dim",
        "n_routed_experts",
        "n_shared_experts",
        "num_experts_per_tok",
        "max_position_embeddings",
    )
    require_head_dim("qk_rope_head_dim", config.qk_rope_head_dim)
    if config.q_lora_rank is not None:
        require_sizes(config, "q_lora_rank")
    require_positive("rms_norm_eps", config.rms_norm_eps)
    require_positive("routed_scaling_factor", config.routed_scaling_factor)
    require_setting(config, "num_key_value_heads", config.num_attention_heads)
    require_setting(config, "hidden_act", "silu")
    require_setting(config, "attention_bias", False)
    require_setting_if_given(config, "mlp_bias", False)
    require_setting_if_given(config, "moe_layer_freq", 1)
    first = config.first_k_dense_replace
    if not (isinstance(first, int) and first >= 0):
        raise UnsupportedModel(f"config.json: first_k_dense_replace is {first!r}, not a number of layers")
    require_rope_type(config, "default", "linear", "yarn")
    require_full_rope(config)


def check_expert_groups(config: TextConfig, *, smallest: int) -> None:
    """Groups of equal size, of ``smallest`` experts at least, the best of which have experts enough for a row."""
    require_sizes(config, "n_group", "topk_group")
    require_multiple(config, "n_routed_experts", "n_group")
    size = config.n_routed_experts // config.n_group
    if size < smallest:
        raise UnsupportedModel(
            f"config.json: n_group {config.n_group} leaves {size} of n_routed_experts {config.n_routed_experts} in a "
            f"group; at least {smallest} are needed"
        )
    require_at_most(config, "topk_group", "n_group")
    if config.num_experts_per_tok > config.topk_group * size:
        raise UnsupportedModel(
            f"config.json: num_experts_per_tok {config.num_experts_per_tok} is more than the "
            f"{config.topk_group * size} experts of topk_group {config.topk_group} groups"
        )
