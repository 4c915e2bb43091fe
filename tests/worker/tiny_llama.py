"""A tiny Llama, how replicas are configured for it, and what transformers says of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.engine_client import Answer
from tests.peers.agreement import require_agreement, require_logprobs
from tests.peers.reference import Reference
from tests.tiny_checkpoints import VOCAB_SIZE
from worker.config import EngineConfig, Role

LAYERS = 4
BYTES_PER_TOKEN = LAYERS * 2 * 2 * 16 * 4
"""Keys and values of 2 heads of 16 float32 in each layer."""
BLOCK_TOKENS = 16
BLOCK_BYTES = BLOCK_TOKENS * BYTES_PER_TOKEN


@dataclass(frozen=True, slots=True)
class TinyLlama:
    """Made once per session."""

    checkpoint: Path
    reference: Reference

    def config(self, *, blocks: int = 1000, **settings: Any) -> EngineConfig:
        """Float32, with memory for so many blocks."""
        defaults = {"dtype": "float32", "kv_cache_memory": blocks * BLOCK_BYTES, "max_batched_tokens": 90}
        return EngineConfig(str(self.checkpoint), Role.COLOCATED, **defaults | settings)

    def require_greedy(self, prompt: Sequence[int], answer: Answer) -> None:
        """Raise unless every choice, which has logprobs, is what greedy decoding gives."""
        for choice in answer.choices:
            require_agreement(choice, self.reference.follow(prompt, choice.tokens))

    def require_own_logprobs(self, prompt: Sequence[int], answer: Answer) -> None:
        """Raise unless the logprobs of every choice are those of its own tokens, however they were chosen."""
        for choice in answer.choices:
            require_logprobs(choice, self.reference.follow(prompt, choice.tokens).logits)


def random_prompt(length: int, seed: int = 0) -> list[int]:
    """Token ids without the special ones."""
    generator = torch.Generator().manual_seed(1000 * length + seed)
    return torch.randint(4, VOCAB_SIZE, (length,), generator=generator).tolist()
