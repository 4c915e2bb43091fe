"""A tiny random model that speaks with SmolLM2's tokenizer."""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from cluster.model_store import resolve_model
from cluster.text.tokenizer import Tokenizer
from tests.tiny_checkpoints import write_tiny
from worker.config import EngineConfig, Role

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


@dataclass(frozen=True, slots=True)
class Babbler:
    """Says anything, unless a grammar holds it."""

    checkpoint: Path
    tokenizer: Tokenizer

    def config(self, **settings: Any) -> EngineConfig:
        defaults = {"dtype": "float32", "kv_cache_memory": 64 << 20, "max_batched_tokens": 256}
        return EngineConfig(str(self.checkpoint), Role.COLOCATED, **defaults | settings)

    def prompt(self, text: str = "Describe it:") -> list[int]:
        return self.tokenizer.encode(text)

    def text(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens)

    @property
    def brief(self) -> dict[int, float]:
        """A ``logit_bias`` that makes texts end: of tens of thousands of tokens, a few close what was opened."""
        closing = ['"', "}", "]", ",", '":', '",', '"}', "}}", "]}"]
        ids = [self.tokenizer.encode(text, add_special_tokens=False) for text in closing]
        return {tokens[0]: 9.0 for tokens in ids if len(tokens) == 1}


@pytest.fixture(scope="session")
def babbler(tmp_path_factory: pytest.TempPathFactory) -> Babbler:
    torch.set_num_threads(1)
    files = resolve_model("smollm2").tokenizer
    tokenizer = Tokenizer.from_directory(files)
    checkpoint = write_tiny(
        "llama", tmp_path_factory.mktemp("babbler"), num_hidden_layers=2, vocab_size=tokenizer.vocab_size
    )
    for name in TOKENIZER_FILES:
        shutil.copy(files / name, checkpoint / name)
    return Babbler(checkpoint, tokenizer)
