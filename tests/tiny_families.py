"""One tiny random model per family: what makes its layers differ is there, everything else is as small as it can be.

A family is a configuration and the reference that computes it. Configurations have head sizes, windows and counts that
are all different where a mix-up would otherwise go unnoticed.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from tests.peers.hunyuan_large_reference import HunYuanConfig, HunYuanForCausalLM
from tests.peers.hymba_reference import HymbaForCausalLM, HymbaReferenceConfig
from tests.tiny_checkpoints import VOCAB_SIZE, write_model

COMMON: Mapping[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}

HYMBA: Mapping[str, Any] = {
    **COMMON,
    "hidden_size": 36,
    "num_hidden_layers": 7,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
    "orig_max_position_embeddings": 64,
    "sliding_window": 8,
    "global_attn_idx": [0, 6],
    "kv_reuse_group": [[1, 2], [3, 4, 5]],
    "num_memory_tokens": 5,
    "mamba_d_state": 12,
    "mamba_dt_rank": 10,
}


@dataclass(frozen=True)
class Family:
    """``build`` makes the reference with random weights; ``load`` reads it back from a checkpoint directory.

    ``spread`` is the weights'. Deep models that multiply rounding errors need a small one to be comparable at all.
    """

    build: Callable[[], PreTrainedModel]
    load: Callable[[Path], PreTrainedModel]
    spread: float = 0.2

    def write(self, directory: Path, seed: int = 0) -> Path:
        """A checkpoint directory with random weights."""
        return write_model(self.build(), directory, seed, spread=self.spread)


def of_transformers(config_class: str, model_class: str, *, spread: float = 0.2, **settings: Any) -> Family:
    """A family that transformers has, with ``COMMON`` settings and those given."""
    config = getattr(transformers, config_class)
    model = getattr(transformers, model_class)
    return Family(
        build=lambda: model(config(**{**COMMON, **settings})),
        load=lambda directory: model.from_pretrained(directory, dtype=torch.float32).eval(),
        spread=spread,
    )


def hunyuan_large(**settings: Any) -> Family:
    """Hunyuan-Large, by the reference in the tests."""
    return Family(
        build=lambda: HunYuanForCausalLM(HunYuanConfig(**{**COMMON, **settings})),
        load=lambda directory: HunYuanForCausalLM.from_pretrained(directory, dtype=torch.float32).eval(),
    )


def mistral_large4(**settings: Any) -> Family:
    """Mistral Large 4 with a small image encoder, which text does not use; ``settings`` are the text model's."""
    vision = {
        "model_type": "pixtral",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "head_dim": 16,
        "patch_size": 14,
        "image_size": 28,
    }
    sizes = {
        # Wider ones have scores so sharp that rounding alone would show.
        "hidden_size": 32,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 40,
        "n_routed_experts": 6,
        "n_shared_experts": 2,
        "num_experts_per_tok": 2,
        "routed_scaling_factor": 1.5,
        "kv_lora_rank": 24,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 12,
        "v_head_dim": 20,
        "index_topk": 8,
        "index_head_dim": 28,
        "index_n_heads": 10,
    }
    model = transformers.MistralLarge4ForConditionalGeneration

    def build() -> PreTrainedModel:
        text = {**COMMON, **sizes, **settings}
        config = transformers.MistralLarge4Config(
            text_config=text,
            vision_config=vision,
            image_token_index=VOCAB_SIZE - 1,
            tie_word_embeddings=text["tie_word_embeddings"],
        )
        return model._from_config(config, attn_implementation="eager")

    return Family(build, load=lambda directory: model.from_pretrained(directory, dtype=torch.float32).eval())


def of_deepseek(version: str, **settings: Any) -> Family:
    """A DeepSeek family. A router's learned correction is no parameter in transformers, so it would be zero."""
    family = of_transformers(f"Deepseek{version}Config", f"Deepseek{version}ForCausalLM", **{**DEEPSEEK, **settings})

    def build() -> PreTrainedModel:
        model = family.build()
        generator = torch.Generator().manual_seed(1)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))
        return model

    return Family(build, family.load)


DEEPSEEK: Mapping[str, Any] = {
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 40,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 1.5,
}

SLIDING_FULL = ["sliding_attention", "full_attention"]

# Gemma 4 does not scale its scores down: with wider heads random weights make attention so sharp that the reference's
# own float32 error comes near to what tests allow.
GEMMA4_KEYS_ARE_VALUES: Mapping[str, Any] = {
    "head_dim": 12,
    "global_head_dim": 20,
    "sliding_window": 8,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "hidden_size_per_layer_input": 0,
}


FAMILIES: Mapping[str, Family] = {
    "gemma3": of_transformers(
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        num_hidden_layers=8,
        head_dim=24,
        sliding_window=8,
        query_pre_attn_scalar=80,
        final_logit_softcapping=20.0,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            "full_attention": {"rope_type": "linear", "rope_theta": 1_000_000.0, "factor": 8.0},
        },
    ),
    "gemma3n": of_transformers(
        "Gemma3nTextConfig",
        "Gemma3nForCausalLM",
        num_hidden_layers=8,
        head_dim=24,
        sliding_window=8,
        attention_bias=True,
        layer_types=SLIDING_FULL * 4,
        num_kv_shared_layers=4,
        intermediate_size=[96, 112, 128, 144, 160, 96, 112, 128],
        vocab_size_per_layer_input=VOCAB_SIZE - 100,
        hidden_size_per_layer_input=20,
        laurel_rank=12,
        altup_num_inputs=3,
        altup_active_idx=1,
        activation_sparsity_pattern=[0.7] * 3 + [0.0] * 5,
    ),
    "gemma4_shared": of_transformers(
        "Gemma4TextConfig",
        "Gemma4ForCausalLM",
        num_hidden_layers=7,
        head_dim=12,
        global_head_dim=20,
        sliding_window=8,
        layer_types=[*SLIDING_FULL * 2, "sliding_attention", *SLIDING_FULL],
        num_kv_shared_layers=3,
        use_double_wide_mlp=True,
        vocab_size_per_layer_input=VOCAB_SIZE,
        hidden_size_per_layer_input=20,
        final_logit_softcapping=20.0,
    ),
    "gemma4_k_eq_v": of_transformers(
        "Gemma4TextConfig",
        "Gemma4ForCausalLM",
        **GEMMA4_KEYS_ARE_VALUES,
        num_hidden_layers=7,
        layer_types=["sliding_attention", *SLIDING_FULL, "sliding_attention", "sliding_attention", *SLIDING_FULL],
    ),
    "gemma4_moe": of_transformers(
        "Gemma4TextConfig",
        "Gemma4ForCausalLM",
        **GEMMA4_KEYS_ARE_VALUES,
        num_hidden_layers=4,
        layer_types=SLIDING_FULL * 2,
        attention_bias=True,
        enable_moe_block=True,
        num_experts=6,
        top_k_experts=2,
        moe_intermediate_size=48,
    ),
    "deepseek_v2": of_deepseek("V2", topk_method="group_limited_greedy"),
    "deepseek_v2_lite": of_deepseek("V2", q_lora_rank=None, n_group=None, topk_group=None),
    "deepseek_v2_yarn": of_deepseek(
        "V2",
        num_hidden_layers=2,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 0.707,
            "mscale_all_dim": 0.9,
        },
    ),
    "deepseek_v3": of_deepseek("V3"),
    "deepseek_v3_half_rope": of_deepseek("V3", num_hidden_layers=2, rope_interleave=False, norm_topk_prob=False),
    # With few index heads some rows score many tokens exactly zero, and a reference may choose any of them.
    "deepseek_v32": of_deepseek("V32", index_n_heads=20, index_head_dim=32, index_topk=8),
    "hunyuan_dense": of_transformers(
        "HunYuanDenseV1Config",
        "HunYuanDenseV1ForCausalLM",
        num_hidden_layers=4,
        head_dim=24,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 50.0, "factor": 1.0},
    ),
    "hunyuan_large_cla": hunyuan_large(
        num_hidden_layers=6,
        cla_share_factor=2,
        intermediate_size=48,
        num_experts=4,
        moe_layer_num_skipped=1,
        num_shared_expert=2,
        tie_word_embeddings=True,
        rope_scaling={"type": "dynamic", "alpha": 50.0, "factor": 1.0},
    ),
    "hunyuan_moe": of_transformers(
        "HunYuanMoEV1Config",
        "HunYuanMoEV1ForCausalLM",
        num_hidden_layers=4,
        head_dim=24,
        intermediate_size=48,
        num_experts=6,
        moe_topk=[3, 1, 2, 3],
    ),
    "hymba": Family(
        build=lambda: HymbaForCausalLM(HymbaReferenceConfig(**HYMBA)),
        load=lambda directory: HymbaForCausalLM.from_pretrained(directory, dtype=torch.float32).eval(),
    ),
    "mistral_sliding": of_transformers(
        "MistralConfig", "MistralForCausalLM", num_hidden_layers=4, head_dim=16, sliding_window=8
    ),
    "qwen3_next": of_transformers(
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        spread=0.05,
        rms_norm_eps=1e-3,
        num_hidden_layers=8,
        head_dim=24,
        linear_num_key_heads=4,
        linear_num_value_heads=12,
        linear_key_head_dim=16,
        linear_value_head_dim=12,
        linear_conv_kernel_dim=4,
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        shared_expert_intermediate_size=40,
        mlp_only_layers=[1],
    ),
    "qwen3_moe": of_transformers(
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        num_hidden_layers=6,
        head_dim=24,
        num_experts=6,
        num_experts_per_tok=3,
        moe_intermediate_size=48,
        norm_topk_prob=True,
        decoder_sparse_step=2,
        mlp_only_layers=[3],
    ),
    # All four kinds of layers: latents and index keys, latents, index keys, nothing.
    "mistral_large4": mistral_large4(
        num_hidden_layers=6,
        no_rope_layers=[1, 0, 1, 1, 0, 1],
        kv_source_layers=[0, 1, 0, 3, 1, 3],
        indexer_types=["full", "shared"] * 3,
    ),
    # The last to store anything has latents but no indexer: what an earlier one chose is used for fewer rows.
    "mistral_large4_latents_last": mistral_large4(
        num_hidden_layers=5,
        no_rope_layers=[1, 0, 1, 1, 0],
        kv_source_layers=[0, 1, 2, 2, 1],
        indexer_types=["full", "shared", "shared", "shared", "shared"],
    ),
}
