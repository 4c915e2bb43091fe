"""Configurations that cannot be served are refused by field and value, before anything is built."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.releases import HUNYUAN_LARGE, HYMBA_1_5B, QWEN3_NEXT_80B
from tests.tiny_checkpoints import write_tiny
from worker.kv_cache.specs import EveryToken, LastTokens, Retention
from worker.models.config_checks import UnsupportedModel
from worker.models.config_reader import parse_config
from worker.models.outline import outline_model
from worker.weight_loader import WeightMismatch

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
}
LLAMA = QWEN3 | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
MISTRAL = QWEN3 | {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"architectures": ["T5ForConditionalGeneration"]}, "T5ForConditionalGeneration"),
        ({"architectures": []}, "architectures"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_hidden_layers": None}, "num_hidden_layers is None"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"first_k_dense_replace": -300_000_000}, "first_k_dense_replace is -300000000"),
        ({"vocab_size": True}, "vocab_size.*True"),
        ({"max_position_embeddings": 10**12}, "max_position_embeddings"),
        ({"head_dim": 0}, "head_dim"),
        ({"head_dim": 15}, "head_dim"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rope_theta": 0}, "rope_theta"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0.5}}, "factor"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial"),
        ({"use_sliding_window": True, "sliding_window": 0}, "sliding_window is 0"),
    ],
)
def test_refused_by_field_and_value(change: dict[str, object], named: str) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        parse_config(QWEN3 | change)


@pytest.mark.parametrize(
    ("config", "change", "named"),
    [
        (QWEN3, {"layer_types": ["full_attention"] * 3 + ["chunked_attention"]}, r"layer_types\[3\] is 'chunked"),
        (QWEN3, {"layer_types": ["full_attention"] * 3 + ["sliding_attention"]}, "sliding_window is None"),
        (MISTRAL, {"sliding_window": 8, "layer_types": ["full_attention"] * 4}, "layer_types is .*'full_attention'"),
        (MISTRAL, {"sliding_window": None, "layer_types": ["sliding_attention"] * 4}, "sliding_window is None"),
        (LLAMA, {"sliding_window": 8}, "sliding_window is 8"),
    ],
)
def test_windows_that_transformers_would_not_compute_are_refused(
    config: dict[str, object], change: dict[str, object], named: str
) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        parse_config(config | change)


@pytest.mark.parametrize("names", ["x", ["x"], {"head_dim": {}}])
def test_a_field_that_renames_others_is_refused_unless_it_can(names: object) -> None:
    with pytest.raises(UnsupportedModel, match=r"config\.json of Qwen3ForCausalLM"):
        parse_config(QWEN3 | {"attribute_map": names})


def test_labels_are_not_counted() -> None:
    """transformers would make a name for each."""
    assert parse_config(QWEN3 | {"num_labels": 10**30}).longest_context == 4096


def test_the_context_is_the_trained_one_or_shorter() -> None:
    config = parse_config(QWEN3)
    assert config.longest_context == config.choose_context(None) == 4096
    assert config.choose_context(1000) == 1000
    with pytest.raises(UnsupportedModel, match=r"--max-model-len 5000.*max_position_embeddings 4096"):
        config.choose_context(5000)
    with pytest.raises(UnsupportedModel, match="--max-model-len 1 "):
        config.choose_context(1)


def test_a_dynamic_rope_stretches_the_context() -> None:
    config = parse_config(QWEN3 | {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}})
    assert config.longest_context == 8192


@pytest.mark.parametrize(
    ("content", "retention"),
    [
        (MISTRAL | {"sliding_window": 1024}, LastTokens(1024)),
        (MISTRAL | {"sliding_window": None}, EveryToken()),
        # Qwen checkpoints carry a window that is switched off.
        (QWEN3 | {"sliding_window": 1024, "use_sliding_window": False}, EveryToken()),
    ],
)
def test_a_window_limits_what_is_kept_and_not_the_context(
    content: dict[str, object], retention: Retention, tmp_path: Path
) -> None:
    assert parse_config(content).longest_context == 4096
    file = tmp_path / "config.json"
    file.write_text(json.dumps(content))
    described = outline_model(file, kv_sharing="none", dtype="bfloat16", block_size=16)
    assert [group.retention for group in described.cache.groups] == [retention]
    assert described.longest_context == 4096


def outline(path: Path) -> None:
    outline_model(path, kv_sharing="none", dtype="auto", block_size=16)


def test_tensors_are_checked_before_weights_are_read(tmp_path: Path) -> None:
    directory = write_tiny("qwen3", tmp_path / "model")
    outline(directory)
    file = directory / "model.safetensors"
    whole = load_file(file)
    name = "model.layers.1.mlp.up_proj.weight"

    save_file({key: value for key, value in whole.items() if key != name}, file, {"format": "pt"})
    with pytest.raises(WeightMismatch, match=f"lacks 1 .*{name}"):
        outline(directory)

    save_file(whole | {"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)}, file, {"format": "pt"})
    with pytest.raises(WeightMismatch, match=r"does not use.*q_proj\.bias"):
        outline(directory)

    save_file(whole | {name: torch.zeros(128, 32)}, file, {"format": "pt"})
    with pytest.raises(WeightMismatch, match=rf"{name}.*\[128, 32\].*\[128, 64\]"):
        outline(directory)


def test_a_configuration_alone_is_enough(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(QWEN3))
    described = outline_model(file, kv_sharing="every:2", dtype="bfloat16", block_size=16)
    assert [layer.kv_sharing_target_layer_name is None for layer in described.layers] == [True, False, True, False]


def test_a_context_that_no_number_can_state_is_the_longest_that_can_be() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 1e308}
    assert parse_config(QWEN3 | {"rope_parameters": rope}).longest_context == 2**31 - 1


@pytest.mark.parametrize(
    ("config", "change"),
    [
        (HYMBA_1_5B, {"layer_type": 5}),
        (HYMBA_1_5B, {"num_memory_tokens": 100_000_000}),
        (HYMBA_1_5B, {"mamba_dt_rank": True}),
        (HUNYUAN_LARGE, {"moe_layer_num_skipped": "x"}),
        (QWEN3_NEXT_80B, {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 1e308}}),
        (QWEN3_NEXT_80B, {"num_experts": 2**40}),
        (MISTRAL, {"hidden_size": 2**31 - 2, "intermediate_size": 2**31 - 1}),
    ],
)
def test_values_of_a_wrong_kind_or_size_are_one_error_each(
    config: dict[str, object], change: dict[str, object], tmp_path: Path
) -> None:
    """Whatever nobody thought of checking: no traceback, no gigabytes."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config | change))
    with pytest.raises(ValueError, match=r"config\.json"):
        outline_model(path, kv_sharing="model", dtype="bfloat16", block_size=16)


def test_a_list_as_dtype_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(QWEN3 | {"dtype": ["float32"]}))
    with pytest.raises(UnsupportedModel, match="dtype"):
        outline_model(path, kv_sharing="model", dtype="auto", block_size=16)
