"""Settings of plain decoders that no family has: windows in some layers, a head size apart from the hidden size."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.model_harness import ModelHarness
from tests.tiny_checkpoints import VOCAB_SIZE
from tests.tiny_families import SLIDING_FULL, of_transformers

WINDOWS = {"use_sliding_window": True, "sliding_window": 8, "layer_types": SLIDING_FULL * 2}


@pytest.mark.parametrize(
    ("version", "settings"), [("Qwen3", WINDOWS | {"head_dim": 24}), ("Qwen2", WINDOWS), ("Qwen2", {"head_dim": 24})]
)
def test_settings_are_honoured(version: str, settings: dict[str, Any], tmp_path: Path) -> None:
    family = of_transformers(f"{version}Config", f"{version}ForCausalLM", num_hidden_layers=4, **settings)
    directory = family.write(tmp_path / "model")
    prompt = torch.randint(4, VOCAB_SIZE, (40,), generator=torch.Generator().manual_seed(7))
    with torch.inference_mode():
        expected = family.load(directory)(prompt[None], use_cache=False).logits[0]
    (logits,) = ModelHarness(directory).prompt_logits([prompt.tolist()], 7)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
