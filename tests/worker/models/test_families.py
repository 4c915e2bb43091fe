"""Every family in this process against its reference, in float32: logits of every prompt token, and greedy tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from tests.model_harness import ModelHarness
from tests.tiny_checkpoints import VOCAB_SIZE
from tests.tiny_families import FAMILIES
from worker.config import Role

TOLERANCE = 1e-4
PROMPT_LENGTHS = (1, 15, 16, 17, 200)
"""About a block of 16, and longer than every window and chunk."""


@dataclass(frozen=True)
class Case:
    """What the reference says of a text is computed once."""

    directory: Path
    reference: PreTrainedModel
    prompts: list[list[int]]
    known: dict[tuple[int, ...], torch.Tensor] = field(default_factory=dict)

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        if (*tokens,) not in self.known:
            self.known[*tokens,] = self.reference(torch.tensor([tokens]), use_cache=False).logits[0].float()
        return self.known[*tokens,]


@pytest.fixture(scope="module", params=FAMILIES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    torch.set_num_threads(1)
    family = FAMILIES[request.param]
    directory = family.write(tmp_path_factory.mktemp(request.param))
    generator = torch.Generator().manual_seed(7)
    prompts = [torch.randint(4, VOCAB_SIZE, (n,), generator=generator).tolist() for n in PROMPT_LENGTHS]
    return Case(directory, family.load(directory), prompts)


@pytest.mark.parametrize(("chunk", "block_size"), [(7, 16), (64, 16), (256, 32)])
def test_logits_of_every_token(case: Case, chunk: int, block_size: int) -> None:
    harness = ModelHarness(case.directory, block_size=block_size)
    for prompt, logits in zip(case.prompts, harness.prompt_logits(case.prompts, chunk), strict=True):
        error = (logits - case.logits(prompt)).abs().max().item()
        assert error <= TOLERANCE, f"a prompt of {len(prompt)} in chunks of {chunk} is off by {error:.2e}"


def test_greedy_tokens(case: Case) -> None:
    """48 tokens after every prompt, batched; each is the reference's best, or within 1e-4 of it."""
    harness = ModelHarness(case.directory)
    for prompt, tokens in zip(case.prompts, harness.greedy(case.prompts, 48, 64), strict=True):
        logits = case.logits([*prompt, *tokens[:-1]])[len(prompt) - 1 :]
        behind = logits.max(dim=-1).values - logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert behind.max().item() <= TOLERANCE, f"after a prompt of {len(prompt)}: {behind.max().item():.2e} behind"


def test_rows_come_in_any_order_and_number(case: Case) -> None:
    """Sequences with one row before, between and after others with several; logits of their last rows only."""
    harness = ModelHarness(case.directory)
    prompts = [case.prompts[-1][:24], case.prompts[3], case.prompts[2]]
    expected = [case.logits(prompt) for prompt in prompts]
    sequences = [harness.sequence(prompt, len(prompt)) for prompt in prompts]
    for sequence in sequences:
        harness.step([(sequence, len(harness.prefix) + 1)])
    for counts in [(5, 1, 3), (1, 4, 1), (1, 1, 2), (6, 1, 1), (9, 5, 5)]:
        logits = harness.step(list(zip(sequences, counts, strict=True)), all_logits=False)
        for sequence, row, truth in zip(sequences, logits, expected, strict=True):
            error = (row[0] - truth[sequence.computed - len(harness.prefix) - 1]).abs().max().item()
            assert error <= TOLERANCE, f"rows {counts}: off by {error:.2e}"


def test_forks_go_their_own_ways(case: Case) -> None:
    """What a fork reads is a copy: neither it nor the original sees what the other computes."""
    harness = ModelHarness(case.directory)
    prompt, other = case.prompts[3], [*case.prompts[3][:9], *case.prompts[2][:8]]
    original = harness.sequence(prompt, len(prompt))
    harness.step([(original, len(harness.prefix) + 9)])
    fork = harness.fork(original, other[9:])
    for _ in range(8):
        logits = harness.step([(original, 1), (fork, 1)])
    for tokens, row in ((prompt, logits[0]), (other, logits[1])):
        error = (row[0] - case.logits(tokens)[-1]).abs().max().item()
        assert error <= TOLERANCE, f"off by {error:.2e}"


def test_a_headless_model_stores_the_same(case: Case) -> None:
    """What a prefill replica leaves in its memory is what a whole model leaves there, byte for byte or nearly so."""
    whole, headless = (ModelHarness(case.directory, role=role) for role in (Role.COLOCATED, Role.PREFILL))
    weights = [sum(slot.destination.numel() for slot in h.runner.model.slots()) for h in (headless, whole)]
    assert weights[0] < weights[1], "a headless model holds fewer weights"
    for expected, stored in zip(whole.stored(case.prompts, 64), headless.stored(case.prompts, 64), strict=True):
        torch.testing.assert_close(stored, expected, atol=1e-5, rtol=1e-5)
