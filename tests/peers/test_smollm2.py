"""SmolLM2-135M-Instruct, a trained model, in float32 against transformers: tokens, logits, and the bytes that moved."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, PreTrainedModel

from cluster.model_store import ModelFiles, resolve_model
from tests.conftest import EngineProcesses
from tests.engine_process import EngineClient, colocated, disaggregated
from tests.peers.agreement import TOLERANCE, require_agreement
from tests.peers.reference import Generation, Reference
from worker.config import EngineConfig, Role

pytestmark = pytest.mark.timeout(900)

PROMPT_LENGTHS = (5, 9, 33, 64, 150, 300, 500, 1500)
TOKENS = 64
LAYERS = 30
BYTES_PER_TOKEN_AND_LAYER = 2 * 3 * 64 * 4
"""Keys and values of 3 heads of 64 float32."""

SHARING: Mapping[str, Mapping[int, int]] = {
    "none": {},
    "every:2": {layer: layer - 1 for layer in range(1, LAYERS, 2)},
    "after:17": dict.fromkeys(range(18, LAYERS), 17),
}

SHARING_TOLERANCE = 3e-3
"""With a sharing that it was not trained for, the model amplifies rounding: transformers' own eager and sdpa paths then
differ by up to 1.2e-3 in float32, and either by as much from float64. Without sharing they differ by less than 1e-4."""

TEXT = Path(__file__).resolve().parents[2] / "LICENSE"


@dataclass(frozen=True)
class SmolLM2:
    """The checkpoint, prompts, and transformers' model; what it says of a text is computed once."""

    files: ModelFiles
    model: PreTrainedModel
    prompts: list[list[int]]
    followed: dict[tuple[object, ...], Generation] = field(default_factory=dict)

    def follow(self, sharing: str, prompt: list[int], tokens: list[int]) -> Generation:
        """See ``Reference.follow``."""
        key = (sharing, *prompt, *tokens)
        if key not in self.followed:
            self.followed[key] = Reference(self.model, SHARING[sharing]).follow(prompt, tokens)
        return self.followed[key]

    def config(self, sharing: str) -> EngineConfig:
        return EngineConfig(
            model=str(self.files.weights),
            role=Role.COLOCATED,
            dtype="float32",
            kv_sharing=sharing,
            kv_cache_memory=512 << 20,
            max_batched_tokens=512,
        )


@pytest.fixture(scope="session")
def smollm2() -> SmolLM2:
    torch.set_num_threads(1)
    files = resolve_model("smollm2")
    text = Tokenizer.from_file(str(files.tokenizer / "tokenizer.json")).encode(TEXT.read_text()).ids
    prompts = [text[17 * index : 17 * index + length] for index, length in enumerate(PROMPT_LENGTHS)]
    model = AutoModelForCausalLM.from_pretrained(
        files.weights.parent, gguf_file=files.weights.name, dtype=torch.float32
    ).eval()
    return SmolLM2(files, model, prompts)


def require_equal_answers(client: EngineClient, smollm2: SmolLM2, sharing: str) -> list[int]:
    """Ask for all prompts at once; returns each one's payload bytes."""
    pending = [client.submit(prompt, max_tokens=TOKENS, logprobs=20) for prompt in smollm2.prompts]
    tolerance = SHARING_TOLERANCE if SHARING[sharing] else TOLERANCE
    payloads = []
    for answer, prompt in zip([p.result(300.0) for p in pending], smollm2.prompts, strict=True):
        assert answer.prompt_info.cached_tokens == 0
        require_agreement(answer.choices[0], smollm2.follow(sharing, prompt, answer.tokens), tolerance)
        payloads.append(answer.prompt_info.transfer.payload_bytes)
    return payloads


@pytest.mark.parametrize("sharing", SHARING)
def test_colocated(smollm2: SmolLM2, engine_processes: EngineProcesses, sharing: str) -> None:
    with colocated(engine_processes.first, smollm2.config(sharing)) as client:
        assert require_equal_answers(client, smollm2, sharing) == [0] * len(PROMPT_LENGTHS)


@pytest.mark.parametrize("sharing", SHARING)
def test_disaggregated(smollm2: SmolLM2, engine_processes: EngineProcesses, sharing: str) -> None:
    owners = LAYERS - len(SHARING[sharing])
    with disaggregated(engine_processes.first, engine_processes.second, smollm2.config(sharing)) as pair:
        payloads = require_equal_answers(pair.decode, smollm2, sharing)
        assert payloads == [(length - 1) * owners * BYTES_PER_TOKEN_AND_LAYER for length in PROMPT_LENGTHS]
        assert pair.prefill.settled().counters.payload_bytes == sum(payloads)
