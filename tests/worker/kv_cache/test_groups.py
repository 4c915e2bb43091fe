import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.worker.kv_cache.attention_layers import attention, layer_name
from worker.kv_cache.groups import count_blocks, group_layers
from worker.models.outline import outline_model

PAGE = 2 * 4 * 2 * 8 * 2  # parts, block size, KV heads, head size, bfloat16: what attention() gives


def test_a_sharing_layer_is_a_member_of_its_targets_group_and_costs_nothing() -> None:
    (group,) = group_layers([attention(0), attention(1, shares=0), attention(2), attention(3, shares=0)])
    assert group.owners == (layer_name(0), layer_name(2))
    assert group.members == tuple(map(layer_name, range(4)))
    assert group.block_bytes == 2 * PAGE


def test_layers_of_different_specs_have_groups_of_their_own() -> None:
    layers = [attention(0), attention(1, kv_heads=4), attention(2, shares=1, kv_heads=4), attention(3)]
    narrow, wide = group_layers(layers)
    assert narrow.owners == narrow.members == (layer_name(0), layer_name(3))
    assert wide.owners == (layer_name(1),)
    assert wide.members == (layer_name(1), layer_name(2))
    assert count_blocks((narrow, wide), 100 * (2 * PAGE + 2 * PAGE)) == 100


@given(shared=st.lists(st.booleans(), min_size=0, max_size=30), memory=st.integers(0, 1 << 30))
@settings(deadline=None)
def test_blocks_in_a_budget(shared: list[bool], memory: int) -> None:
    layers = [attention(0), *(attention(i + 1, shares=0 if share else None) for i, share in enumerate(shared))]
    owners = 1 + shared.count(False)
    blocks = count_blocks(group_layers(layers), memory)
    assert blocks * owners * PAGE <= memory < (blocks + 1) * owners * PAGE


def test_half_the_owners_make_twice_the_blocks() -> None:
    memory = 36 * PAGE * 1000
    unshared = group_layers([attention(i) for i in range(36)])
    shared = group_layers([attention(i, shares=i - 1 if i % 2 else None) for i in range(36)])
    assert count_blocks(unshared, memory) == 1000
    assert count_blocks(shared, memory) == 2000


@pytest.fixture(scope="module")
def qwen3_8b(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen3-8B's configuration, without weights."""
    path = tmp_path_factory.mktemp("qwen3-8b") / "config.json"
    content = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "num_hidden_layers": 36,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "intermediate_size": 12288,
        "max_position_embeddings": 40960,
        "rope_theta": 1000000,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    path.write_text(json.dumps(content))
    return path


@pytest.mark.parametrize(("rule", "owners", "bytes_per_token"), [("none", 36, 147_456), ("after:18", 19, 77_824)])
def test_qwen3_8b(qwen3_8b: Path, rule: str, owners: int, bytes_per_token: int) -> None:
    outline = outline_model(qwen3_8b, kv_sharing=rule, dtype="auto", block_size=16)
    (group,) = outline.groups
    page = 2 * 16 * 8 * 128 * 2
    memory = 40 << 30

    assert (len(group.owners), len(group.members), len(outline.layers)) == (owners, 36, 36)
    assert group.spec.page_size_bytes == page == 65_536
    assert len(group.owners) * group.spec.bytes_per_token == bytes_per_token
    assert count_blocks(outline.groups, memory) == memory // (owners * page)
    for index, layer in enumerate(outline.layers):
        assert layer.name == layer_name(index)
        assert layer.kv_sharing_target_layer_name == (layer_name(18) if index >= owners else None)
