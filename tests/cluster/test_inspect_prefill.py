"""What ``crosskv inspect`` says of a prefill replica: by hand for SmolLM2, by PyTorch's counter for what models run."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from kernels import table
from tests.cluster.command_line import Run
from tests.cluster.smollm2_config import (
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    SMOLLM2,
    VOCABULARY,
    WIDTH,
)
from tests.model_harness import ModelHarness
from tests.tiny_checkpoints import VOCAB_SIZE
from tests.tiny_families import COMMON, DEEPSEEK, FAMILIES
from worker.config import Role

QUERY = OUTPUT = HIDDEN * HEADS * HEAD_DIM
KEYS_AND_VALUES = 2 * HIDDEN * KV_HEADS * HEAD_DIM
MLP = 3 * HIDDEN * WIDTH
EMBEDDING = VOCABULARY * HIDDEN
ATTENTION_TOKENS = 2000
ATTENTION = 4 * HEADS * HEAD_DIM * ATTENTION_TOKENS
"""FLOPs of one layer: every head's query times every key, and the weights times every value."""


def inspected(crosskv: Run, *arguments: str) -> dict[str, Any]:
    code, out, err = crosskv("inspect", *arguments, "--json")
    assert code == 0, err
    summary: dict[str, Any] = json.loads(out)
    return summary


@pytest.mark.parametrize(("rule", "last_owner"), [("model", 29), ("none", 29), ("every:2", 28), ("after:14", 14)])
def test_smollm2(crosskv: Run, tmp_path: Path, rule: str, last_owner: int) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SMOLLM2))
    summary = inspected(crosskv, str(tmp_path), "--kv-sharing", rule, "--request-tokens", str(ATTENTION_TOKENS))
    owns = {"every:2": lambda layer: layer % 2 == 0, "after:14": lambda layer: layer <= last_owner}.get(
        rule, lambda layer: True
    )
    matrices = [QUERY + OUTPUT + MLP + (KEYS_AND_VALUES if owns(layer) else 0) for layer in range(LAYERS)]
    norms = 2 * HIDDEN
    held = sum(matrices[:last_owner]) + KEYS_AND_VALUES

    assert summary["parameters"] == EMBEDDING + sum(matrices) + LAYERS * norms + HIDDEN
    assert summary["prefill_parameters"] == EMBEDDING + held + last_owner * norms + HIDDEN
    assert summary["weight_bytes"] == 2 * summary["parameters"]
    assert summary["prefill_weight_bytes"] == 2 * summary["prefill_parameters"]
    assert summary["flops_per_token"] == 2 * sum(matrices)
    assert summary["head_flops"] == 2 * EMBEDDING
    assert summary["prefill_flops_per_token"] == 2 * held
    # With the queries, which are one product with the keys and values.
    assert summary["colocated_flops_per_token"] == 2 * (held + QUERY)
    assert summary["attention_flops"] == LAYERS * ATTENTION
    assert summary["prefill_attention_flops"] == last_owner * ATTENTION
    assert summary["attention_tokens"] == ATTENTION_TOKENS
    assert summary["prefill_flops_share"] == pytest.approx(held / sum(matrices))
    assert summary["prefill_weight_share"] == pytest.approx(summary["prefill_parameters"] / summary["parameters"])


PROMPT = torch.randint(4, VOCAB_SIZE, (100,), generator=torch.Generator().manual_seed(0)).tolist()
CHUNK = 2 * len(PROMPT)
"""All at once."""

LINEAR = {torch.ops.aten.mm, torch.ops.aten.addmm}

LATENT_EXPANSION = (
    2
    * int(COMMON["num_attention_heads"])
    * (DEEPSEEK["qk_nope_head_dim"] + DEEPSEEK["v_head_dim"])
    * DEEPSEEK["kv_lora_rank"]
)
"""One layer's, of a token. It is a product per head, which cannot be told from attention's own."""


def linear_flops(path: Path, role: Role) -> float:
    """Of a token, as PyTorch counts while the model computes a prompt."""
    harness = ModelHarness(path, role=role)
    with FlopCounterMode(display=False) as counter:
        if role is Role.PREFILL:
            harness.store([PROMPT], CHUNK)
        else:
            harness.prompt_logits([PROMPT], CHUNK)
    total = sum(flops for operation, flops in counter.get_flop_counts()["Global"].items() if operation in LINEAR)
    return total / (len(harness.prefix) + len(PROMPT))


@pytest.mark.parametrize(
    ("family", "expanding_layers"),
    [("gemma3n", (0, 0)), ("qwen3_moe", (0, 0)), ("deepseek_v3", (4, 3)), ("hymba", (0, 0)), ("qwen3_next", (0, 0))],
)
def test_what_a_model_really_computes(
    crosskv: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, expanding_layers: tuple[int, int]
) -> None:
    # PyTorch counts its own products only.
    monkeypatch.setattr(table, "has_compiled_kernels", lambda device, dtype: False)
    FAMILIES[family].write(tmp_path)
    summary = inspected(crosskv, str(tmp_path), "--dtype", "float32", "--request-tokens", "20")
    whole, headless = (
        linear_flops(tmp_path, role) + layers * LATENT_EXPANSION
        for role, layers in zip((Role.COLOCATED, Role.PREFILL), expanding_layers, strict=True)
    )
    hidden = json.loads((tmp_path / "config.json").read_text())["hidden_size"]
    whole -= 2 * hidden * VOCAB_SIZE
    assert summary["flops_per_token"] == whole
    assert summary["prefill_flops_per_token"] == headless
    assert summary["prefill_flops_share"] == pytest.approx(headless / whole)
    assert summary["prefill_flops_per_token"] <= summary["colocated_flops_per_token"] <= summary["flops_per_token"]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_holds_what_its_headless_model_loads(crosskv: Run, tmp_path: Path, family: str) -> None:
    """With more tokens than an indexer chooses or a window reaches."""
    FAMILIES[family].write(tmp_path)
    summary = inspected(crosskv, str(tmp_path), "--dtype", "float32", "--request-tokens", "300")
    for role, bytes_held in ((Role.COLOCATED, "weight_bytes"), (Role.PREFILL, "prefill_weight_bytes")):
        slots = ModelHarness(tmp_path, role=role).runner.model.slots()
        assert summary[bytes_held] == sum(slot.destination.nbytes for slot in slots)
    assert 0 < summary["prefill_weight_bytes"] < summary["weight_bytes"]
    assert 0 < summary["prefill_flops_per_token"] < summary["flops_per_token"]
    assert 0 < summary["prefill_attention_flops"] <= summary["attention_flops"]


def test_for_people(crosskv: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    (tmp_path / "config.json").write_text(json.dumps(SMOLLM2))
    code, out, _ = crosskv(
        "inspect", str(tmp_path), "--kv-sharing", "after:14", "--request-tokens", str(ATTENTION_TOKENS)
    )
    assert code == 0
    rows = [" ".join(line.split()) for line in out.splitlines()]
    assert "FLOPs per prompt token, linear 99,532,800 205,701,120 48.4%" in rows
    assert "… of a colocated engine 100,196,352 205,701,120 48.7%" in rows
    assert "… attention to 2,000 tokens 64,512,000 138,240,000 46.7%" in rows
    assert max(map(len, out.splitlines())) <= 80
