import json
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.worker.kv_cache.attention_layers import attention, layer_name
from worker.kv_cache.sharing import SharingError, Targets, parse_sharing, validate_targets
from worker.kv_cache.specs import LayerName

NAMES = [layer_name(index) for index in range(6)]
DECLARED = {NAMES[5]: NAMES[3]}


def indices(targets: Targets) -> dict[int, int]:
    return {NAMES.index(layer): NAMES.index(target) for layer, target in targets.items()}


def resolve(text: str) -> dict[int, int]:
    return indices(parse_sharing(text).resolve(NAMES, DECLARED))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("model", {5: 3}),
        ("none", {}),
        ("every:2", {1: 0, 3: 2, 5: 4}),
        ("every:4", {1: 0, 2: 0, 3: 0, 5: 4}),
        ("every:100", {1: 0, 2: 0, 3: 0, 4: 0, 5: 0}),
        ("after:2", {3: 2, 4: 2, 5: 2}),
        ("after:5", {}),
        ("after:0", {1: 0, 2: 0, 3: 0, 4: 0, 5: 0}),
        (json.dumps({NAMES[4]: NAMES[1]}), {4: 1}),
        ("  {} ", {}),
    ],
)
def test_forms(text: str, expected: dict[int, int]) -> None:
    assert resolve(text) == expected


def test_a_json_file(tmp_path: Path) -> None:
    path = tmp_path / "map.json"
    path.write_text(json.dumps({NAMES[2]: NAMES[0], NAMES[5]: NAMES[3]}))
    assert resolve(str(path)) == {2: 0, 5: 3}


@given(period=st.integers(2, 50), layers=st.integers(1, 80))
@settings(deadline=None)
def test_every_nth_keeps_one_owner_of_each_run(period: int, layers: int) -> None:
    names = [layer_name(index) for index in range(layers)]
    targets = parse_sharing(f"every:{period}").resolve(names, {})
    assert layers - len(targets) == -(-layers // period)
    for layer, target in targets.items():
        distance = names.index(layer) - names.index(target)
        assert 0 < distance < period
        assert target not in targets


@given(last_owner=st.integers(0, 79), layers=st.integers(1, 80))
@settings(deadline=None)
def test_after_leaves_every_layer_up_to_the_last_owner(last_owner: int, layers: int) -> None:
    names = [layer_name(index) for index in range(layers)]
    rule = parse_sharing(f"after:{last_owner}")
    if last_owner >= layers:
        with pytest.raises(SharingError, match=f"after:{last_owner}: .* 0 to {layers - 1}"):
            rule.resolve(names, {})
    else:
        targets = rule.resolve(names, {})
        assert list(targets) == names[last_owner + 1 :]
        assert set(targets.values()) <= {names[last_owner]}


@pytest.mark.parametrize(
    "text",
    [
        "", "all", "none:1", "model:0", "every", "every:", "every:0", "every:1", "every:-2", "every:2.5", "every:two",
        "every:９", "every: 2", "every:99999999", "after", "after:", "after:-1", "after:x", "/no/such/file.json", "\0",
        ".", "x" * 5000,
    ],
)  # fmt: skip
def test_what_is_no_rule_is_refused_with_what_was_given(text: str) -> None:
    with pytest.raises(SharingError) as error:
        parse_sharing(text)
    assert repr(text)[1:40].rstrip("'") in str(error.value)
    assert "--kv-sharing" in str(error.value)


@pytest.mark.parametrize(
    "content",
    [
        "{", "{'a': 'b'}", '{"a": 1}', '{"a": null}', '{"a": ["b"]}', '{"a": ' + "1" * 5000 + "}",
        '{"a": ' * 100_000, '{"a": "b"} x',
    ],
)  # fmt: skip
def test_json_that_is_no_map_of_names_is_refused(content: str, tmp_path: Path) -> None:
    path = tmp_path / "map.json"
    path.write_text(content)
    with pytest.raises(SharingError, match="JSON"):
        parse_sharing(content)
    with pytest.raises(SharingError, match=str(path)):
        parse_sharing(str(path))


@pytest.mark.parametrize(
    "content", ["[]", '"a"', "3", "", "\ud800".encode("utf-16-le", "surrogatepass").decode("latin-1")]
)
def test_a_file_that_holds_no_object_is_refused(content: str, tmp_path: Path) -> None:
    path = tmp_path / "map.json"
    path.write_text(content, encoding="latin-1")
    with pytest.raises(SharingError, match=str(path)):
        parse_sharing(str(path))


def test_a_key_that_is_no_layer_is_named_with_its_target() -> None:
    rule = parse_sharing(json.dumps({"model.layers.60.self_attn.attn": NAMES[0]}))
    with pytest.raises(SharingError, match=r"layers\.60\..*model\.layers\.0\.self_attn\.attn"):
        rule.resolve(NAMES, {})


@dataclass(slots=True)
class CrossAttention:
    """An attention layer of another type."""

    name: LayerName
    kv_sharing_target_layer_name: LayerName | None
    attention_type: str = "encoder_decoder"
    kv_heads: int = 2
    head_dim: int = 8


def test_a_valid_map_passes() -> None:
    validate_targets(
        [attention(0), attention(1, shares=0), attention(2), attention(3, shares=2), attention(4, shares=0)]
    )


@pytest.mark.parametrize(
    ("layers", "layer", "target", "reason"),
    [
        pytest.param([attention(0), attention(1, shares=9)], 1, 9, "no attention layer", id="a: does not exist"),
        pytest.param(
            [attention(0), CrossAttention(layer_name(1), layer_name(0))],
            1, 0, "encoder_decoder, full attention", id="b: another attention type",
        ),
        pytest.param(
            [attention(0), attention(1, shares=0, window=8)],
            1, 0, "sliding window of 8, full attention", id="b: a window on a full cache",
        ),
        pytest.param(
            [attention(0, window=4), attention(1, shares=0, window=8)],
            1, 0, "sliding window of 8, sliding window of 4", id="b: another window",
        ),
        pytest.param([attention(0, shares=1), attention(1)], 0, 1, "earlier", id="c: comes later"),
        pytest.param([attention(0, shares=0)], 0, 0, "earlier", id="c: itself"),
        pytest.param(
            [attention(0), attention(1, shares=0), attention(2, shares=1)], 2, 1, "owns no cache", id="d: shares itself"
        ),
        pytest.param(
            [attention(0, kv_heads=4), attention(1, shares=0)], 1, 0, "2 KV heads of 8 against 4 of 8", id="e: KV heads"
        ),
        pytest.param(
            [attention(0), attention(1, shares=0, head_dim=16)], 1, 0, "2 KV heads of 16 .* 2 of 8", id="e: head size"
        ),
    ],
)  # fmt: skip
def test_each_rule_names_both_layers(layers: list[CrossAttention], layer: int, target: int, reason: str) -> None:
    with pytest.raises(SharingError, match=reason) as error:
        validate_targets(layers)
    for name in (layer_name(layer), layer_name(target)):
        assert name in str(error.value)
