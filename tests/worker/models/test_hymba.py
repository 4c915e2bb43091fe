"""The released Hymba's sizes and sharing, and what of its configuration is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.model_harness import ModelHarness
from tests.releases import HYMBA_1_5B
from tests.tiny_families import FAMILIES, HYMBA
from worker.kv_cache.groups import plan_cache
from worker.kv_cache.sharing import EveryNth, ModelDeclared, SharingError, SharingRule
from worker.kv_cache.specs import EveryToken, LastState, LastTokens
from worker.layers.attention import Attention
from worker.layers.cache_format import CacheFormat
from worker.layers.weights import WeightFormat
from worker.models.config_checks import UnsupportedModel
from worker.models.config_reader import parse_config
from worker.models.model import Model, ModelContext
from worker.weight_loader import WeightMismatch


def build(sharing: SharingRule | None = None, *, headless: bool = False, config: dict[str, Any] | None = None) -> Model:
    meta = torch.device("meta")
    context = ModelContext(
        weights=WeightFormat(torch.bfloat16, meta),
        cache=CacheFormat(16, torch.bfloat16),
        sharing=sharing or ModelDeclared(),
        max_model_len=2,
        headless=headless,
    )
    return parse_config(config or HYMBA_1_5B).build(context)


def attentions(model: Model) -> list[Attention]:
    return [layer for layer in model.cached_layers if isinstance(layer, Attention)]


def test_layers_of_a_group_use_the_first_ones_cache() -> None:
    layers = attentions(build())
    index = {layer.name: i for i, layer in enumerate(layers)}
    targets = {i: index[t] for i, layer in enumerate(layers) if (t := layer.kv_sharing_target_layer_name)}
    assert targets == {**{i: i - 1 for i in range(2, 15, 2)}, 17: 16, 18: 16, **{i: i - 1 for i in range(20, 31, 2)}}
    assert len(targets) == 15


def test_what_is_stored() -> None:
    """Keys of 64 and values of 128 numbers for 5 heads in 17 owners, and a state in every layer."""
    model = build()
    plan = plan_cache(model.cached_layers, 16)
    owners = {group.retention: 0 for group in plan.groups}
    for group in plan.groups:
        owners[group.retention] += len(group.owners)
    assert owners == {EveryToken(): 3, LastTokens(1025, sinks=128): 14, LastState(): 32}
    assert plan.bytes_per_token == 17 * 5 * (64 + 128) * 2 == 32640
    assert plan.state_bytes == 32 * (3200 * 16 * 4 + 3200 * 3 * 2) == 7168000
    # A window of 1025 and the token after it may touch 10 blocks of 128, and the meta tokens' own block stays.
    assert {g.blocks_held(8192) for g in plan.groups if isinstance(g.retention, LastTokens)} == {10 + 1}
    names = [layer.name for layer in model.cached_layers]
    assert names[6:8] == ["model.layers.3.mamba.self_attn.attn", "model.layers.3.mamba.state"]
    assert len(names) == 64


def test_weights_are_those_of_the_release() -> None:
    """1.52 billion parameters, and rows for keys and values in owners only."""
    shapes = {slot.name: tuple(slot.destination.shape) for slot in build().slots()}
    assert shapes["model.layers.1.mamba.in_proj.weight"] == (1600 + 320 + 640 + 3200 + 3200, 1600)
    assert shapes["model.layers.2.mamba.in_proj.weight"] == (1600 + 3200 + 3200, 1600)
    assert shapes["model.memory_tokens"] == (128, 1600)
    assert shapes["model.embed_tokens.weight"] == (32001, 1600)
    assert round(sum(torch.Size(shape).numel() for shape in shapes.values()) / 1e9, 2) == 1.52


def test_a_headless_model_ends_with_what_the_last_layer_stores() -> None:
    whole, headless = ({slot.name for slot in build(headless=headless).slots()} for headless in (False, True))
    left_out = {name.removeprefix("model.layers.31.").split(".weight")[0] for name in whole - headless}
    assert headless < whole
    mlp = {f"moe.experts.0.{part}_proj" for part in ("gate", "up", "down")}
    branches = {"mamba.out_proj", "mamba.pre_avg_layernorm1", "mamba.pre_avg_layernorm2", "pre_moe_layernorm"}
    assert left_out == {*mlp, *branches, "model.final_layernorm"}


def test_meta_tokens_are_the_ids_after_the_vocabulary() -> None:
    assert parse_config(HYMBA_1_5B).prefix_tokens == tuple(range(32001, 32129))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("attn_hidden_size", 800),
        ("kq_head_dim", 32),
        ("v_head_dim", 64),
        ("kq_norm", "perhead-rms"),
        ("rope", False),
        ("rope_type", "dynamic_ntk"),
        ("rms_norm_eps", 0.0),
        ("hidden_act", "gelu"),
        ("mlp_hidden_act", "relu2"),
        ("num_experts", 8),
        ("num_mamba", 2),
        ("kv_reuse_every_i_layer", 2),
        ("kv_weight_reuse", True),
        ("memory_tokens_interspersed_every", 512),
        ("num_memory_tokens", 0),
        ("mamba_expand", 1.5),
        ("mamba_conv_bias", False),
        ("mamba_proj_bias", True),
        ("mamba_inner_layernorms", False),
        ("layer_type", ["h"] * 31 + ["m"]),
        ("sliding_window", 0),
        ("global_attn_idx", None),
        ("global_attn_idx", [0, 32]),
        ("kv_reuse_group", [[1, 2], [2, 3]]),
        ("kv_reuse_group", [1, 2]),
        ("orig_max_position_embeddings", None),
        ("orig_max_position_embeddings", 8193),
        ("num_attention_heads", 24),
        ("num_key_value_heads", 4),
    ],
)
def test_what_is_not_computed_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(UnsupportedModel, match="hidden_size" if field == "num_attention_heads" else field):
        parse_config({**HYMBA_1_5B, field: value})


@pytest.mark.parametrize(
    ("groups", "message"),
    [([[15, 16]], "their attention types differ, sliding window of 1025 after 128 sinks"), ([[4, 3]], "come earlier")],
)
def test_a_group_that_cannot_share_is_refused(groups: list[list[int]], message: str) -> None:
    with pytest.raises(SharingError, match=message):
        build(config={**HYMBA_1_5B, "kv_reuse_group": groups})


def test_sharing_across_windows_is_refused() -> None:
    with pytest.raises(SharingError, match="attention types differ"):
        build(EveryNth(2))


def test_layers_without_projections_cannot_own(tmp_path: Path) -> None:
    with pytest.raises(WeightMismatch, match=r"layers\.2\.mamba\.in_proj\.weight has shape"):
        ModelHarness(FAMILIES["hymba"].write(tmp_path), kv_sharing="none")


def test_an_owner_may_be_made_to_share(tmp_path: Path) -> None:
    """Its keys and values are not computed: other layers' weights decide, and the tiny model's layers all still run."""
    attention = "model.layers.{}.mamba.self_attn.attn"
    targets = {attention.format(i): attention.format(1) for i in range(2, 6)}
    harness = ModelHarness(FAMILIES["hymba"].write(tmp_path), kv_sharing=json.dumps(targets))
    shared = [layer.name for layer in harness.runner.model.cached_layers if layer.kv_sharing_target_layer_name]
    assert shared == list(targets)
    (logits,) = harness.prompt_logits([[5, 6, 7]], chunk=2)
    assert logits.isfinite().all()
    assert HYMBA["num_hidden_layers"] == 7
