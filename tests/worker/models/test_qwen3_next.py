"""Qwen3-Next: figures of the released model, sharing among its attention layers, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.model_harness import ModelHarness
from tests.releases import QWEN3_NEXT_80B
from tests.tiny_checkpoints import VOCAB_SIZE
from tests.tiny_families import FAMILIES
from worker.config import Role
from worker.kv_cache.groups import CachePlan, plan_cache
from worker.kv_cache.sharing import parse_sharing
from worker.kv_cache.specs import FullAttentionSpec, LastState, RecurrentStateSpec
from worker.layers.cache_format import CacheFormat
from worker.layers.weights import WeightFormat
from worker.models.config_checks import UnsupportedModel
from worker.models.config_reader import parse_config
from worker.models.model import Model, ModelContext
from worker.weight_loader import WeightMismatch


def build(kv_sharing: str = "model", *, headless: bool = False) -> Model:
    """The released model without memory."""
    context = ModelContext(
        weights=WeightFormat(torch.bfloat16, torch.device("meta")),
        cache=CacheFormat(16, torch.bfloat16),
        sharing=parse_sharing(kv_sharing),
        max_model_len=2,
        headless=headless,
    )
    return parse_config(QWEN3_NEXT_80B).build(context)


def plan(kv_sharing: str = "model") -> CachePlan:
    return plan_cache(build(kv_sharing).cached_layers, 16)


def test_cached_layers_of_the_released_model() -> None:
    layers = build().cached_layers
    for index, layer in enumerate(layers):
        if index % 4 == 3:
            assert layer.name == f"model.layers.{index}.self_attn.attn"
            assert layer.kv_cache_spec() == FullAttentionSpec(16, 2, 256, torch.bfloat16)
        else:
            assert layer.name == f"model.layers.{index}.linear_attn.state"
            assert isinstance(layer.kv_cache_spec(), RecurrentStateSpec)
    assert len(layers) == 48


def test_cache_of_the_released_model() -> None:
    cache = plan()
    matrix, inputs = 32 * 128 * 128 * 4, (16 * 128 + 16 * 128 + 32 * 128) * 3 * 2
    assert cache.bytes_per_token == 12 * 2 * 2 * 256 * 2 == 24_576
    assert cache.state_bytes == 36 * (matrix + inputs) == 77_266_944

    assert [len(group.owners) for group in cache.groups] == [12] * 4
    assert len(cache.buffers) == 12
    assert all(len(buffer.shared_by) == 4 for buffer in cache.buffers)
    (attention,) = (group for group in cache.groups if not isinstance(group.retention, LastState))
    page = attention.block_size * 2 * 2 * 256 * 2
    assert page - 16 * 2048 < matrix + inputs <= page, "the smallest multiple of 16 tokens that holds a state"
    assert cache.bytes_per_block == 12 * page
    assert cache.bytes_per_block_unshared_buffers / cache.bytes_per_block == pytest.approx(2.0, rel=0.01)


def test_a_state_is_split_by_heads() -> None:
    spec = next(spec for group in plan().groups for spec in group.specs if isinstance(spec, RecurrentStateSpec))
    assert spec.sharded(4).state_bytes * 4 == spec.state_bytes
    with pytest.raises(ValueError, match="16 heads or channels cannot be split over 32 ranks"):
        spec.sharded(32)


def test_sharing_is_among_attention_layers() -> None:
    layers = build("every:2").cached_layers
    sharing = {layer.name: layer.kv_sharing_target_layer_name for layer in layers if layer.kv_cache_spec() is None}
    assert sharing == {
        f"model.layers.{index}.self_attn.attn": f"model.layers.{index - 4}.self_attn.attn" for index in range(7, 48, 8)
    }
    assert plan("every:2").bytes_per_token == 24_576 // 2
    assert plan("every:2").state_bytes == plan().state_bytes


@pytest.mark.parametrize(
    ("kv_sharing", "last_owner"), [("model", "self_attn.k_proj"), ("every:2", "linear_attn.in_proj_ba")]
)
def test_a_headless_model_ends_with_the_last_owner(kv_sharing: str, last_owner: str) -> None:
    index = 47 if kv_sharing == "model" else 46
    names = [slot.name for slot in build(kv_sharing, headless=True).slots()]
    assert f"model.layers.{index}.{last_owner}.weight" in names
    for absent in ("self_attn.q_proj", "linear_attn.out_proj", "linear_attn.norm", "mlp.gate"):
        assert f"model.layers.{index}.{absent}.weight" not in names
    assert f"model.layers.{index - 1}.mlp.gate.weight" in names
    assert not any(name.startswith((f"model.layers.{index + 1}.", "model.norm", "lm_head")) for name in names)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return FAMILIES["qwen3_next"].write(tmp_path_factory.mktemp("qwen3_next"))


def prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(11)
    return [torch.randint(4, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]


def test_a_recurrent_last_owner(tiny: Path) -> None:
    """With the last attention layer sharing, the last owner is recurrent: what a headless model leaves is the same."""
    whole, headless = (ModelHarness(tiny, kv_sharing="every:2", role=role) for role in (Role.COLOCATED, Role.PREFILL))
    given = prompts(1, 17, 90)
    for expected, stored in zip(whole.stored(given, 64), headless.stored(given, 64), strict=True):
        torch.testing.assert_close(stored, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kv_sharing", ["model", "every:2"])
def test_rows_without_logits_change_nothing(tiny: Path, kv_sharing: str) -> None:
    """Greedy tokens, for which one row per sequence goes past the last owner, are those of the logits of all rows."""
    given = prompts(3, 40, 70)
    continued = ModelHarness(tiny, kv_sharing=kv_sharing).greedy(given, 4, 32)
    complete = [[*prompt, *tokens[:-1]] for prompt, tokens in zip(given, continued, strict=True)]
    for tokens, logits in zip(
        continued, ModelHarness(tiny, kv_sharing=kv_sharing).prompt_logits(complete, 9), strict=True
    ):
        assert logits[-4:].argmax(dim=-1).tolist() == tokens


def test_tensors_of_multi_token_prediction_are_left_alone(tiny: Path, tmp_path: Path) -> None:
    for file in tiny.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(tiny / "model.safetensors")
    save_file(weights | {"mtp.fc.weight": torch.zeros(2, 2)}, tmp_path / "model.safetensors", {"format": "pt"})
    ModelHarness(tmp_path)
    save_file(weights | {"model.mtp.weight": torch.zeros(2, 2)}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(WeightMismatch, match=r"model\.mtp\.weight"):
        ModelHarness(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["linear_attention", "sliding_attention"] * 24}, r"layer_types\[1\] is 'sliding_attention'"),
        ({"layer_types": ["linear_attention"] * 48}, "layer_types has no 'full_attention'"),
        ({"layer_types": ["full_attention"] * 47}, "layer_types"),
        ({"mlp_only_layers": [48]}, "mlp_only_layers names layer 48 of 48"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"linear_num_value_heads": 24}, "linear_num_value_heads 24 is not a multiple of linear_num_key_heads 16"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim is 1"),
        ({"linear_key_head_dim": 0}, "linear_key_head_dim is 0"),
        ({"num_experts_per_tok": 513}, "num_experts_per_tok 513 is more than num_experts 512"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        ({"partial_rotary_factor": 0.02}, "partial_rotary_factor 0.02 turns 5"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor 1.5 turns 384"),
        ({"use_sliding_window": True}, "use_sliding_window is True"),
    ],
)
def test_what_is_not_computed_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        parse_config({**QWEN3_NEXT_80B, **changes})
