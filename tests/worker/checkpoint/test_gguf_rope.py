"""Rope scaling of GGUF files, against what transformers computes from the recovered parameters."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests.tiny_checkpoints import write_tiny_gguf
from worker.checkpoint.checkpoint import CheckpointError, open_checkpoint
from worker.checkpoint.gguf_file import GgufFile
from worker.checkpoint.gguf_metadata import GgufMetadata
from worker.checkpoint.gguf_rope import rope_scaling

THETA = 500_000.0


def divisors(parameters: dict[str, object], head_dim: int, theta: float = THETA) -> np.ndarray:
    """What transformers divides each frequency by, in float32 as a converter stores it."""
    config = LlamaConfig(head_dim=head_dim, rope_parameters={"rope_theta": theta, **parameters})
    scaled, factor = ROPE_INIT_FUNCTIONS[str(parameters["rope_type"])](config, torch.device("cpu"))
    assert factor == 1.0
    plain = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    return (plain / scaled.double()).float().numpy()


@pytest.fixture(scope="module")
def metadata(tmp_path_factory: pytest.TempPathFactory) -> GgufMetadata:
    return GgufMetadata(GgufFile.open(write_tiny_gguf(tmp_path_factory.mktemp("gguf"), "llama", "F32")))


@pytest.mark.parametrize("factor", [8.0, 32.0])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_parameters_of_released_llamas_are_recovered(metadata: GgufMetadata, factor: float, head_dim: int) -> None:
    parameters = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    stored = divisors(parameters, head_dim)
    assert rope_scaling(metadata, THETA, head_dim, stored.astype(np.float64)) == parameters


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("factor", [2.0, 8.0, 40.0])
@pytest.mark.parametrize("ratio", [2.0, 3.0, 4.0, 8.0])
@pytest.mark.parametrize("original", [2048, 4096, 32768])
def test_other_parameters_are_replaced_by_equivalent_ones(
    metadata: GgufMetadata, head_dim: int, factor: float, ratio: float, original: int
) -> None:
    parameters = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": ratio,
        "original_max_position_embeddings": original,
    }
    stored = divisors(parameters, head_dim)
    recovered = rope_scaling(metadata, THETA, head_dim, stored.astype(np.float64))
    assert recovered is not None
    np.testing.assert_allclose(divisors(recovered, head_dim), stored, rtol=3e-5)


@settings(max_examples=50, deadline=None)
@given(
    factor=st.floats(1.5, 64.0),
    low=st.floats(0.5, 2.0),
    ratio=st.floats(2.0, 8.0),
    original=st.integers(2048, 32768),
    head_dim=st.sampled_from([64, 128]),
)
def test_recovered_parameters_give_the_stored_frequencies_or_are_refused(
    metadata: GgufMetadata, factor: float, low: float, ratio: float, original: int, head_dim: int
) -> None:
    parameters = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": low * ratio,
        "original_max_position_embeddings": original,
    }
    stored = divisors(parameters, head_dim)
    try:
        recovered = rope_scaling(metadata, THETA, head_dim, stored.astype(np.float64))
    except CheckpointError:
        return
    assert recovered is not None
    np.testing.assert_allclose(divisors(recovered, head_dim), stored, rtol=3e-5)


def test_divisors_of_one_value_are_linear_scaling(metadata: GgufMetadata) -> None:
    assert rope_scaling(metadata, THETA, 64, np.full(32, 4.0)) == {"rope_type": "linear", "factor": 4.0}
    assert rope_scaling(metadata, THETA, 64, np.ones(32)) is None


@pytest.mark.parametrize(
    "stored", [np.linspace(1.0, 9.0, 32), np.ones(16), np.full(32, np.nan), np.full(32, 0.5), np.zeros(32)]
)
def test_other_divisors_are_refused_by_name(metadata: GgufMetadata, stored: np.ndarray) -> None:
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight"):
        rope_scaling(metadata, THETA, 64, stored)


def test_a_file_with_divisors_has_llama3_scaling(tmp_path: Path) -> None:
    parameters = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }

    def extend(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("rope_freqs.weight", divisors(parameters, 16, theta=10_000.0))

    checkpoint = open_checkpoint(write_tiny_gguf(tmp_path, "llama", "F32", extend=extend))
    assert checkpoint.config["rope_scaling"] == parameters
    assert not any("rope" in name for name in checkpoint.names())


def test_linear_scaling(tmp_path: Path) -> None:
    def extend(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(2.5)

    checkpoint = open_checkpoint(write_tiny_gguf(tmp_path, "llama", "F32", extend=extend))
    assert checkpoint.config["rope_scaling"] == {"rope_type": "linear", "factor": 2.5}


def test_yarn(tmp_path: Path) -> None:
    def extend(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(1024)
        writer.add_rope_scaling_yarn_beta_fast(24.0)

    checkpoint = open_checkpoint(write_tiny_gguf(tmp_path, "qwen2", "F32", extend=extend))
    assert checkpoint.config["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 1024,
        "beta_fast": 24.0,
    }


@pytest.mark.parametrize(
    ("extend", "named"),
    [
        (lambda writer: writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE), "longrope"),
        (lambda writer: writer.add_rope_scaling_attn_factors(1.2), "attn_factor"),
        (lambda writer: writer.add_rope_dimension_count(8), "8 rotated"),
    ],
)
def test_rope_that_cannot_be_expressed_is_refused_by_name(tmp_path: Path, extend: object, named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        open_checkpoint(write_tiny_gguf(tmp_path, "llama", "F32", extend=extend))
