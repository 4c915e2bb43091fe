"""Hugging Face directories: every tensor against transformers; sharded, damaged and unsupported ones."""

import json
import resource
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.memory import little_memory
from tests.tiny_checkpoints import Architecture, write_tiny
from worker.checkpoint.checkpoint import Checkpoint, CheckpointError, open_checkpoint

ARCHITECTURES: list[Architecture] = ["llama", "mistral", "qwen2", "qwen3"]


def read(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    destination = torch.full(checkpoint.shape(name), torch.nan)
    checkpoint.read_into(name, destination)
    return destination


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Read-only: damage a copy."""
    return write_tiny("llama", tmp_path_factory.mktemp("llama"), shards=3)


@pytest.fixture
def copy(llama: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(llama, tmp_path / "copy"))


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_all_tensors_are_what_transformers_reads(tmp_path: Path, architecture: Architecture, shards: int) -> None:
    checkpoint = open_checkpoint(write_tiny(architecture, tmp_path, shards=shards))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).state_dict()
    assert checkpoint.names() == set(theirs)
    for name, expected in theirs.items():
        assert torch.equal(read(checkpoint, name), expected), name
    assert checkpoint.config == json.loads((tmp_path / "config.json").read_text())
    assert checkpoint.eos_token_ids == (1, 3)


def test_parts_and_conversion(llama: Path) -> None:
    checkpoint = open_checkpoint(llama)
    name = "model.layers.2.mlp.down_proj.weight"
    whole = read(checkpoint, name)
    fused = torch.full((64, 3, 40), torch.nan, dtype=torch.bfloat16)
    checkpoint.read_into(name, fused[:, 1], (slice(None), slice(30, 70)))
    assert torch.equal(fused[:, 1], whole[:, 30:70].to(torch.bfloat16))
    assert fused[:, 0].isnan().all()
    assert fused[:, 2].isnan().all()


def test_large_tensors_are_copied_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, llama: Path) -> None:
    monkeypatch.setattr("worker.checkpoint.safetensors_checkpoint._CHUNK", 100)
    checkpoint = open_checkpoint(llama)
    stored: dict[str, torch.Tensor] = {}
    for file in llama.glob("*.safetensors"):
        stored |= load_file(file)
    for name, expected in stored.items():
        assert torch.equal(read(checkpoint, name), expected), name


def test_a_scalar_and_an_empty_tensor(copy: Path) -> None:
    save_file({"scalar": torch.tensor(2.5), "empty": torch.empty(0, 4)}, copy / "extra.safetensors")
    (copy / "model.safetensors.index.json").unlink()
    checkpoint = open_checkpoint(copy)
    assert read(checkpoint, "scalar").item() == 2.5
    assert read(checkpoint, "empty").shape == (0, 4)
    assert checkpoint.fingerprint()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_dtype_is_that_of_most_values(tmp_path: Path, dtype: str) -> None:
    write_tiny("qwen2", tmp_path, dtype=dtype)
    save_file({"extra": torch.zeros(8, dtype=torch.float64)}, tmp_path / "extra.safetensors")
    assert open_checkpoint(tmp_path).dtype() is getattr(torch, dtype)


def test_another_shape_is_refused_naming_tensor_and_shapes(llama: Path) -> None:
    checkpoint = open_checkpoint(llama)
    name = "model.layers.0.self_attn.k_proj.weight"
    with pytest.raises(CheckpointError, match=rf"{name}.*\[32, 64\].*\[64, 64\]"):
        checkpoint.read_into(name, torch.empty(64, 64))
    with pytest.raises(CheckpointError, match=rf"{name}.*\[32, 64\].*\[4, 64\].*\[64, 4\]"):
        checkpoint.read_into(name, torch.empty(64, 4), (slice(28, 99),))
    with pytest.raises(CheckpointError, match=r"no tensor 'model\.nothing'"):
        checkpoint.shape("model.nothing")


def test_end_tokens_come_from_the_generation_config_first(copy: Path) -> None:
    generation = copy / "generation_config.json"
    generation.write_text('{"eos_token_id": 7}')
    assert open_checkpoint(copy).eos_token_ids == (7,)
    generation.write_text("{}")
    assert open_checkpoint(copy).eos_token_ids == (1,)
    generation.unlink()
    assert open_checkpoint(copy).eos_token_ids == (1,)
    generation.write_text('{"eos_token_id": ["<eos>"]}')
    with pytest.raises(CheckpointError, match="eos_token_id"):
        open_checkpoint(copy)


def test_fingerprints_tell_content_and_nothing_else(llama: Path, copy: Path, tmp_path: Path) -> None:
    fingerprint = open_checkpoint(llama).fingerprint()
    assert open_checkpoint(copy).fingerprint() == fingerprint
    assert open_checkpoint(write_tiny("llama", tmp_path / "other", seed=1)).fingerprint() != fingerprint
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    assert open_checkpoint(copy).fingerprint() != fingerprint


def test_a_shard_that_is_missing_is_named(copy: Path) -> None:
    (copy / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match="lacks model-00002-of-00003"):
        open_checkpoint(copy)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({}, "weight_map"),
        ({"weight_map": []}, "weight_map"),
        ({"weight_map": {"a": "../../etc/passwd"}}, "not a file of this directory"),
        ({"weight_map": {"a": ["x"]}}, "not a file of this directory"),
        ({"weight_map": {"a": "model-00001-of-00003.safetensors"}}, "'a' is not in model-00001-of-00003"),
    ],
)
def test_an_index_that_lies_is_refused(copy: Path, index: Any, message: str) -> None:
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(copy)


def test_a_tensor_in_two_files_is_refused(copy: Path) -> None:
    (copy / "model.safetensors.index.json").unlink()
    shutil.copy(copy / "model-00001-of-00003.safetensors", copy / "model-copy.safetensors")
    with pytest.raises(CheckpointError, match=r"both in model-00001-of-00003\.safetensors and in model-copy"):
        open_checkpoint(copy)


@pytest.mark.parametrize("content", ["", "[]", "null", "{", "\xff", '{"a":' * 100_000, '{"a": 1e999999999, "b": 0'])
def test_a_config_that_is_no_json_object_is_refused(copy: Path, content: str) -> None:
    (copy / "config.json").write_text(content, encoding="latin-1")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        open_checkpoint(copy)


def test_quantized_checkpoints_are_refused_by_name(copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(CheckpointError, match="gptq"):
        open_checkpoint(copy)


def test_types_that_are_no_plain_floats_are_refused_by_name(copy: Path) -> None:
    (copy / "model.safetensors.index.json").unlink()
    save_file({"packed": torch.zeros(4, 4, dtype=torch.float8_e4m3fn)}, copy / "packed.safetensors")
    with pytest.raises(CheckpointError, match="'packed' is stored as F8_E4M3"):
        open_checkpoint(copy).read_into("packed", torch.empty(4, 4))


@pytest.mark.parametrize("file", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_pickles_are_refused_by_name(tmp_path: Path, file: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / file).write_bytes(b"\x80\x04")
    for path in (tmp_path, tmp_path / file):
        with pytest.raises(CheckpointError, match=rf"{file} is a pickle"):
            open_checkpoint(path)


def test_other_paths_are_refused_with_advice(tmp_path: Path, llama: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        open_checkpoint(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"no \*\.safetensors"):
        open_checkpoint(tmp_path)
    (tmp_path / "model.gguf").touch()
    with pytest.raises(CheckpointError, match=r"name .*model\.gguf"):
        open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="name the directory"):
        open_checkpoint(llama / "model-00001-of-00003.safetensors")
    with pytest.raises(CheckpointError, match="neither a directory"):
        open_checkpoint(llama / "config.json")


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_file_opens_or_is_refused(tmp_path: Path, llama: Path, data: st.DataObject) -> None:
    content = bytearray((llama / "model-00001-of-00003.safetensors").read_bytes())
    header = 8 + struct.unpack_from("<Q", content)[0]
    for _ in range(data.draw(st.integers(0, 3))):
        start = data.draw(st.integers(0, header - 1) | st.integers(0, 7))
        damage = data.draw(st.binary(min_size=1, max_size=8) | st.text('0123456789,[]{}"', min_size=1).map(str.encode))
        content[start : start + len(damage)] = damage
    content = content[: data.draw(st.just(len(content)) | st.integers(0, len(content)))]
    shutil.copy(llama / "config.json", tmp_path)
    (tmp_path / "model.safetensors").write_bytes(content)
    with little_memory():
        try:
            checkpoint = open_checkpoint(tmp_path)
            checkpoint.fingerprint()
            checkpoint.dtype()
            for name in checkpoint.names():
                checkpoint.read_into(name, torch.empty(checkpoint.shape(name)))
        except CheckpointError as error:
            assert str(tmp_path) in str(error)  # noqa: PT017 - any outcome but another exception is right


def stored(header: str, size: int | None = None, data: bytes = bytes(64)) -> bytes:
    return struct.pack("<Q", len(header) if size is None else size) + header.encode() + data


def entry(shape: str, begin: int, end: int) -> str:
    return f'{{"t": {{"dtype": "F32", "shape": {shape}, "data_offsets": [{begin}, {end}]}}}}'


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 8,
        stored("{}", size=1 << 60),
        stored("{}", size=(1 << 64) - 1),
        stored("{}", size=99 << 20),
        stored(entry("[4]", 0, 1 << 40)),
        stored(entry("[1099511627776]", 0, 4 << 40)),
        stored(entry("[18446744073709551615, 2]", 0, 64)),
        stored(entry("[4294967296, 4294967296]", 0, 0)),
        stored(entry("[4]", 16, 0)),
        stored(entry("[-4]", 0, 16)),
        stored("[" * 100_000),
        stored('{"a":' * 100_000),
    ],
)
def test_a_header_that_lies_about_sizes_is_refused_without_memory(tmp_path: Path, llama: Path, content: bytes) -> None:
    """The bound is on this process' memory as a whole: the header is parsed in Rust."""
    shutil.copy(llama / "config.json", tmp_path)
    (tmp_path / "model.safetensors").write_bytes(content)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with little_memory(), pytest.raises(CheckpointError, match=str(tmp_path)):
        open_checkpoint(tmp_path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 128 << 10
