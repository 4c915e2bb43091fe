"""The DeepSeek family's configurations: what released ones cache, and what is refused."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.model_harness import ModelHarness
from tests.releases import DEEPSEEK_V2, DEEPSEEK_V2_LITE, DEEPSEEK_V3, DEEPSEEK_V3_2
from tests.tiny_checkpoints import VOCAB_SIZE
from tests.tiny_families import FAMILIES
from worker.models.config_checks import UnsupportedModel
from worker.models.config_reader import parse_config
from worker.models.deepseek import DeepseekShape
from worker.models.outline import ModelOutline, outline_model
from worker.weight_loader import WeightMismatch


def outline(config: Mapping[str, Any], directory: Path, kv_sharing: str = "none") -> ModelOutline:
    file = directory / "config.json"
    file.write_text(json.dumps(config))
    return outline_model(file, kv_sharing=kv_sharing, dtype="bfloat16", block_size=16)


@pytest.mark.parametrize(
    ("config", "bytes_per_token"),
    [(DEEPSEEK_V2_LITE, 31_104), (DEEPSEEK_V2, 69_120), (DEEPSEEK_V3, 70_272), (DEEPSEEK_V3_2, 85_888)],
)
def test_released_models_cache_latents_once(config: Mapping[str, Any], bytes_per_token: int, tmp_path: Path) -> None:
    described = outline(config, tmp_path)
    assert described.cache.bytes_per_token == bytes_per_token
    assert described.cache.bytes_per_block == 16 * bytes_per_token
    assert described.longest_context == 163840


def test_a_layer_that_shares_latents_owns_its_index_keys(tmp_path: Path) -> None:
    described = outline(DEEPSEEK_V3_2, tmp_path, kv_sharing="after:30")
    # 31 owners of 576 numbers; 61 indexers of 128.
    assert described.cache.bytes_per_token == 2 * (31 * 576 + 61 * 128)


@pytest.mark.parametrize("family", ["deepseek_v2_lite", "deepseek_v32"])
@torch.inference_mode()
def test_a_layer_that_shares_latents_reads_its_targets(family: str, tmp_path: Path) -> None:
    """Against transformers with the second layer of every pair made to see the first one's latents."""
    directory = FAMILIES[family].write(tmp_path / "model")
    reference = FAMILIES[family].load(directory)
    layers = [layer.self_attn for layer in reference.model.layers]
    latents: list[torch.Tensor] = []
    for owner, sharer in zip(layers[::2], layers[1::2], strict=True):
        sharer.kv_a_layernorm.weight.copy_(owner.kv_a_layernorm.weight)
        owner.kv_a_proj_with_mqa.register_forward_hook(lambda _module, _inputs, output: latents.append(output))
        sharer.kv_a_proj_with_mqa.register_forward_hook(lambda _module, _inputs, _output: latents[-1])

    harness = ModelHarness(directory, kv_sharing="every:2")
    prompt = torch.randint(4, VOCAB_SIZE, (50,), generator=torch.Generator().manual_seed(3)).tolist()
    expected = reference(torch.tensor([prompt]), use_cache=False).logits[0]
    torch.testing.assert_close(harness.prompt_logits([prompt], 20)[0], expected, atol=1e-4, rtol=0)
    # Rows whose logits nobody wants end with the last owner.
    sequence = harness.sequence(prompt, len(prompt))
    for rows in (20, 20, 10):
        (logits,) = harness.step([(sequence, rows)], all_logits=False)
    torch.testing.assert_close(logits[-1], expected[-1], atol=1e-4, rtol=0)


def test_a_scaled_rope_sharpens_attention() -> None:
    def scale(config: Mapping[str, Any]) -> float:
        return DeepseekShape.of(parse_config(config).config, interleaved=True).scale

    # 192 ** -0.5 times (0.1 ln 40 + 1)², and the same with 0.0707.
    assert scale(DEEPSEEK_V3) == pytest.approx(0.1352338, abs=1e-6)
    assert scale(DEEPSEEK_V2) == pytest.approx(0.1147214, abs=1e-6)
    assert scale(DEEPSEEK_V3 | {"rope_scaling": None}) == pytest.approx(0.0721688, abs=1e-6)


@pytest.mark.parametrize(
    ("config", "change", "named"),
    [
        (DEEPSEEK_V3, {"attention_bias": True}, "attention_bias is True"),
        (DEEPSEEK_V3, {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        (DEEPSEEK_V3, {"num_key_value_heads": 8}, "num_key_value_heads is 8"),
        (DEEPSEEK_V3, {"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        (DEEPSEEK_V3, {"topk_method": "greedy"}, "topk_method is 'greedy'"),
        (DEEPSEEK_V3, {"moe_layer_freq": 2}, "moe_layer_freq is 2"),
        (DEEPSEEK_V3, {"n_group": 7}, "n_routed_experts 256 is not a multiple of n_group 7"),
        (DEEPSEEK_V3, {"n_group": 256}, "n_group 256 leaves 1 of n_routed_experts 256"),
        (DEEPSEEK_V3, {"topk_group": 9}, "topk_group 9 is more than n_group 8"),
        (DEEPSEEK_V3, {"topk_group": 1, "num_experts_per_tok": 33}, "num_experts_per_tok 33 is more than the 32"),
        (DEEPSEEK_V3, {"first_k_dense_replace": -1}, "first_k_dense_replace is -1"),
        (DEEPSEEK_V3, {"qk_rope_head_dim": 8192}, "qk_rope_head_dim is 8192"),
        (DEEPSEEK_V3, {"kv_lora_rank": 0}, "kv_lora_rank is 0"),
        (DEEPSEEK_V3, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type is 'dynamic'"),
        (DEEPSEEK_V3, {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        (DEEPSEEK_V2, {"topk_method": "noaux_tc"}, "topk_method is 'noaux_tc'"),
        (DEEPSEEK_V2, {"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid'"),
        (DEEPSEEK_V2, {"norm_topk_prob": True}, "norm_topk_prob is True"),
        (DEEPSEEK_V2_LITE, {"num_experts_per_tok": 65}, "num_experts_per_tok 65 is more than n_routed_experts 64"),
        (DEEPSEEK_V2_LITE, {"num_experts_per_tok": None}, "num_experts_per_tok is None"),
        (DEEPSEEK_V3_2, {"index_topk": 0}, "index_topk is 0"),
        (DEEPSEEK_V3_2, {"index_head_dim": 32}, "qk_rope_head_dim 64 is more than index_head_dim 32"),
        (DEEPSEEK_V3_2, {"q_lora_rank": None}, "q_lora_rank"),
        (DEEPSEEK_V3_2, {"indexer_rope_interleave": True}, "indexer_rope_interleave is True"),
        (DEEPSEEK_V3_2, {"layer_types": ["full_attention"] * 61}, "layer_types"),
        (DEEPSEEK_V3_2, {"mlp_layer_types": ["sparse"] * 60}, "mlp_layer_types"),
    ],
)
def test_refused_by_field_and_value(config: Mapping[str, Any], change: Mapping[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        parse_config({**config, **change})


def test_only_the_released_prediction_layer_is_left_alone(tmp_path: Path) -> None:
    directory = FAMILIES["deepseek_v3"].write(tmp_path / "model")
    file = directory / "model.safetensors"
    whole = load_file(file)

    def with_extra(name: str) -> None:
        save_file({**whole, name: torch.zeros(1)}, file, {"format": "pt"})
        outline_model(directory, kv_sharing="none", dtype="auto", block_size=16)

    with_extra("model.layers.61.eh_proj.weight")
    with pytest.raises(WeightMismatch, match=r"does not use.*model\.layers\.4\.eh_proj\.weight"):
        with_extra("model.layers.4.eh_proj.weight")
