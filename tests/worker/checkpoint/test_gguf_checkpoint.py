"""GGUF checkpoints: every tensor against the gguf package and against transformers."""

import time
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from cluster.model_store import fetch_smollm2
from tests.tiny_checkpoints import Architecture, write_tiny_gguf
from worker.checkpoint import gguf_checkpoint
from worker.checkpoint.checkpoint import Checkpoint, CheckpointError, open_checkpoint

ARCHITECTURES: list[Architecture] = ["llama", "mistral", "qwen2", "qwen3"]
QUANTIZATIONS = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K"]


def read(checkpoint: Checkpoint, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    destination = torch.full(checkpoint.shape(name), torch.nan, dtype=dtype)
    checkpoint.read_into(name, destination)
    return destination


def reference_of(path: Path) -> dict[str, torch.Tensor]:
    return load_file(path.parent / "reference" / "model.safetensors")


@pytest.fixture(scope="module", params=ARCHITECTURES)
def q4_1(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp(request.param), request.param, "Q4_1")


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_every_supported_type_means_what_the_gguf_package_says(tmp_path: Path, quantization: str) -> None:
    path = write_tiny_gguf(tmp_path, "llama", quantization)
    checkpoint = open_checkpoint(path)
    reference = reference_of(path)
    assert checkpoint.names() == set(reference)
    for name, expected in reference.items():
        assert torch.equal(read(checkpoint, name), expected), name


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_has_the_weights_that_transformers_reads(tmp_path: Path, architecture: Architecture) -> None:
    # transformers takes every Qwen3 in GGUF to have heads of 128.
    heads = {"head_dim": 128} if architecture == "qwen3" else {}
    path = write_tiny_gguf(tmp_path, architecture, "Q4_1", **heads)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32).state_dict()
    checkpoint = open_checkpoint(path)
    assert checkpoint.names() == set(theirs)
    for name, expected in theirs.items():
        assert torch.equal(read(checkpoint, name), expected), name


def test_the_configuration_is_the_original_one(q4_1: Path) -> None:
    ours = dict(open_checkpoint(q4_1).config)
    original = AutoConfig.from_pretrained(q4_1.parent / "reference")
    # GGUF knows no Mistral: it is a llama.
    kind = "llama" if original.model_type == "mistral" else original.model_type
    config = AutoConfig.for_model(**ours)
    assert config.model_type == kind
    for field in (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "max_position_embeddings",
        "tie_word_embeddings",
        "bos_token_id",
        "hidden_act",
    ):
        assert getattr(config, field) == getattr(original, field), field
    assert ours["head_dim"] == 16
    assert config.rms_norm_eps == pytest.approx(original.rms_norm_eps)
    assert config.rope_parameters == original.rope_parameters
    assert open_checkpoint(q4_1).eos_token_ids == (1, 3)


def test_logits_equal_those_of_the_original(q4_1: Path) -> None:
    """The whole translation at once: names, row order, configuration."""
    checkpoint = open_checkpoint(q4_1)
    ours = AutoModelForCausalLM.from_config(AutoConfig.for_model(**checkpoint.config))
    ours.load_state_dict({name: read(checkpoint, name) for name in checkpoint.names()})
    original = AutoModelForCausalLM.from_pretrained(q4_1.parent / "reference")
    tokens = torch.arange(4, 100)[None]
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens).logits, original(tokens).logits, rtol=1e-5, atol=1e-5)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), chunk=st.sampled_from([1, 100, 1 << 18]))
def test_a_part_is_that_part_of_the_whole(q4_1: Path, data: st.DataObject, chunk: int) -> None:
    checkpoint = open_checkpoint(q4_1)
    name = data.draw(st.sampled_from(sorted(checkpoint.names())))
    part = []
    for size in checkpoint.shape(name):
        start = data.draw(st.integers(0, size - 1))
        part.append(slice(start, data.draw(st.integers(start + 1, size))))
    part = part[: data.draw(st.integers(1, len(part)))]
    expected = read(checkpoint, name)[tuple(part)]
    # Into the middle of something larger, as into one of several fused weights.
    fused = torch.full((expected.shape[0] + 2, *expected.shape[1:]), torch.nan)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf_checkpoint, "_CHUNK", chunk)
        checkpoint.read_into(name, fused[1:-1], tuple(part))
    assert torch.equal(fused[1:-1], expected)
    assert fused[0].isnan().all()
    assert fused[-1].isnan().all()


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_columns_may_be_cut_anywhere(tmp_path: Path, quantization: str) -> None:
    """As tensor parallelism cuts o_proj and down_proj, also inside of a block."""
    path = write_tiny_gguf(tmp_path, "llama", quantization, num_hidden_layers=1)
    for name in ("model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.down_proj.weight"):
        expected = reference_of(path)[name][5:50, 3:61]
        part = torch.empty(expected.shape)
        open_checkpoint(path).read_into(name, part, (slice(5, 50), slice(3, 61)))
        assert torch.equal(part, expected), name


def test_values_are_converted_to_the_destination(q4_1: Path) -> None:
    checkpoint = open_checkpoint(q4_1)
    name = "model.layers.1.mlp.down_proj.weight"
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        assert torch.equal(read(checkpoint, name, dtype), read(checkpoint, name).to(dtype))


def test_another_shape_is_refused_naming_tensor_and_shapes(q4_1: Path) -> None:
    checkpoint = open_checkpoint(q4_1)
    name = "model.layers.0.mlp.up_proj.weight"
    with pytest.raises(CheckpointError, match=rf"{name}.*\[128, 64\].*\[64, 64\]"):
        checkpoint.read_into(name, torch.empty(64, 64))
    with pytest.raises(CheckpointError, match=rf"{name}.*\[128, 64\].*\[8, 64\].*\[9, 64\]"):
        checkpoint.read_into(name, torch.empty(9, 64), (slice(8, 16),))
    with pytest.raises(CheckpointError, match=r"no tensor 'model\.nothing'"):
        checkpoint.read_into("model.nothing", torch.empty(1))


@pytest.mark.parametrize(
    ("quantization", "dtype"),
    [
        ("F32", torch.float32),
        ("F16", torch.float16),
        ("BF16", torch.bfloat16),
        ("Q8_0", torch.bfloat16),
        ("Q4_K", torch.bfloat16),
    ],
)
def test_the_dtype_is_that_of_most_values(tmp_path: Path, quantization: str, dtype: torch.dtype) -> None:
    assert open_checkpoint(write_tiny_gguf(tmp_path, "qwen3", quantization)).dtype() is dtype


def test_a_shared_embedding_has_no_head(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_tiny_gguf(tmp_path, "qwen3", "F32", tie_word_embeddings=True))
    assert checkpoint.config["tie_word_embeddings"] is True
    assert "lm_head.weight" not in checkpoint.names()


def test_biases_of_a_llama_are_put_in_order_too(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path, "llama", "F32", attention_bias=True, mlp_bias=True)
    checkpoint = open_checkpoint(path)
    assert checkpoint.config["attention_bias"] is True
    assert checkpoint.config["mlp_bias"] is True
    for name, expected in reference_of(path).items():
        assert torch.equal(read(checkpoint, name), expected), name


def test_a_sliding_window_makes_a_mistral(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path, "mistral", "F32", extend=lambda writer: writer.add_sliding_window(128))
    config = open_checkpoint(path).config
    assert config["architectures"] == ["MistralForCausalLM"]
    assert config["model_type"] == "mistral"
    assert config["sliding_window"] == 128


REFUSED: list[tuple[str, Any]] = [
    ("expert_count", lambda writer: writer.add_expert_count(8)),
    ("logit_scale", lambda writer: writer.add_logit_scale(2.0)),
    ("final_logit_softcapping", lambda writer: writer.add_final_logit_softcapping(30.0)),
    ("attention.causal", lambda writer: writer.add_causal_attention(False)),
    ("2 parts", lambda writer: writer.add_uint16("split.count", 2)),
    ("blk.9.attn_norm.weight", lambda writer: writer.add_tensor("blk.9.attn_norm.weight", np.ones(64, np.float32))),
    ("blk.0.ffn_gate_inp.weight", lambda writer: writer.add_tensor("blk.0.ffn_gate_inp.weight", np.ones((8, 64)))),
    ("rope_factors_long.weight", lambda writer: writer.add_tensor("rope_factors_long.weight", np.ones(8))),
]


@pytest.mark.parametrize(("named", "extend"), REFUSED)
def test_what_would_change_the_computation_is_refused_by_name(tmp_path: Path, named: str, extend: Any) -> None:
    with pytest.raises(CheckpointError, match=named):
        open_checkpoint(write_tiny_gguf(tmp_path, "llama", "F32", extend=extend))


@pytest.mark.parametrize("type_", [GGMLQuantizationType.Q2_K, GGMLQuantizationType.IQ4_XS, GGMLQuantizationType.MXFP4])
def test_other_quantizations_are_refused_by_name(tmp_path: Path, type_: GGMLQuantizationType) -> None:
    block, block_bytes = gguf.GGML_QUANT_SIZES[type_]

    def extend(writer: gguf.GGUFWriter) -> None:
        data = np.zeros((1, 256 // block * block_bytes), np.uint8)
        writer.add_tensor("blk.0.ffn_up.bias", data, raw_dtype=type_)

    with pytest.raises(CheckpointError, match=rf"blk\.0\.ffn_up\.bias.*{type_.name}.*Q4_K"):
        open_checkpoint(write_tiny_gguf(tmp_path, "llama", "F32", extend=extend))


def test_another_architecture_is_refused_by_name(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "phi.gguf", "phi3")
    writer.add_tensor("token_embd.weight", np.ones((8, 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match="'phi3' is not supported; llama, qwen2, qwen3 are"):
        open_checkpoint(tmp_path / "phi.gguf")


def test_fingerprints_tell_content_and_nothing_else(tmp_path: Path) -> None:
    first = write_tiny_gguf(tmp_path / "a", "llama", "Q8_0")
    moved = tmp_path / "elsewhere.gguf"
    moved.write_bytes(first.read_bytes())
    other = write_tiny_gguf(tmp_path / "b", "llama", "Q8_0", seed=1)
    fingerprint = open_checkpoint(first).fingerprint()
    assert open_checkpoint(moved).fingerprint() == fingerprint
    assert open_checkpoint(other).fingerprint() != fingerprint
    renamed = write_tiny_gguf(tmp_path / "c", "llama", "Q8_0", extend=lambda writer: writer.add_author("someone"))
    assert open_checkpoint(renamed).fingerprint() != fingerprint


class TestSmolLM2:
    """The model that the project serves, all of its tensors."""

    @pytest.fixture(scope="class")
    def checkpoint(self) -> Checkpoint:
        return open_checkpoint(fetch_smollm2())

    def test_all_tensors_are_what_transformers_reads(self, checkpoint: Checkpoint) -> None:
        path = checkpoint.path
        theirs = AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32
        ).state_dict()
        assert checkpoint.names() == set(theirs) - {"lm_head.weight"}
        for name in checkpoint.names():
            assert torch.equal(read(checkpoint, name), theirs[name]), name

    def test_loading_takes_seconds_and_no_second_copy(self, checkpoint: Checkpoint) -> None:
        weights = {name: torch.empty(checkpoint.shape(name), dtype=torch.bfloat16) for name in checkpoint.names()}
        started = time.process_time()
        for name, weight in weights.items():
            checkpoint.read_into(name, weight)
        assert time.process_time() - started < 5.0  # of processor time, whatever else the machine does
        tracemalloc.start()
        checkpoint.read_into("model.embed_tokens.weight", weights["model.embed_tokens.weight"])
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 64 << 20  # the embedding is 108 MiB in float32

    def test_its_shape(self, checkpoint: Checkpoint) -> None:
        assert checkpoint.config["num_hidden_layers"] == 30
        assert checkpoint.shape("model.layers.3.self_attn.k_proj.weight") == (192, 576)
        assert checkpoint.eos_token_ids == (2,)
        assert checkpoint.dtype() is torch.bfloat16
