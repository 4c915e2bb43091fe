"""What of the Hunyuan family's configurations is honoured, what is refused, and how layers share."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.model_harness import ModelHarness
from tests.peers.hunyuan_large_reference import HunYuanForCausalLM
from tests.releases import HUNYUAN_A13B, HUNYUAN_LARGE
from tests.tiny_families import FAMILIES
from worker.kv_cache.sharing import ExplicitMap, ModelDeclared, NoSharing, SharingError, SharingRule
from worker.kv_cache.specs import LayerName
from worker.layers.cache_format import CacheFormat
from worker.layers.weights import WeightFormat
from worker.models.config_checks import UnsupportedModel
from worker.models.config_reader import parse_config
from worker.models.model import Model, ModelContext


def outline(content: dict[str, Any], sharing: SharingRule) -> Model:
    meta = torch.device("meta")
    context = ModelContext(
        weights=WeightFormat(torch.bfloat16, meta),
        cache=CacheFormat(16, torch.bfloat16),
        sharing=sharing,
        max_model_len=2,
    )
    return parse_config(content).build(context)


@pytest.mark.parametrize(("sharing", "bytes_per_token"), [(ModelDeclared(), 81_920), (NoSharing(), 163_840)])
def test_hunyuan_large_as_released(sharing: SharingRule, bytes_per_token: int) -> None:
    layers = outline(HUNYUAN_LARGE, sharing).cached_layers
    specs = [layer.kv_cache_spec() for layer in layers]
    assert sum(spec.bytes_per_token for spec in specs if spec is not None) == bytes_per_token
    if sharing == ModelDeclared():
        for index, layer in enumerate(layers):
            target = None if index % 2 == 0 else f"model.layers.{index - 1}.self_attn.attn"
            assert layer.kv_sharing_target_layer_name == target


def test_hunyuan_a13b_as_released() -> None:
    model = outline(HUNYUAN_A13B, ModelDeclared())
    shapes = {slot.name: tuple(slot.destination.shape) for slot in model.slots()}
    assert shapes["model.layers.31.mlp.experts.63.gate_proj.weight"] == (3072, 4096)
    assert shapes["model.layers.31.mlp.shared_mlp.down_proj.weight"] == (4096, 3072)
    assert all(layer.kv_sharing_target_layer_name is None for layer in model.cached_layers)


@pytest.mark.parametrize("content", [HUNYUAN_LARGE, HUNYUAN_A13B])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("mlp_bias", True),
        ("norm_type", "layer"),
        ("use_rotary_pos_emb", False),
        ("use_mla", True),
        ("mamba", True),
        ("position_embedding_xdrope", True),
        ("group_limited_greedy", True),
        ("moe_drop_tokens", True),
        ("moe_random_routing_dropped_token", True),
        ("add_classification_head", True),
        ("num_experts", [4, 4]),
        ("moe_topk", 65),
        ("num_shared_expert", 0),
        ("moe_intermediate_size", [1.5]),
    ],
)
def test_what_is_not_honoured_is_refused_by_name(content: dict[str, Any], field: str, value: Any) -> None:
    with pytest.raises(UnsupportedModel, match=field):
        parse_config({**content, field: value})


@pytest.mark.parametrize(
    "rope", [{"type": "dynamic", "alpha": 1000.0, "factor": 4.0}, {"type": "linear", "alpha": 1000.0, "factor": 2.0}]
)
def test_an_alpha_beside_another_scaling_is_refused(rope: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModel, match="alpha"):
        parse_config({**HUNYUAN_LARGE, "rope_scaling": rope})


def test_cross_layer_attention_needs_a_group_size() -> None:
    with pytest.raises(UnsupportedModel, match="cla_share_factor"):
        parse_config({**HUNYUAN_LARGE, "cla_share_factor": 0})


def test_layers_without_projections_have_to_share(tmp_path: Path) -> None:
    directory = FAMILIES["hunyuan_large_cla"].write(tmp_path)
    with pytest.raises(SharingError, match=r"layers\.1\.self_attn\.attn .*use --kv-sharing model"):
        ModelHarness(directory, kv_sharing="none")
    with pytest.raises(SharingError, match=r"layers\.1\.self_attn\.attn"):
        outline(
            HUNYUAN_LARGE,
            ExplicitMap(((LayerName("model.layers.3.self_attn.attn"), LayerName("model.layers.2.self_attn.attn")),)),
        )


def test_more_layers_may_share_than_have_to(tmp_path: Path) -> None:
    """With every:4 the keys of layer 0 serve layers 1 to 3, each with a key norm of its own."""
    directory = FAMILIES["hunyuan_large_cla"].write(tmp_path)
    reference = HunYuanForCausalLM.from_pretrained(directory, cla_share_factor=4, dtype=torch.float32).eval()
    prompt = list(range(5, 40))
    with torch.inference_mode():
        expected = reference(torch.tensor([prompt])).logits[0]
    (logits,) = ModelHarness(directory, kv_sharing="every:4").prompt_logits([prompt], 16)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
