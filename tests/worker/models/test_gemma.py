"""Gemma 3, 3n and 4: what is refused, how the released models share caches, what checkpoints may hold."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from tests.model_harness import ModelHarness
from tests.releases import (
    FULL,
    GEMMA_3_4B,
    GEMMA_3N_E2B,
    GEMMA_3N_E4B,
    GEMMA_4_26B_A4B,
    GEMMA_4_31B,
    GEMMA_4_E2B,
    GEMMA_4_E4B,
    SLIDING,
)
from tests.tiny_checkpoints import VOCAB_SIZE, write_model
from tests.tiny_families import COMMON, FAMILIES
from worker.kv_cache.sharing import parse_sharing
from worker.layers.cache_format import CacheFormat
from worker.layers.embedding import Embedding
from worker.layers.weights import WeightFormat
from worker.models.config_checks import UnsupportedModel
from worker.models.config_reader import parse_config
from worker.models.model import Model, ModelContext
from worker.models.outline import ModelOutline, outline_model

META = torch.device("meta")


@dataclass(frozen=True)
class Release:
    """``sliding`` and ``full`` are the targets of layers from ``first_shared`` on; bytes are of bfloat16, per token."""

    content: Mapping[str, Any]
    bytes_per_token: int
    unshared_bytes: int
    owners: tuple[int, int]
    first_shared: int
    sliding: int = -1
    full: int = -1


RELEASES = {
    "gemma-3-4b": Release(GEMMA_3_4B, 139_264, 139_264, (29, 5), 34),
    "gemma-3n-E2B": Release(GEMMA_3N_E2B, 40_960, 61_440, (16, 4), 20, sliding=18, full=19),
    "gemma-3n-E4B": Release(GEMMA_3N_E4B, 40_960, 71_680, (16, 4), 20, sliding=18, full=19),
    "gemma-4-E2B": Release(GEMMA_4_E2B, 18_432, 43_008, (12, 3), 15, sliding=13, full=14),
    "gemma-4-E4B": Release(GEMMA_4_E4B, 57_344, 100_352, (20, 4), 24, sliding=22, full=23),
    "gemma-4-31B": Release(GEMMA_4_31B, 901_120, 901_120, (50, 10), 60),
    "gemma-4-26B-A4B": Release(GEMMA_4_26B_A4B, 225_280, 225_280, (25, 5), 30),
}


def name(index: int) -> str:
    return f"model.layers.{index}.self_attn.attn"


def describe(content: Mapping[str, Any], directory: Path, kv_sharing: str = "model") -> ModelOutline:
    file = directory / "config.json"
    file.write_text(json.dumps(content))
    return outline_model(file, kv_sharing=kv_sharing, dtype="bfloat16", block_size=16)


def build(content: Mapping[str, Any], *, headless: bool = False) -> Model:
    context = ModelContext(
        weights=WeightFormat(torch.bfloat16, META),
        cache=CacheFormat(16, torch.bfloat16),
        sharing=parse_sharing("model"),
        max_model_len=2,
        headless=headless,
    )
    return parse_config(content).build(context)


@pytest.mark.parametrize("release", RELEASES.values(), ids=RELEASES)
def test_released_layouts(release: Release, tmp_path: Path) -> None:
    outline = describe(release.content, tmp_path)
    assert outline.cache.bytes_per_token == release.bytes_per_token
    assert describe(release.content, tmp_path, "none").cache.bytes_per_token == release.unshared_bytes
    targets = {layer.name: layer.kv_sharing_target_layer_name for layer in outline.layers}
    layer_types = parse_config(release.content).config.layer_types
    for index, layer_type in enumerate(layer_types):
        target = {SLIDING: release.sliding, FULL: release.full}[layer_type]
        assert targets[name(index)] == (None if index < release.first_shared else name(target))
    owned = [layer_types[index] for index in range(release.first_shared)]
    assert (owned.count(SLIDING), owned.count(FULL)) == release.owners


def test_sharing_layers_have_no_keys_and_values_of_their_own() -> None:
    shapes = {slot.name: tuple(slot.destination.shape) for slot in build(GEMMA_4_E2B).slots()}
    layers = "model.language_model.layers"
    for part in ("k_proj.weight", "v_proj.weight", "k_norm.weight"):
        owners = [index for index in range(35) if f"{layers}.{index}.self_attn.{part}" in shapes]
        assert owners == list(range(15))
    assert shapes[f"{layers}.14.self_attn.k_proj.weight"] == (512, 1536)
    assert shapes[f"{layers}.13.self_attn.k_proj.weight"] == (256, 1536)
    assert shapes[f"{layers}.14.mlp.up_proj.weight"] == (6144, 1536)
    assert shapes[f"{layers}.15.mlp.up_proj.weight"] == (12288, 1536)


def test_keys_that_are_values_have_one_projection() -> None:
    slots = {slot.name for slot in build(GEMMA_4_31B).slots()}
    assert "model.language_model.layers.4.self_attn.v_proj.weight" in slots
    assert "model.language_model.layers.5.self_attn.v_proj.weight" not in slots


def test_a_headless_model_ends_with_the_last_owner() -> None:
    slots = {slot.name for slot in build(GEMMA_4_E2B, headless=True).slots()}
    last_owner = {slot.split("layers.14.")[1] for slot in slots if ".layers.14." in slot}
    assert last_owner == {
        "input_layernorm.weight",
        "self_attn.k_proj.weight",
        "self_attn.v_proj.weight",
        "self_attn.k_norm.weight",
    }
    assert not any(".layers.15." in slot or "language_model.norm" in slot for slot in slots)


def test_the_embedding_is_scaled_by_a_rounded_number() -> None:
    """√3072 is 55.43; in bfloat16 it is 55.5, and that is what the model was trained with."""
    embedding = Embedding(2, 3072, WeightFormat(torch.bfloat16, torch.device("cpu")), scale=3072**0.5)
    embedding.weight.fill_(1.0)
    assert embedding(torch.tensor([1])).unique().tolist() == [55.5]


def tiny_vision(model_type: str) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "patch_size": 14,
        "image_size": 28,
    }


def multimodal_gemma3() -> PreTrainedModel:
    text = {**COMMON, "num_hidden_layers": 6, "head_dim": 16, "sliding_window": 8, "tie_word_embeddings": True}
    config = transformers.Gemma3Config(
        text_config={"model_type": "gemma3_text", **text},
        vision_config=tiny_vision("siglip_vision_model"),
        image_token_index=VOCAB_SIZE - 1,
    )
    return transformers.Gemma3ForConditionalGeneration(config)


def multimodal_gemma4() -> PreTrainedModel:
    text = {**COMMON, "num_hidden_layers": 4, "layer_types": [SLIDING, FULL] * 2, "num_kv_shared_layers": 2}
    sizes = {"head_dim": 16, "global_head_dim": 24, "sliding_window": 8, "hidden_size_per_layer_input": 20}
    config = transformers.Gemma4Config(
        text_config={"model_type": "gemma4_text", **text, **sizes, "vocab_size_per_layer_input": VOCAB_SIZE},
        vision_config=tiny_vision("gemma4_vision"),
        audio_config=None,
        **{f"{kind}_token_id": VOCAB_SIZE - 1 for kind in ("image", "video", "audio")},
    )
    return transformers.Gemma4ForConditionalGeneration(config)


PROMPT = [7, 100, 21, 301, 64, 9, 400, 33, 250, 81, 17, 5]


@torch.inference_mode()
def logits_of(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    return model.eval()(torch.tensor([tokens])).logits[0]


@pytest.mark.parametrize("make", [multimodal_gemma3, multimodal_gemma4])
def test_the_text_part_of_a_multimodal_checkpoint(make: Callable[[], PreTrainedModel], tmp_path: Path) -> None:
    model = make()
    directory = write_model(model, tmp_path)
    (ours,) = ModelHarness(directory).prompt_logits([PROMPT], 7)
    torch.testing.assert_close(ours, logits_of(model, PROMPT), atol=1e-4, rtol=0)


def test_the_text_part_of_gemma_3n(tmp_path: Path) -> None:
    """Its image encoder is not in transformers itself, so the names are those of the released index."""
    family = FAMILIES["gemma3n"]
    directory = family.write(tmp_path)
    reference = logits_of(family.load(directory), PROMPT)
    file = directory / "model.safetensors"
    weights = {key.replace("model.", "model.language_model.", 1): value for key, value in load_file(file).items()}
    towers = (
        "vision_tower.timm_model.conv",
        "audio_tower.conformer.0",
        "embed_vision.embedding",
        "embed_audio.embedding",
    )
    save_file(weights | {f"model.{tower}.weight": torch.ones(2) for tower in towers}, file, {"format": "pt"})
    text = json.loads((directory / "config.json").read_text())
    content = {"architectures": ["Gemma3nForConditionalGeneration"], "model_type": "gemma3n", "text_config": text}
    content["tie_word_embeddings"] = False
    (directory / "config.json").write_text(json.dumps(content))
    (ours,) = ModelHarness(directory).prompt_logits([PROMPT], 7)
    torch.testing.assert_close(ours, reference, atol=1e-4, rtol=0)


def test_keys_and_values_that_a_release_kept_for_sharing_layers_are_left_alone(tmp_path: Path) -> None:
    family = FAMILIES["gemma4_shared"]
    directory = family.write(tmp_path)
    reference = logits_of(family.load(directory), PROMPT)
    file = directory / "model.safetensors"
    weights = load_file(file)
    for part in ("k_proj.weight", "v_proj.weight", "k_norm.weight"):
        weights[f"model.layers.5.self_attn.{part}"] = torch.full_like(weights[f"model.layers.2.self_attn.{part}"], 9.0)
    save_file(weights, file, {"format": "pt"})
    (ours,) = ModelHarness(directory).prompt_logits([PROMPT], 64)
    torch.testing.assert_close(ours, reference, atol=1e-4, rtol=0)


ROPE = {"rope_type": "default", "rope_theta": 10000.0}


@pytest.mark.parametrize(
    ("release", "change", "named"),
    [
        ("gemma-3-4b", {"hidden_activation": "gelu"}, "hidden_activation is 'gelu'"),
        ("gemma-3-4b", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma-3-4b", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0"),
        ("gemma-3-4b", {"final_logit_softcapping": 0.0}, "final_logit_softcapping"),
        ("gemma-3-4b", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
        (
            "gemma-3-4b",
            {"rope_scaling": {"factor": 8.0, "rope_type": "dynamic"}},
            "rope_type of full_attention is 'dynamic'",
        ),
        (
            "gemma-3-4b",
            {"rope_parameters": {SLIDING: ROPE | {"partial_rotary_factor": 0.5}, FULL: ROPE}},
            "partial_rotary_factor of sliding_attention is 0.5",
        ),
        ("gemma-3-4b", {"layer_types": [SLIDING] * 33 + ["chunked_attention"]}, "chunked_attention"),
        ("gemma-3-4b", {"layer_types": [SLIDING] * 33}, "33"),
        ("gemma-3-4b", {"sliding_window": 0}, "sliding_window"),
        ("gemma-3-4b", {"num_key_value_heads": 3}, "num_key_value_heads 3"),
        ("gemma-3n-E2B", {"num_kv_shared_layers": 30}, "num_kv_shared_layers is 30"),
        ("gemma-3n-E2B", {"num_kv_shared_layers": -1}, "num_kv_shared_layers is -1"),
        ("gemma-3n-E2B", {"num_kv_shared_layers": 27}, "num_kv_shared_layers is 27.*full_attention"),
        ("gemma-3n-E2B", {"altup_active_idx": 4}, "altup_active_idx 4"),
        ("gemma-3n-E2B", {"activation_sparsity_pattern": [1.0] * 30}, "activation_sparsity_pattern has 1.0"),
        ("gemma-3n-E2B", {"hidden_size_per_layer_input": 0}, "hidden_size_per_layer_input"),
        ("gemma-4-E2B", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention is 'all'"),
        ("gemma-4-E2B", {"vocab_size_per_layer_input": 262143}, "vocab_size_per_layer_input 262143"),
        ("gemma-4-E2B", {"num_kv_shared_layers": 32}, "num_kv_shared_layers is 32.*full_attention"),
        ("gemma-4-E2B", {"global_head_dim": 511}, "head_dim is 511"),
        (
            "gemma-4-E2B",
            {"per_layer_config": {"3": {"intermediate_size": 64}}},
            "per_layer_config changes intermediate_size",
        ),
        ("gemma-4-E2B", {"per_layer_config": {"3": {"skip": ["mlp"]}}}, "per_layer_config skips.*mlp"),
        ("gemma-4-E2B", {"per_layer_config": {"3": {"head_dim": 128}}}, "sliding_attention.*1 KV heads of 128"),
        ("gemma-4-31B", {"num_global_key_value_heads": 5}, "num_attention_heads 32.*5 KV heads of layer 5"),
        ("gemma-4-26B-A4B", {"top_k_experts": 129}, "top_k_experts 129"),
        ("gemma-4-26B-A4B", {"num_experts": None}, "num_experts"),
    ],
)
def test_refused_by_field_and_value(release: str, change: dict[str, Any], named: str) -> None:
    content = RELEASES[release].content
    changed = {**content, "text_config": {**content["text_config"], **change}}
    with pytest.raises(UnsupportedModel, match=named):
        parse_config(changed)
