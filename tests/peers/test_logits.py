"""Logits of the model runner against transformers, row by row, for every switch that a configuration can have."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.engine_process import SENTINEL_BYTE
from tests.peers.agreement import TOLERANCE
from tests.peers.reference import Reference
from tests.tiny_checkpoints import VOCAB_SIZE, Architecture, write_tiny
from worker.config import EngineConfig, Role
from worker.kv_cache.block_pool import BlockId
from worker.kv_cache.block_table import BlockTable
from worker.model_runner import ModelRunner
from worker.sampling_params import SamplingParams
from worker.scheduler import ScheduledRows
from worker.sequence import RequestId
from worker.sequence import Sequence as EngineSequence

CHUNKS = (1, 7, 100, 16, 1, 33)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def random_tokens(count: int, seed: int = 3) -> list[int]:
    return torch.randint(VOCAB_SIZE, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def engine_logits(
    checkpoint: Path, tokens: Sequence[int], chunks: Sequence[int] = CHUNKS, **settings: Any
) -> torch.Tensor:
    """Logits of every token, ``[tokens, vocab]``, computed in chunks of the given sizes and then in one last chunk.

    The blocks are scattered over the cache.
    """
    settings = {"dtype": "float32", "kv_cache_memory": 8 << 20} | settings
    runner = ModelRunner(EngineConfig(str(checkpoint), Role.COLOCATED, **settings), fill=SENTINEL_BYTE)
    needed = -(-len(tokens) // settings.get("block_size", 16))
    blocks = torch.randperm(runner.num_blocks, generator=torch.Generator().manual_seed(1))[:needed].tolist()
    table = BlockTable([*map(BlockId, blocks)])
    sequence = EngineSequence(
        RequestId("r"), 0, list(tokens), len(tokens), SamplingParams(), "", 0.0, 0.0, tables=[table]
    )
    rows = []
    first = 0
    with torch.inference_mode():
        for size in (*chunks, len(tokens)):
            count = min(size, len(tokens) - first)
            if count:
                logits = runner.execute([ScheduledRows(sequence, first, count, count).contents])
                assert logits is not None
                assert logits.dtype is torch.float32
                rows.append(logits)
            first += count
    return torch.cat(rows)


def transformers_model(checkpoint: Path, **settings: Any) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(checkpoint, **{"dtype": torch.float32} | settings).eval()


def require_equal(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert ours.shape == theirs.shape
    assert (ours - theirs).abs().max().item() <= TOLERANCE


CONFIGURATIONS: dict[str, tuple[Architecture, dict[str, Any]]] = {
    "llama-mha": ("llama", {"num_key_value_heads": 4}),
    "llama-mqa": ("llama", {"num_key_value_heads": 1}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-attention-bias": ("llama", {"attention_bias": True}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-head-dim": ("llama", {"head_dim": 32}),
    "llama-theta-epsilon": (
        "llama",
        {"rms_norm_eps": 1e-2, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    ),
    "llama-one-layer": ("llama", {"num_hidden_layers": 1}),
    "mistral-head-dim": ("mistral", {"head_dim": 32}),
    "mistral-tied": ("mistral", {"tie_word_embeddings": True}),
    "mistral-within-window": ("mistral", {"sliding_window": 400}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-unused-window": ("qwen2", {"use_sliding_window": False, "sliding_window": 32}),
    "qwen3-bias": ("qwen3", {"attention_bias": True}),
    "qwen3-tied": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3-head-dim": ("qwen3", {"head_dim": 32}),
}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_configurations(tmp_path: Path, name: str) -> None:
    architecture, overrides = CONFIGURATIONS[name]
    checkpoint = write_tiny(architecture, tmp_path, **overrides)
    tokens = random_tokens(300)
    require_equal(engine_logits(checkpoint, tokens), Reference(transformers_model(checkpoint)).forward(tokens))


@pytest.mark.parametrize("block_size", [1, 8, 16, 40, 128])
def test_block_sizes(tmp_path: Path, block_size: int) -> None:
    checkpoint = write_tiny("llama", tmp_path)
    tokens = random_tokens(300)
    ours = engine_logits(checkpoint, tokens, block_size=block_size)
    require_equal(ours, Reference(transformers_model(checkpoint)).forward(tokens))


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "dynamic", "factor": 2.0},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "beta_fast": 16, "beta_slow": 2},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "attention_factor": 0.7},
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 128,
            "mscale": 1.0,
            "mscale_all_dim": 0.5,
        },
    ],
    ids=lambda rope: "-".join(str(value) for value in rope.values()),
)
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_rope_scaling(tmp_path: Path, architecture: Architecture, rope: dict[str, Any]) -> None:
    checkpoint = write_tiny(
        architecture, tmp_path, max_position_embeddings=512, rope_parameters={"rope_theta": 1000.0, **rope}
    )
    tokens = random_tokens(500)
    ours = engine_logits(checkpoint, tokens)
    require_equal(ours, Reference(transformers_model(checkpoint)).forward(tokens))
    if rope["rope_type"] != "dynamic":
        plain = write_tiny(
            architecture,
            tmp_path / "plain",
            max_position_embeddings=512,
            rope_parameters={"rope_theta": 1000.0, "rope_type": "default"},
        )
        assert (ours - engine_logits(plain, tokens)).abs().max().item() > 100 * TOLERANCE


def test_dynamic_rope_grows_beyond_the_trained_length(tmp_path: Path) -> None:
    checkpoint = write_tiny(
        "llama",
        tmp_path,
        max_position_embeddings=64,
        rope_parameters={"rope_theta": 1000.0, "rope_type": "dynamic", "factor": 4.0},
    )
    expected = Reference(transformers_model(checkpoint)).greedy(random_tokens(60), 140)
    tokens = expected.prompt + expected.tokens[:-1]
    require_equal(engine_logits(checkpoint, tokens)[59:], expected.logits)


@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "qwen3"])
def test_bfloat16_is_as_close_as_transformers_own_paths(tmp_path: Path, architecture: Architecture) -> None:
    checkpoint = write_tiny(architecture, tmp_path)
    tokens = random_tokens(400)
    exact = Reference(transformers_model(checkpoint)).forward(tokens)
    eager, sdpa = (
        Reference(transformers_model(checkpoint, dtype=torch.bfloat16, attn_implementation=implementation)).forward(
            tokens
        )
        for implementation in ("eager", "sdpa")
    )
    ours = engine_logits(checkpoint, tokens, dtype="bfloat16")

    def distance(first: torch.Tensor, second: torch.Tensor) -> float:
        return (first - second).square().mean().sqrt().item()

    # eager and sdpa round at different places, and so do we: what counts is that none is further from the truth.
    assert distance(ours, exact) <= 1.1 * max(distance(eager, exact), distance(sdpa, exact))
    agreeing = [(logits.argmax(-1) == exact.argmax(-1)).float().mean().item() for logits in (ours, eager, sdpa)]
    assert agreeing[0] >= min(agreeing[1:]) - 0.02
