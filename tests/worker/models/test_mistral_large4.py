"""Mistral Large 4: what its four kinds of layers store, settings that are honoured, and settings that are refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.model_harness import ModelHarness
from tests.tiny_checkpoints import VOCAB_SIZE
from tests.tiny_families import FAMILIES, mistral_large4
from worker.config import Role
from worker.kv_cache.sharing import SharingError
from worker.kv_cache.specs import IndexKeySpec, LayerName, MLASpec, SparseMLASpec
from worker.models.config_checks import UnsupportedModel
from worker.models.config_reader import parse_config
from worker.models.outline import outline_model

LATENT, ROTARY, INDEX = 24, 8, 28
"""kv_lora_rank, qk_rope_head_dim, index_head_dim."""


def name(index: int) -> LayerName:
    return LayerName(f"model.layers.{index}.self_attn.attn")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return FAMILIES["mistral_large4"].write(tmp_path_factory.mktemp("mistral_large4"))


def test_four_kinds_of_layers(directory: Path) -> None:
    outline = outline_model(directory, kv_sharing="model", dtype="float32", block_size=16)
    with_rope, without = LATENT + ROTARY, LATENT
    both = SparseMLASpec(16, with_rope, torch.float32, INDEX)
    keys = IndexKeySpec(16, INDEX, torch.float32)
    expected = [
        (both, None),
        (MLASpec(16, without, torch.float32), None),
        (keys, name(0)),
        (MLASpec(16, with_rope, torch.float32), None),
        (keys, name(1)),
        (None, name(3)),
    ]
    assert [(layer.kv_cache_spec(), layer.kv_sharing_target_layer_name) for layer in outline.layers] == expected
    pages = [spec.page_size_bytes for spec, _ in expected if spec is not None]
    assert pages == [16 * 4 * width for width in (24 + 8 + 28, 24, 28, 24 + 8, 28)]
    (group,) = outline.cache.groups
    assert group.owners == tuple(map(name, range(5)))
    assert group.members == tuple(map(name, range(6)))
    assert outline.cache.bytes_per_block == sum(pages)


def test_a_sharing_layer_sees_its_targets_memory(directory: Path) -> None:
    runner = ModelHarness(directory).runner
    views = [runner.kv_caches[name(index)] for index in range(6)]
    pointers = [[view.data_ptr() for view in layer] for layer in views]
    assert [len(layer) for layer in pointers] == [2, 1, 3, 1, 2, 1]
    # Layer 2 sees both regions of layer 0, then its own keys; layer 4 the latents of 1; layer 5 is layer 3.
    assert pointers[2][:2] == pointers[0]
    assert pointers[4][0] == pointers[1][0]
    assert pointers[5] == pointers[3]
    assert len({pointer for layer in pointers for pointer in layer}) == 6
    allocated = sum(raw.numel() for raw in runner.buffers.values())
    assert allocated == runner.num_blocks * 16 * 4 * (24 + 8 + 28 + 24 + 28 + 24 + 8 + 28)


def test_a_headless_model_ends_with_the_last_index_keys(directory: Path) -> None:
    model = ModelHarness(directory, role=Role.PREFILL).runner.model
    loaded = {slot.name for slot in model.slots()}
    assert {n for n in loaded if n.startswith("layers.4.")} == {
        "layers.4.attention_norm.weight",
        "layers.4.attention.indexer.wk.weight",
        "layers.4.attention.indexer.k_norm.weight",
        "layers.4.attention.indexer.k_norm.bias",
    }
    assert not {n for n in loaded if n.startswith(("layers.5.", "norm.", "output."))}


def test_layers_with_and_without_rope_share_nothing(directory: Path) -> None:
    with pytest.raises(SharingError, match=r"layers\.1\.self_attn.*layers\.0\.self_attn.*24 against 1 of 32"):
        outline_model(directory, kv_sharing="every:2", dtype="float32", block_size=16)


@pytest.mark.parametrize(
    "settings",
    [
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 500.0,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                "mscale": 0.7,
                "mscale_all_dim": 1.3,
            }
        },
        {"mlp_layer_types": ["sparse", "dense"], "final_logit_softcapping": 2.0, "tie_word_embeddings": True},
        # One more entry than layers is allowed.
        {"no_rope_layers": [0, 1], "routed_scaling_factor": 0.5},
        # Layer 2 stores latents for itself only; layer 3 reads those before.
        {"num_hidden_layers": 4, "no_rope_layers": [1] * 4, "kv_source_layers": [0, 0, 2, 0]},
        # The first layers have no indexer of their own to follow, the last has.
        {"num_hidden_layers": 3, "indexer_types": ["full", "shared", "full"], "kv_source_layers": [0, 0, 2]},
    ],
)
def test_settings_are_honoured(tmp_path: Path, settings: dict[str, Any]) -> None:
    family = mistral_large4(**{"num_hidden_layers": 2, **settings})
    reference = family.load(family.write(tmp_path))
    generator = torch.Generator().manual_seed(3)
    prompt = torch.randint(4, VOCAB_SIZE, (50,), generator=generator)
    with torch.inference_mode():
        expected = reference(prompt[None], use_cache=False).logits[0]
    (logits,) = ModelHarness(tmp_path).prompt_logits([prompt.tolist()], 20)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        # Layer 3 stores latents of the same kind for layer 4, and transformers would read those.
        (
            {"kv_source_layers": [0, 1, 0, 3, 3, 0], "no_rope_layers": [1, 0, 1, 1, 1, 1]},
            r"kv_source_layers\[5\] is 0.*is layer 3",
        ),
        # Layer 1 has no rope.
        ({"kv_source_layers": [0, 1, 0, 3, 1, 1]}, r"kv_source_layers\[5\] is 1.*rope layer.*is layer 0"),
        ({"kv_source_layers": [0, 0, 2, 3, 4, 5]}, r"kv_source_layers\[1\] is 0.*no-rope layer.*does not exist"),
        ({"kv_source_layers": [0, 1, 0, 3, 1, -1]}, r"kv_source_layers\[5\] is -1"),
        ({"kv_source_layers": [0, 3, 0, 3, 1, 3]}, "Layer 1 must share KV with an earlier layer.*got 3"),
        ({"kv_source_layers": [0, 1, 2, 2, 3, 5]}, "Layer 4 must share KV with an earlier layer that owns.*got 3"),
        ({"kv_source_layers": [0, 1, 0, 3, 1]}, "kv_source_layers.*6.*5"),
        ({"indexer_types": ["full"] * 5}, "indexer_types has 5 entries for 6 layers"),
        ({"indexer_types": ["full"] * 7}, "indexer_types has 7 entries for 6 layers"),
        ({"indexer_types": ["full", "none"] * 3}, r"indexer_types\[1\] is 'none'"),
        ({"indexer_types": ["shared", "full"] * 3}, 'indexer_types begins with "shared"'),
        ({"no_rope_layers": [1, 0, 1, 1, 0]}, "no_rope_layers has 5 entries for 6 layers"),
        ({"no_rope_layers": [1, 0, 1, 2, 0, 1]}, r"no_rope_layers\[3\] is 2"),
        (
            {"layer_types": ["indexed_attention"] * 5 + ["sliding_attention"]},
            r"layer_types\[5\] is 'sliding_attention'",
        ),
        ({"mlp_layer_types": ["dense"] * 5}, "mlp_layer_types.*5"),
        ({"num_key_value_heads": 2}, "num_key_value_heads is 2"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"n_group": 2}, "n_group is 2"),
        ({"num_experts_per_tok": 7}, "num_experts_per_tok 7 is more than n_routed_experts 6"),
        ({"n_shared_experts": 0}, "n_shared_experts is 0"),
        ({"qk_rope_head_dim": 0}, "qk_rope_head_dim is 0"),
        ({"qk_rope_head_dim": 32}, "qk_rope_head_dim 32 is more than index_head_dim 28"),
        ({"index_topk": 0}, "index_topk is 0"),
        ({"final_logit_softcapping": 0.0}, "final_logit_softcapping is 0.0"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 2.0}}, "rope_type is 'dynamic'"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 0}}, "rope_theta is 0"),
        ({"model_type": "llama"}, "model_type is 'llama'"),
    ],
)
def test_refused_by_field_and_value(directory: Path, change: dict[str, Any], named: str) -> None:
    content = json.loads((directory / "config.json").read_text())
    content["text_config"] |= change
    with pytest.raises(UnsupportedModel, match=f"(?s){named}"):
        parse_config(content)
