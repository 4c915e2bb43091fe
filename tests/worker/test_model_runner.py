"""What a model runner does with blocks as bytes: packs them for a transfer, unpacks them, copies and clears them."""

from collections.abc import Collection

import pytest
import torch

from kv_transfer.layout import Lifetime
from kv_transfer.plan import lacking, lower_bound, plan_pieces
from tests.model_harness import ModelHarness
from tests.tiny_checkpoints import VOCAB_SIZE
from tests.tiny_families import FAMILIES
from worker.config import Role
from worker.kv_cache.block_pool import BlockId
from worker.kv_cache.group_blocks import BlockCopy
from worker.kv_cache.specs import LastState
from worker.scheduler import ScheduledRows
from worker.sequence import Sequence

PROMPT = torch.randint(4, VOCAB_SIZE, (77,), generator=torch.Generator().manual_seed(3)).tolist()


@torch.inference_mode()
def prefill(harness: ModelHarness) -> Sequence:
    """The prompt without its last token, computed as a prefill replica does."""
    sequence = harness.sequence(PROMPT[:-1], len(PROMPT))
    while sequence.pending:
        rows = min(30, sequence.pending)
        assert harness.runner.execute([ScheduledRows(sequence, sequence.computed, rows, 0)]) is None
        sequence.computed += rows
        harness._strike(sequence)
    return sequence


def receive(harness: ModelHarness, sender: ModelHarness, sent: Sequence, without: Collection[int] = ()) -> torch.Tensor:
    """Logits of the last prompt token after everything that is needed for it, but for some sections, was received."""
    layout = harness.runner.layout
    assert layout == sender.runner.layout
    sequence = harness.sequence(PROMPT, len(PROMPT) + 1)
    ranges = lacking(layout, len(sequence.tokens), [0] * len(layout.sections))
    received = 0
    for index, slots in enumerate(ranges):
        # Small pieces, so that owners and tokens are cut.
        for piece in plan_pieces(layout, index, slots, 3000) if index not in without else ():
            payload = sender.runner.read_piece(piece, [table.array() for table in sent.tables])
            assert payload.nbytes == piece.payload_bytes(layout)
            received += payload.nbytes
            # As a frame gives it: bytes that begin anywhere.
            shifted = memoryview(bytearray(b"x" + payload.tobytes()))[1:]
            harness.runner.write_piece(piece, [table.array() for table in sequence.tables], shifted)
    assert without or received == lower_bound(layout, ranges)
    for group, table in zip(harness.runner.cache.groups, sequence.tables, strict=True):
        if isinstance(group.retention, LastState):
            table.blocks[0] = table.blocks[1]
    sequence.computed = len(sequence.tokens) - 1
    (logits,) = harness.step([(sequence, 1)])
    return logits[0]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_prompt_goes_from_one_memory_to_another_with_blocks_of_another_size(
    name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    checkpoint = FAMILIES[name].write(tmp_path_factory.mktemp(name))
    sender = ModelHarness(checkpoint, block_size=16, role=Role.PREFILL)
    receiver = ModelHarness(checkpoint, block_size=8)
    (expected,) = receiver.prompt_logits([PROMPT], chunk=30)
    sent = prefill(sender)
    error = (receive(receiver, sender, sent) - expected[-1]).abs().max().item()
    assert error <= 1e-4, f"{error:.2e}"
    # Whatever is not sent is missed: free memory holds large numbers.
    for section in range(len(receiver.runner.layout.sections)):
        lacks = receive(receiver, sender, sent, without={section})
        assert not torch.allclose(lacks, expected[-1], atol=1e-2), f"section {section} is not needed"


def test_sections_of_a_hybrid_model(tmp_path_factory: pytest.TempPathFactory) -> None:
    harness = ModelHarness(FAMILIES["qwen3_next"].write(tmp_path_factory.mktemp("hybrid")))
    sections = harness.runner.layout.sections
    assert {section.lifetime for section in sections} == {Lifetime.EVERY_TOKEN, Lifetime.STATE}
    for index, section in enumerate(sections):
        group = harness.runner.cache.groups[harness.runner.group_of_section(index)]
        assert isinstance(group.retention, LastState) == (section.lifetime is Lifetime.STATE)


def test_whole_blocks_are_copied_and_cleared_whoever_uses_them(tmp_path_factory: pytest.TempPathFactory) -> None:
    harness = ModelHarness(FAMILIES["qwen3_next"].write(tmp_path_factory.mktemp("hybrid")), memory=4 << 20)
    runner = harness.runner
    pages = [raw.view(runner.num_blocks, -1) for raw in runner.buffers.values()]
    for index, page in enumerate(pages):
        assert page.shape[1] == list(runner.buffers)[index].page_bytes
        page.copy_(torch.randint(1, 255, page.shape, dtype=torch.uint8))
    expected = [page.clone() for page in pages]

    # One block may be copied to several at once.
    runner.copy_blocks([BlockCopy(BlockId(1), BlockId(3)), BlockCopy(BlockId(1), BlockId(0))])
    runner.clear_blocks([BlockId(2)])
    runner.clear_blocks([])
    runner.copy_blocks([])

    for page, before in zip(pages, expected, strict=True):
        before[3] = before[0] = before[1]
        before[2] = 0
        assert torch.equal(page, before)
