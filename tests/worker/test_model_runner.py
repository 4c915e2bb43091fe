"""What a model runner does with blocks as bytes: packs them for a transfer, unpacks them, copies and clears them."""

import gc
import pickle
import subprocess
import sys
import weakref
from collections.abc import Collection
from collections.abc import Sequence as ListOf
from pathlib import Path

import pytest
import torch

from kernels.pages import IntArray
from kv_transfer.layout import Lifetime, SlotRange
from kv_transfer.plan import lacking, lower_bound, plan_pieces, whole_section
from kv_transfer.rank_pair import ONLY_PAIR, RankPair, pair_layout, replica_lower_bound
from tests.model_harness import ModelHarness
from tests.tiny_checkpoints import VOCAB_SIZE
from tests.tiny_families import FAMILIES
from worker.config import EngineConfig, Role
from worker.kv_cache.block_pool import BlockId
from worker.kv_cache.group_blocks import BlockCopy
from worker.kv_cache.specs import LastState
from worker.model_runner import ModelRunner
from worker.models.outline import open_model
from worker.ranks.rank_group import DescribedRank
from worker.sequence import Sequence

PROMPT = torch.randint(4, VOCAB_SIZE, (77,), generator=torch.Generator().manual_seed(3)).tolist()


def prefill(harness: ModelHarness) -> Sequence:
    """The prompt without its last token, computed as a prefill replica does."""
    (sequence,) = harness.store([PROMPT[:-1]], chunk=30)
    return sequence


def arrays(sequence: Sequence) -> list[IntArray]:
    """Its block tables."""
    return [table.array() for table in sequence.tables]


def send(
    pair: RankPair, wanted: ListOf[SlotRange], source: tuple[ModelHarness, Sequence], to: tuple[ModelHarness, Sequence]
) -> int:
    """Everything that passes between two ranks, in pieces; returns its bytes."""
    layout = source[0].runner.layout
    assert to[0].runner.layout == layout
    passing = pair_layout(layout, pair)
    received = 0
    for index, slots in enumerate(passing.slots(wanted)):
        # Small pieces, so that owners and tokens are cut.
        for piece in plan_pieces(passing.layout, whole_section(passing.layout, index, slots), 3000):
            payload = source[0].runner.read_piece(passing, piece, arrays(source[1]))
            assert payload.nbytes == piece.payload_bytes(passing.layout)
            received += payload.nbytes
            # As a frame gives it: bytes that begin anywhere.
            shifted = memoryview(bytearray(b"x" + payload.tobytes()))[1:]
            to[0].runner.write_piece(passing, piece, arrays(to[1]), shifted)
    return received


def receive(harness: ModelHarness, sender: ModelHarness, sent: Sequence, without: Collection[int] = ()) -> torch.Tensor:
    """Logits of the last prompt token after everything that is needed for it, but for some sections, was received."""
    layout = harness.runner.layout
    assert layout == sender.runner.layout
    sequence = harness.sequence(PROMPT, len(PROMPT) + 1)
    ranges = lacking(layout, len(sequence.tokens), [0] * len(layout.sections))
    wanted = [SlotRange(r.end, r.end) if index in without else r for index, r in enumerate(ranges)]
    received = send(ONLY_PAIR, wanted, (sender, sent), (harness, sequence))
    assert received == lower_bound(layout, wanted)
    settle_states(harness, sequence)
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


def of_every_rank(checkpoint: Path, ranks: int, block_size: int) -> list[tuple[ModelHarness, Sequence]]:
    """Ranks that hold their parts of a model and compute nothing, with room for the prompt."""
    harnesses = [
        ModelHarness(checkpoint, block_size=block_size, ranks=DescribedRank(rank, ranks), memory=16 << 20)
        for rank in range(ranks)
    ]
    return [(harness, harness.sequence(PROMPT[:-1], len(PROMPT))) for harness in harnesses]


def settle_states(harness: ModelHarness, sequence: Sequence) -> None:
    """A state that was received is what is read next."""
    for group, table in zip(harness.runner.cache.groups, sequence.tables, strict=True):
        if isinstance(group.retention, LastState):
            table.blocks[0] = table.blocks[1]


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "hymba"])
def test_a_prompt_goes_through_replicas_of_any_number_of_ranks_unchanged(
    name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """From one rank to two, to four, and back to one: every rank gets its heads, and whoever has them sends them."""
    checkpoint = FAMILIES[name].write(tmp_path_factory.mktemp(name))
    first = ModelHarness(checkpoint, block_size=16)
    layout = first.runner.layout
    wanted = lacking(layout, len(PROMPT), [0] * len(layout.sections))
    senders = [(first, prefill(first))]
    expected = read_all(*senders[0], wanted)
    for ranks, block_size in ((2, 8), (4, 16), (1, 8)):
        receivers = of_every_rank(checkpoint, ranks, block_size)
        received = 0
        for sender, source in enumerate(senders):
            for receiver, to in enumerate(receivers):
                received += send(RankPair(sender, len(senders), receiver, ranks), wanted, source, to)
        assert received == replica_lower_bound(layout, wanted, ranks)
        for harness, sequence in receivers:
            settle_states(harness, sequence)
        senders = receivers
    assert read_all(*senders[0], wanted) == expected


def read_all(harness: ModelHarness, sequence: Sequence, wanted: ListOf[SlotRange]) -> list[bytes]:
    """What a replica of one rank holds of a prompt, section by section."""
    passing = pair_layout(harness.runner.layout, ONLY_PAIR)
    whole = [whole_section(passing.layout, index, slots) for index, slots in enumerate(wanted)]
    return [harness.runner.read_piece(passing, piece, arrays(sequence)).tobytes() for piece in whole]


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


def test_a_runner_that_nobody_has_any_more_leaves_no_memory_behind(tmp_path: Path) -> None:
    """Processes carry one replica after another; what is in a circle waits for the garbage collector."""
    directory = FAMILIES["qwen3_next"].write(tmp_path / "model")
    config = EngineConfig(str(directory), Role.PREFILL, dtype="float32", kv_cache_memory=1 << 22)
    gc.collect()
    gc.disable()
    try:
        runner = ModelRunner(config)
        model = weakref.ref(runner.model)
        del runner
        assert model() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("role", [Role.COLOCATED, Role.PREFILL])
@pytest.mark.parametrize("family", FAMILIES)
def test_warming_up_leaves_every_block_as_it_was(tmp_path: Path, family: str, role: Role) -> None:
    directory = FAMILIES[family].write(tmp_path / "model")
    config = EngineConfig(str(directory), role, dtype="float32", kv_cache_memory=1 << 22)
    runner = ModelRunner(config, fill=0xFF)
    runner.warm_up()
    assert all(bool((raw == 0xFF).all()) for raw in runner.buffers.values())


LOADS_WHAT_WAS_READ = """
import pickle
import sys
from worker.config import EngineConfig, Role
from worker.model_runner import ModelRunner

read = pickle.loads(bytes.fromhex(sys.argv[2]))
ModelRunner(EngineConfig(sys.argv[1], Role.DECODE, read_config=read, dtype="float32", kv_cache_memory=1 << 22))
print("transformers" in sys.modules)
"""


@pytest.mark.parametrize("family", ["mistral_sliding", "qwen3_next", "gemma3n"])
def test_a_configuration_that_was_read_is_not_read_again(tmp_path: Path, family: str) -> None:
    """transformers takes longer to import than a small model to load."""
    directory = FAMILIES[family].write(tmp_path / "model")
    read = open_model(directory, "float32")[1].read
    command = [sys.executable, "-c", LOADS_WHAT_WAS_READ, str(directory), pickle.dumps(read).hex()]
    loaded = subprocess.run(command, check=True, capture_output=True, text=True)
    assert loaded.stdout == "False\n"


LOADS = """
import sys
import time
import psutil
import torch
from worker.config import EngineConfig, Role
from worker.cores import Cores
from worker.model_runner import load_model_runner
from worker.ranks.rank_group import SOLO

torch.set_num_threads(2)
before = psutil.Process().num_threads()
config = EngineConfig(sys.argv[1], Role.COLOCATED, dtype="float32", kv_cache_memory=1 << 22)
load_model_runner(config, SOLO, Cores())
deadline = time.monotonic() + 10
while (more := psutil.Process().num_threads() - before) and time.monotonic() < deadline:
    time.sleep(0.02)
print(more)
"""


def test_threads_that_helped_to_load_are_gone(tmp_path: Path) -> None:
    """In a process of its own, in which nothing has been computed before."""
    directory = FAMILIES["gemma3"].write(tmp_path / "model")
    loaded = subprocess.run([sys.executable, "-c", LOADS, str(directory)], check=True, capture_output=True, text=True)
    assert int(loaded.stdout) == 0
