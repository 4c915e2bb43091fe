"""Tiny models of every family against transformers: tokens, logits, and the bytes that moved."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.conftest import EVERY_PAIR, EngineProcesses
from tests.engine_client import EngineClient
from tests.peers.agreement import require_agreement
from tests.peers.reference import Generation, Reference
from tests.replicas import colocated, disaggregated
from tests.tiny_checkpoints import VOCAB_SIZE, Architecture, write_tiny
from worker.config import EngineConfig, Role

ARCHITECTURES: tuple[Architecture, ...] = ("llama", "mistral", "qwen2", "qwen3")
PROMPT_LENGTHS = (5, 16, 17, 64, 200, 511, 900, 1500)
TOKENS = 64
LAYERS = 6
BYTES_PER_TOKEN_AND_LAYER = 2 * 2 * 16 * 4
"""Keys and values of 2 heads of 16 float32."""

LAYER_NAME = "model.layers.{}.self_attn.attn"
SHARING: Mapping[str, Mapping[int, int]] = {
    "none": {},
    "every:2": {1: 0, 3: 2, 5: 4},
    "after:2": {3: 2, 4: 2, 5: 2},
    "map.json": {2: 0, 3: 1, 5: 0},
}
"""What each form of --kv-sharing means for six layers."""

CASES = [
    (architecture, sharing)
    for index, architecture in enumerate(ARCHITECTURES)
    for number, sharing in enumerate(SHARING)
    # Of one architecture all, of the others none and one each: which layers share is no business of an architecture.
    if EVERY_PAIR or architecture == "qwen3" or number in (0, index + 1)
]


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(4, VOCAB_SIZE, (length,), generator=generator).tolist() for length in PROMPT_LENGTHS]


@dataclass
class Zoo:
    """Tiny checkpoints and what transformers says of them, made when they are first asked for."""

    directory: Path
    followed: dict[tuple[object, ...], Generation] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.checkpoint = cache(self._checkpoint)
        self.model = cache(self._model)

    def _checkpoint(self, architecture: Architecture) -> Path:
        return write_tiny(architecture, self.directory / architecture, num_hidden_layers=LAYERS)

    def _model(self, architecture: Architecture) -> PreTrainedModel:
        return AutoModelForCausalLM.from_pretrained(self.checkpoint(architecture), dtype=torch.float32)

    def follow(self, architecture: Architecture, sharing: str, prompt: list[int], tokens: list[int]) -> Generation:
        """See ``Reference.follow``; of a text it is computed once."""
        key = (architecture, sharing, *prompt, *tokens)
        if key not in self.followed:
            reference = Reference(self.model(architecture), SHARING[sharing])
            self.followed[key] = reference.follow(prompt, tokens)
        return self.followed[key]

    def sharing_argument(self, sharing: str) -> str:
        if not sharing.endswith(".json"):
            return sharing
        path = self.directory / sharing
        names = {LAYER_NAME.format(layer): LAYER_NAME.format(target) for layer, target in SHARING[sharing].items()}
        path.write_text(json.dumps(names))
        return str(path)

    def config(self, architecture: Architecture, sharing: str) -> EngineConfig:
        """Chunks of a step are smaller than most prompts, pieces smaller than a chunk of one layer."""
        return EngineConfig(
            model=str(self.checkpoint(architecture)),
            role=Role.COLOCATED,
            dtype="float32",
            kv_sharing=self.sharing_argument(sharing),
            kv_cache_memory=16 << 20,
            max_batched_tokens=90,
            max_piece_bytes=20_000,
        )


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    torch.set_num_threads(1)
    return Zoo(tmp_path_factory.mktemp("zoo"))


def require_equal_answers(client: EngineClient, zoo: Zoo, architecture: Architecture, sharing: str) -> list[int]:
    """Ask for all prompts at once; returns each one's payload bytes."""
    pending = [(prompt, client.submit(prompt, max_tokens=TOKENS, logprobs=4)) for prompt in prompts()]
    payloads = []
    for prompt, answer in [(prompt, p.result()) for prompt, p in pending]:
        assert len(answer.tokens) == TOKENS
        require_agreement(answer.choices[0], zoo.follow(architecture, sharing, prompt, answer.tokens))
        transfer = answer.prompt_info.transfer
        assert transfer.payload_bytes == transfer.lower_bound_bytes
        assert transfer.retransmitted_bytes == 0
        assert answer.prompt_info.cached_tokens == 0
        payloads.append(transfer.payload_bytes)
    return payloads


def payload_of(prompt_tokens: int, sharing: str) -> int:
    """The last prompt token is computed where it is needed; everything before it, of every owner, must move."""
    return (prompt_tokens - 1) * (LAYERS - len(SHARING[sharing])) * BYTES_PER_TOKEN_AND_LAYER


@pytest.mark.parametrize(("architecture", "sharing"), CASES)
def test_colocated(zoo: Zoo, engine_processes: EngineProcesses, architecture: Architecture, sharing: str) -> None:
    with colocated(engine_processes.first, zoo.config(architecture, sharing)) as client:
        assert require_equal_answers(client, zoo, architecture, sharing) == [0] * len(PROMPT_LENGTHS)


@pytest.mark.parametrize(("architecture", "sharing"), CASES)
def test_disaggregated(zoo: Zoo, engine_processes: EngineProcesses, architecture: Architecture, sharing: str) -> None:
    prefill, decode = engine_processes.first, engine_processes.second
    expected = [payload_of(length, sharing) for length in PROMPT_LENGTHS]
    assert min(expected) > 0
    with disaggregated(prefill, decode, zoo.config(architecture, sharing)) as pair:
        assert require_equal_answers(pair.decode, zoo, architecture, sharing) == expected
        received, sent = pair.decode.settled().counters, pair.prefill.settled().counters
        assert received.payload_bytes == sent.payload_bytes == received.lower_bound_bytes == sum(expected)
        assert received.transfers == len(PROMPT_LENGTHS)
        assert received.local_prefills == received.transfers_failed == received.stale_pieces == 0
        assert received.unshared_bytes == sum(payload_of(length, "none") for length in PROMPT_LENGTHS)


@pytest.mark.parametrize(("prefill_block", "decode_block"), [(16, 32), (64, 16), (8, 24)])
def test_block_sizes_may_differ(
    zoo: Zoo, engine_processes: EngineProcesses, prefill_block: int, decode_block: int
) -> None:
    config = replace(zoo.config("qwen3", "every:2"), block_size=decode_block)
    with disaggregated(engine_processes.first, engine_processes.second, config, block_size=prefill_block) as pair:
        payloads = require_equal_answers(pair.decode, zoo, "qwen3", "every:2")
        assert payloads == [payload_of(length, "every:2") for length in PROMPT_LENGTHS]
        assert (pair.prefill.status().block_size, pair.decode.status().block_size) == (prefill_block, decode_block)
