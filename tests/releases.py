"""What released models say of themselves: config.json of the Hugging Face hub ids in the comments.

Left out are fields that no text model reads. Nothing here is code of ours: tests compare what we make of these with
figures that were published or counted elsewhere.
"""

from collections.abc import Mapping
from typing import Any

Config = dict[str, Any]

SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"


def pattern(windowed: int, layers: int) -> list[str]:
    """Full attention after every ``windowed`` layers with a window."""
    return [FULL if index % (windowed + 1) == windowed else SLIDING for index in range(layers)]


# Qwen/Qwen3-8B
QWEN3_8B: Config = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}

# google/gemma-3-4b-it. Most fields are those that transformers fills in; the rope is in an older notation.
GEMMA_3_4B: Config = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "text_config": {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
}


def _gemma_3n(layers: int, shared: int, width: int) -> Config:
    return {
        "architectures": ["Gemma3nForConditionalGeneration"],
        "model_type": "gemma3n",
        "text_config": {
            "model_type": "gemma3n_text",
            "activation_sparsity_pattern": [0.95] * 10 + [0.0] * (layers - 10),
            "altup_num_inputs": 4,
            "final_logit_softcapping": 30.0,
            "head_dim": 256,
            "hidden_size": 2048,
            "hidden_size_per_layer_input": 256,
            "intermediate_size": [width] * layers,
            "laurel_rank": 64,
            "layer_types": pattern(4, layers),
            "max_position_embeddings": 32768,
            "num_attention_heads": 8,
            "num_hidden_layers": layers,
            "num_key_value_heads": 2,
            "num_kv_shared_layers": shared,
            "rope_local_base_freq": 10000.0,
            "rope_scaling": None,
            "rope_theta": 1000000.0,
            "sliding_window": 512,
            "vocab_size": 262400,
            "vocab_size_per_layer_input": 262144,
        },
    }


# google/gemma-3n-E2B-it
GEMMA_3N_E2B = _gemma_3n(30, 10, 8192)
# google/gemma-3n-E4B-it
GEMMA_3N_E4B = _gemma_3n(35, 15, 16384)


def _gemma_4(**text: Any) -> Config:
    return {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "model_type": "gemma4",
        "text_config": {
            "model_type": "gemma4_text",
            "final_logit_softcapping": 30.0,
            "head_dim": 256,
            "global_head_dim": 512,
            "max_position_embeddings": 131072,
            "rope_parameters": {
                FULL: {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
                SLIDING: {"rope_theta": 10000.0, "rope_type": "default"},
            },
            "vocab_size": 262144,
            "vocab_size_per_layer_input": 262144,
            **text,
        },
    }


# google/gemma-4-E2B-it
GEMMA_4_E2B = _gemma_4(
    hidden_size=1536,
    hidden_size_per_layer_input=256,
    intermediate_size=6144,
    layer_types=pattern(4, 35),
    num_attention_heads=8,
    num_hidden_layers=35,
    num_key_value_heads=1,
    num_kv_shared_layers=20,
    sliding_window=512,
    use_double_wide_mlp=True,
)
# google/gemma-4-E4B-it
GEMMA_4_E4B = _gemma_4(
    hidden_size=2560,
    hidden_size_per_layer_input=256,
    intermediate_size=10240,
    layer_types=pattern(5, 42),
    num_attention_heads=8,
    num_hidden_layers=42,
    num_key_value_heads=2,
    num_kv_shared_layers=18,
    sliding_window=512,
)
# google/gemma-4-31B-it
GEMMA_4_31B = _gemma_4(
    attention_k_eq_v=True,
    hidden_size=5376,
    hidden_size_per_layer_input=0,
    intermediate_size=21504,
    layer_types=pattern(5, 60),
    num_attention_heads=32,
    num_global_key_value_heads=4,
    num_hidden_layers=60,
    num_key_value_heads=16,
    sliding_window=1024,
    use_bidirectional_attention="vision",
)
# google/gemma-4-26B-A4B-it
GEMMA_4_26B_A4B = _gemma_4(
    attention_k_eq_v=True,
    enable_moe_block=True,
    hidden_size=2816,
    hidden_size_per_layer_input=0,
    intermediate_size=2112,
    layer_types=pattern(5, 30),
    moe_intermediate_size=704,
    num_attention_heads=16,
    num_experts=128,
    num_global_key_value_heads=2,
    num_hidden_layers=30,
    num_key_value_heads=8,
    sliding_window=1024,
    top_k_experts=8,
    use_bidirectional_attention="vision",
)

# tencent/Tencent-Hunyuan-Large
HUNYUAN_LARGE: Config = {
    "architectures": ["HunYuanForCausalLM"],
    "model_type": "hunyuan",
    "cla_share_factor": 2,
    "hidden_act": "silu",
    "hidden_size": 6400,
    "intermediate_size": 18304,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "moe_topk": 1,
    "num_attention_heads": 80,
    "num_experts": 16,
    "num_hidden_layers": 64,
    "num_key_value_heads": 8,
    "num_shared_expert": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {"alpha": 1000.0, "factor": 1.0, "type": "dynamic"},
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cla": True,
    "use_mixed_mlp_moe": True,
    "use_qk_norm": True,
    "vocab_size": 129024,
}

# tencent/Hunyuan-A13B-Instruct
HUNYUAN_A13B: Config = {
    "architectures": ["HunYuanMoEV1ForCausalLM"],
    "model_type": "hunyuan_v1_moe",
    "attention_head_dim": 128,
    "cla_share_factor": 2,
    "hidden_size": 4096,
    "intermediate_size": 3072,
    "max_position_embeddings": 32768,
    "moe_intermediate_size": [3072] * 32,
    "moe_layer_num_skipped": 0,
    "moe_topk": [8] * 32,
    "num_attention_heads": 32,
    "num_experts": 64,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_shared_expert": [1] * 32,
    "rope_scaling": {"alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0, "type": "dynamic"},
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "use_cla": False,
    "use_mixed_mlp_moe": True,
    "use_qk_norm": True,
    "vocab_size": 128167,
}

# nvidia/Hymba-1.5B-Base
HYMBA_1_5B: Config = {
    "architectures": ["HymbaForCausalLM"],
    "attention_dropout": 0.0,
    "attn_hidden_size": -1,
    "attn_implementation": "flex",
    "attn_implementation_new": "flex",
    "auto_map": {
        "AutoConfig": "configuration_hymba.HymbaConfig",
        "AutoModelForCausalLM": "modeling_hymba.HymbaForCausalLM",
    },
    "bos_token_id": 1,
    "calc_logits_for_entire_prompt": False,
    "conv_dim": {str(layer): 3200 for layer in range(32)},
    "eos_token_id": 2,
    "global_attn_idx": [0, 15, 31],
    "hidden_act": "silu",
    "hidden_size": 1600,
    "initializer_range": 0.02,
    "intermediate_size": 5504,
    "kq_head_dim": -1,
    "kq_norm": "none",
    "kv_reuse_every_i_layer": -1,
    "kv_reuse_group": [[a, a + 1] for a in range(1, 15, 2)] + [[16, 17, 18]] + [[a, a + 1] for a in range(19, 31, 2)],
    "kv_weight_reuse": False,
    "layer_type": ["h"] * 32,
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_state": 16,
    "mamba_dt_rank": 100,
    "mamba_expand": 2,
    "mamba_inner_layernorms": True,
    "mamba_proj_bias": False,
    "max_position_embeddings": 8192,
    "memory_tokens_interspersed_every": 0,
    "mlp_hidden_act": "silu",
    "model_type": "hymba",
    "num_attention_heads": 25,
    "num_experts": 1,
    "num_experts_per_tok": 1,
    "num_hidden_layers": 32,
    "num_key_value_heads": 5,
    "num_mamba": 1,
    "num_memory_tokens": 128,
    "orig_max_position_embeddings": 2048,
    "output_router_logits": False,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-06,
    "rope": True,
    "rope_theta": 10000.0,
    "rope_type": "ntk",
    "router_aux_loss_coef": 0.001,
    "seq_length": 8192,
    "sliding_window": 1024,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.44.0",
    "use_cache": False,
    "use_mamba_kernels": True,
    "v_head_dim": 128,
    "vocab_size": 32001,
}

_DEEPSEEK_YARN: Config = {
    "type": "yarn",
    "factor": 40,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
_DEEPSEEK: Config = {
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "hidden_act": "silu",
    "attention_bias": False,
    "max_position_embeddings": 163840,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "moe_layer_freq": 1,
    "tie_word_embeddings": False,
}
# deepseek-ai/DeepSeek-V2-Lite
DEEPSEEK_V2_LITE: Config = _DEEPSEEK | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "vocab_size": 102400,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "first_k_dense_replace": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "greedy",
    "scoring_func": "softmax",
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "rope_scaling": _DEEPSEEK_YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
}
# deepseek-ai/DeepSeek-V2
DEEPSEEK_V2: Config = DEEPSEEK_V2_LITE | {
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 60,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "n_routed_experts": 160,
    "n_group": 8,
    "topk_group": 3,
    "topk_method": "group_limited_greedy",
    "routed_scaling_factor": 16.0,
}
# deepseek-ai/DeepSeek-V3, without its quantization
DEEPSEEK_V3: Config = _DEEPSEEK | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "first_k_dense_replace": 3,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 1,
    "rope_scaling": _DEEPSEEK_YARN,
}
# deepseek-ai/DeepSeek-V3.2-Exp, without its quantization
DEEPSEEK_V3_2: Config = DEEPSEEK_V3 | {
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 2048,
}

# Qwen/Qwen3-Next-80B-A3B-Instruct
QWEN3_NEXT_80B: Config = {
    "architectures": ["Qwen3NextForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 5120,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "mlp_only_layers": [],
    "model_type": "qwen3_next",
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "num_attention_heads": 16,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "output_router_logits": False,
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000000,
    "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 512,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}

RELEASES: Mapping[str, Config] = {
    "Qwen3-8B": QWEN3_8B,
    "Gemma 3 4B": GEMMA_3_4B,
    "Gemma 3n E2B": GEMMA_3N_E2B,
    "Gemma 3n E4B": GEMMA_3N_E4B,
    "Gemma 4 E2B": GEMMA_4_E2B,
    "Gemma 4 E4B": GEMMA_4_E4B,
    "Gemma 4 31B": GEMMA_4_31B,
    "Gemma 4 26B-A4B": GEMMA_4_26B_A4B,
    "Hunyuan-Large": HUNYUAN_LARGE,
    "Hunyuan-A13B": HUNYUAN_A13B,
    "Hymba-1.5B": HYMBA_1_5B,
    "DeepSeek V2-Lite": DEEPSEEK_V2_LITE,
    "DeepSeek V2": DEEPSEEK_V2,
    "DeepSeek V3": DEEPSEEK_V3,
    "DeepSeek V3.2": DEEPSEEK_V3_2,
    "Qwen3-Next-80B": QWEN3_NEXT_80B,
}
