import dataclasses
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import SecretStr, ValidationError

from cluster.config import ClusterConfig, ConfigError, Mode, flag_of
from worker.config import EngineConfig, Role
from worker.kv_cache.sharing import SharingError, parse_sharing


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ClusterConfig.model_fields:
        monkeypatch.delenv(f"CROSSKV_{name.upper()}", raising=False)


def write_yaml(tmp_path: Path, **content: Any) -> Path:
    path = tmp_path / "crosskv.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def written(value: Any) -> Any:
    match value:
        case SecretStr():
            return value.get_secret_value()
        case Path():
            return str(value)
    return value


# For each field two valid values that differ from each other and from the default.
OTHERS: dict[str, tuple[Any, Any]] = {
    "model": ("a", "b"),
    "served_model_name": ("a", "b"),
    "mode": ("colocated", "colocated"),
    "prefill_replicas": (2, 3),
    "decode_replicas": (2, 3),
    "api_key_file": (Path("/a/keys"), Path("/b/keys")),
    "api_key": (SecretStr("a"), SecretStr("b")),
    "tls_certificate": (Path("/a/certificate"), Path("/b/certificate")),
    "tls_key": (Path("/a/key"), Path("/b/key")),
    "cluster_token_file": (Path("/a/token"), Path("/b/token")),
    "cluster_token": (SecretStr("a" * 16), SecretStr("b" * 16)),
    "max_body_size": (1 << 20, 4 << 20),
    "max_connections": (5, 6),
    "prefix_cache_per_key": (True, True),
    "host": ("0.0.0.0", "::1"),
    "port": (9001, 9002),
    "advertised_host": ("10.0.0.1", "10.0.0.2"),
    "placement": ("role", "role"),
    "dtype": ("float32", "float16"),
    "device": ("cpu", "cuda:1"),
    "decode_graphs": (False, False),
    "bind_cores": (True, True),
    "kv_sharing": ("none", "every:2"),
    "block_size": (8, 32),
    "kv_cache_memory": (1 << 20, 2 << 20),
    "max_model_len": (100, 200),
    "max_batched_tokens": (100, 200),
    "max_running_requests": (10, 20),
    "max_waiting_requests": (10, 20),
    "prefix_caching": (False, False),
    "state_checkpoint_blocks": (2, 3),
    "local_prefill_threshold": (5, 6),
    "threads": (1, 2),
    "max_prefill_streams": (5, 6),
    "max_prefill_replicas": (2, 3),
    "max_decode_replicas": (2, 3),
    "scale_prefill_at": (100, 200),
    "scale_decode_at": (0.5, 0.6),
    "scale_up_seconds": (1.5, 2.5),
    "scale_down_seconds": (1.5, 2.5),
    "tensor_parallel_size": (2, 4),
    "prefill_tensor_parallel_size": (2, 1),
    "min_piece_size": (1 << 20, 4 << 20),
    "transport": ("torch", "torch"),
    "request_timeout": (1.5, 2.5),
    "queue_timeout": (1.5, 2.5),
    "drain_seconds": (1.5, 2.5),
    "front_ends": (2, 3),
    "revision": ("1", "2"),
    "tool_call_parser": ("hermes", "mistral"),
    "transfer_timeout": (1.5, 2.5),
    "token_timeout": (1.5, 2.5),
    "step_timeout": (1.5, 2.5),
    "otlp_traces_endpoint": ("http://one:4318/v1/traces", "https://two/traces"),
    "ray_address": ("auto", "ray://head:10001"),
}


def test_every_field_has_a_sample_here() -> None:
    assert set(OTHERS) == set(ClusterConfig.model_fields)


@pytest.mark.parametrize("name", OTHERS)
def test_flag_before_environment_before_yaml_before_default(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = OTHERS[name]
    base = {} if name == "model" else {"model": "m"}
    if name != "model":
        default = ClusterConfig.model_fields[name].default
        assert getattr(ClusterConfig.load(**base), name) == default
        assert first != default
    path = write_yaml(tmp_path, **{name: written(first)})
    assert getattr(ClusterConfig.load(path, **base), name) == first
    monkeypatch.setenv(f"CROSSKV_{name.upper()}", str(written(second)))
    assert getattr(ClusterConfig.load(path, **base), name) == second
    assert getattr(ClusterConfig.load(path, **(base | {name: first})), name) == first


@pytest.mark.parametrize(
    ("text", "size"),
    [("512MiB", 512 * 2**20), ("40GiB", 40 * 2**30), ("1GB", 10**9), ("1.5KiB", 1536), ("4096", 4096), (4096, 4096)],
)
def test_memory_is_written_for_people(text: Any, size: int) -> None:
    assert ClusterConfig(model="m", kv_cache_memory=text).kv_cache_memory == size


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("mode", "both"),
        ("prefill_replicas", 0),
        ("port", 0),
        ("port", 70000),
        ("dtype", "int8"),
        ("device", "tpu"),
        ("block_size", 0),
        ("block_size", "many"),
        ("kv_cache_memory", "1 furlong"),
        ("kv_cache_memory", "-1GiB"),
        ("kv_cache_memory", 0),
        ("max_model_len", -1),
        ("max_waiting_requests", -1),
        ("prefix_caching", "perhaps"),
        ("threads", 10**9),
        ("request_timeout", "nan"),
        ("transfer_timeout", "inf"),
        ("model", ""),
        ("kv_sharing", "every:1"),
        ("kv_sharing", "every:"),
        ("kv_sharing", "after:-1"),
        ("kv_sharing", "sometimes"),
    ],
)
def test_a_bad_value_is_refused_with_its_origin(
    field: str, value: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = {} if field == "model" else {"model": "m"}
    with pytest.raises(ConfigError) as by_flag:
        ClusterConfig.load(**(base | {field: value}))
    assert str(by_flag.value).startswith(f"{flag_of(field)} = {value!r}: ")
    path = write_yaml(tmp_path, **{field: value})
    with pytest.raises(ConfigError) as by_file:
        ClusterConfig.load(path, **base)
    assert str(by_file.value).startswith(f"{field} in {path} = {value!r}: ")
    if value != "":  # an empty variable counts as not set
        monkeypatch.setenv(f"CROSSKV_{field.upper()}", str(value))
        with pytest.raises(ConfigError) as by_environment:
            ClusterConfig.load(path, **base)
        assert str(by_environment.value).startswith(f"CROSSKV_{field.upper()} = ")


def test_all_problems_are_named_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        ClusterConfig.load(block_size=0, port=0)
    assert "--model is missing" in str(error.value)
    assert "--block-size" in str(error.value)
    assert "--port" in str(error.value)


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("block-size", "block_size"),
        ("blocksize", "block_size"),
        ("modell", "model"),
        ("decode_replica", "decode_replicas"),
    ],
)
def test_unknown_yaml_keys_are_refused_with_the_nearest(key: str, nearest: str, tmp_path: Path) -> None:
    path = write_yaml(tmp_path, model="m", **{key: 1})
    with pytest.raises(ConfigError) as error:
        ClusterConfig.load(path)
    assert f"{key!r}" in str(error.value)
    assert f"{nearest!r}" in str(error.value)


@pytest.mark.parametrize("content", ["- a\n- b\n", "42\n", "model: [\n", "\x00"])
def test_a_file_that_is_no_map_is_refused(content: str, tmp_path: Path) -> None:
    path = tmp_path / "crosskv.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"crosskv\.yaml"):
        ClusterConfig.load(path)


def test_a_missing_file_is_refused_and_an_empty_one_is_not(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.yaml"):
        ClusterConfig.load(tmp_path / "absent.yaml", model="m")
    (tmp_path / "empty.yaml").write_text("")
    assert ClusterConfig.load(tmp_path / "empty.yaml", model="m").model == "m"


def test_a_kubernetes_service_link_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CROSSKV_PORT", "tcp://10.96.0.7:8000")
    with pytest.raises(ConfigError, match="enableServiceLinks"):
        ClusterConfig.load(model="m")
    assert ClusterConfig.load(model="m", port=8001).port == 8001


def test_a_sharing_file_is_read_once_and_travels_as_its_content(tmp_path: Path) -> None:
    targets = {"model.layers.1.self_attn.attn": "model.layers.0.self_attn.attn"}
    path = tmp_path / "sharing.json"
    path.write_text(json.dumps(targets))
    config = ClusterConfig(model="m", kv_sharing=str(path))
    path.unlink()
    assert json.loads(config.kv_sharing) == targets
    assert json.loads(config.replace(block_size=8).engine_config(Role.DECODE, "m").kv_sharing) == targets


@pytest.mark.parametrize("content", ["[]", "{", '{"a": 1}', '"a"', "\x00\xff"])
def test_a_sharing_file_of_another_shape_is_refused(content: str, tmp_path: Path) -> None:
    path = tmp_path / "sharing.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match="JSON object"):
        ClusterConfig.load(model="m", kv_sharing=str(path))


@settings(deadline=None)
@given(st.integers(0, 10**6 - 1), st.sampled_from(["every", "after"]))
def test_sharing_rules_agree_with_the_workers_parser(number: int, kind: str) -> None:
    rule = f"{kind}:{number}"
    try:
        parse_sharing(rule)
    except SharingError:
        with pytest.raises(ValidationError):
            ClusterConfig(model="m", kv_sharing=rule)
    else:
        assert ClusterConfig(model="m", kv_sharing=rule).kv_sharing == rule


def test_it_never_changes_and_crosses_processes() -> None:
    config = ClusterConfig(model="m", kv_cache_memory="3MiB", mode=Mode.COLOCATED)
    with pytest.raises(ValidationError):
        config.block_size = 8  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(config)) == config
    changed = config.replace(kv_sharing="every:3")
    assert (changed.kv_sharing, config.kv_sharing) == ("every:3", "model")
    assert changed.replace(kv_sharing="model") == config
    with pytest.raises(ValidationError):
        config.replace(block_size=-1)


def test_a_copy_does_not_listen_to_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ClusterConfig(model="m")
    monkeypatch.setenv("CROSSKV_BLOCK_SIZE", "64")
    assert config.replace(port=9000).block_size == 16


def test_an_engine_is_told_everything_that_both_know() -> None:
    values = {name: samples[0] for name, samples in OTHERS.items()}
    engine = ClusterConfig(**values).engine_config(Role.PREFILL, "/files/m.gguf")
    assert (engine.model, engine.role) == ("/files/m.gguf", Role.PREFILL)
    shared = {field.name for field in dataclasses.fields(EngineConfig)} & set(values) - {"model"}
    assert len(shared) >= 15
    assert {name: getattr(engine, name) for name in shared} == {name: values[name] for name in shared}
