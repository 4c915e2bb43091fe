"""Which graph serves a step, what its tensors then hold, and, in Triton's interpreter, what it then computes."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.attention.paged import PagedAttention
from kernels.attention.paged_plan import PagedPlan
from kernels.table import has_only_compiled_kernels
from kernels.tuning import A100
from tests.kernels.test_triton import run
from tests.model_harness import ModelHarness
from tests.tiny_checkpoints import VOCAB_SIZE, Architecture, write_model, write_tiny
from tests.tiny_families import FAMILIES
from worker.captures import CudaCapture, Launch, NativeCapture
from worker.config import Role
from worker.decode_graphs import DecodeGraphs, GraphSize, KeptInputs, can_be_captured, padded
from worker.models import model as models
from worker.models.model import StepInputs
from worker.ranks.commands import SequenceRows
from worker.sequence import Sequence

CPU = torch.device("cpu")


def rows(contexts: list[int], tokens: int = 1, logit_rows: int = 1) -> list[SequenceRows]:
    """Sequences with blocks of 16 in descending order."""
    found = []
    for index, context in enumerate(contexts):
        blocks = np.arange(-(-context // 16), 0, -1) + 5 * index
        found.append(SequenceRows(np.full(tokens, 7 + index), context - tokens, logit_rows, (blocks,)))
    return found


class CudaRows:
    """Captures nothing, in the sizes of CUDA graphs."""

    def rows(self, rows: int) -> int | None:
        """As they are."""
        return CudaCapture.rows(rows)

    def context(self, longest: int) -> int:
        """As they are."""
        return CudaCapture.context(longest)

    def __call__(self, run: Launch) -> Launch:
        """What PyTorch says where something cannot be captured."""
        raise RuntimeError("operation not permitted when stream is capturing")


@given(st.lists(st.integers(1, 200_000), min_size=1, max_size=CudaCapture.MOST_ROWS))
def test_a_size_holds_its_step_and_little_more(contexts: list[int]) -> None:
    size = GraphSize.of([SequenceRows(np.zeros(1), context - 1, 1, ()) for context in contexts], CudaRows())
    assert size is not None
    assert len(contexts) <= size.rows < max(2 * len(contexts), len(contexts) + 8)
    assert max(contexts) <= size.context <= 4 * max(256, *contexts)
    full = [SequenceRows(np.zeros(1), size.context - 1, 1, ()) for _ in range(size.rows)]
    assert size.rows > CudaCapture.MOST_ROWS or GraphSize.of(full, CudaRows()) == size


@pytest.mark.parametrize(
    "scheduled",
    [[], rows([20], tokens=2), rows([20], logit_rows=0), rows([5, 20]) + rows([9], tokens=3), rows([5] * 257)],
    ids=["nothing", "a prompt", "nobody wants logits", "a prompt beside", "too many"],
)
def test_other_steps_have_no_graph(scheduled: list[SequenceRows]) -> None:
    assert GraphSize.of(scheduled, CudaRows()) is None
    assert GraphSize.of(scheduled, NativeCapture(4096)) is None


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> ModelHarness:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models, "attention_backend", lambda device, dtype: PagedAttention(A100))
        checkpoint = write_tiny("mistral", tmp_path_factory.mktemp("tiny"), num_hidden_layers=2)
        return ModelHarness(checkpoint, memory=4 << 20)


def plan_of(step: StepInputs) -> PagedPlan:
    """The only one."""
    (plan,) = {id(plan): plan for plan in step.rows.plans.values()}.values()
    assert isinstance(plan, PagedPlan)
    return plan


def test_a_graphs_tensors_hold_the_eager_plan_step_after_step(harness: ModelHarness) -> None:
    """Real rows are what they are without padding; the others see one token and store nothing."""
    inputs: KeptInputs | None = None
    size = GraphSize(8, 1024)
    for contexts in ([17, 300, 16, 1, 40], [1000], [33, 34, 35, 36, 37, 38, 39, 40]):
        scheduled = rows(contexts)
        real = len(scheduled)
        step = harness.runner._inputs(padded(scheduled, size, [16]), CPU)
        eager, plain = harness.runner._inputs(scheduled, CPU), plan_of(harness.runner._inputs(scheduled, CPU))
        inputs = inputs or KeptInputs(size, step, CPU)
        addresses = {tensor.data_ptr() for tensor in (inputs.step.token_ids, inputs.step.rows.positions)}
        inputs.load(step, real)
        assert addresses == {tensor.data_ptr() for tensor in (inputs.step.token_ids, inputs.step.rows.positions)}
        held = plan_of(inputs.step)
        assert held.decodes is not None
        assert plain.decodes is not None
        assert torch.equal(inputs.step.token_ids[:real], eager.token_ids)
        assert torch.equal(inputs.step.rows.positions[:real], eager.rows.positions)
        assert torch.equal(held.slots.blocks[:real], plain.slots.blocks)
        assert torch.equal(held.slots.offsets[:real], plain.slots.offsets)
        assert torch.equal(held.decodes.sequences[:real], plain.decodes.sequences)
        for index, context in enumerate(contexts):
            blocks = -(-context // 16)
            assert torch.equal(held.decodes.tables[index, :blocks], plain.decodes.tables[index, :blocks])
        assert held.slots.blocks[real:].eq(-1).all()
        assert held.decodes.sequences[:, 0].tolist() == list(range(8))
        assert held.decodes.sequences[real:, 1:].eq(1).all()
        assert held.decodes.tables[real:, 0].eq(int(plain.slots.blocks[0])).all()
        assert (held.decodes.longest_context, held.decodes.most_rows, held.chunks) == (1024, 1, None)


def test_what_cannot_be_captured_is_computed_without(harness: ModelHarness, caplog: pytest.LogCaptureFixture) -> None:
    graphs = DecodeGraphs(harness.runner.model, CPU, [16], CudaRows())
    scheduled = rows([20, 30])
    size = graphs.size_of(scheduled)
    assert size is not None
    step = harness.runner._inputs(graphs.pad(scheduled, size), CPU)
    with caplog.at_level(logging.WARNING):
        assert graphs.forward(step, size, 2) is None
    assert "operation not permitted" in caplog.text
    assert graphs.size_of(scheduled) is None


def test_only_plain_whole_models_are_captured(tmp_path: Path, harness: ModelHarness) -> None:
    assert can_be_captured(harness.runner.model)
    for name in ("qwen3_moe", "gemma3"):
        (tmp_path / name).mkdir()
        family = FAMILIES[name]
        other = ModelHarness(write_model(family.build(), tmp_path / name, spread=family.spread))
        assert not can_be_captured(other.runner.model), name
    headless = ModelHarness(write_tiny("llama", tmp_path / "llama"), role=Role.PREFILL)
    assert not can_be_captured(headless.runner.model)


def test_a_graphs_steps_are_the_eager_ones() -> None:
    interpreted = str(Path(__file__).with_name("interpreted"))
    arguments = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "python_files=check_*.py", interpreted)
    done = run(*arguments, interpret=True)
    assert done.returncode == 0, done.stdout + done.stderr


def next_logits(harness: ModelHarness, sequences: list[Sequence]) -> torch.Tensor:
    """One more token for each, whatever the model would say."""
    for sequence in sequences:
        sequence.tokens.append(5 + len(sequence.tokens) % 50)
    return torch.cat(harness.step([(sequence, 1) for sequence in sequences]))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        ("llama", {"tie_word_embeddings": True}),
        ("mistral", {"sliding_window": 20}),
        ("qwen2", {}),
        ("qwen3", {}),
    ],
)
def test_recorded_steps_are_the_eager_ones(
    tmp_path: Path, architecture: Architecture, settings: dict[str, Any], dtype: str
) -> None:
    """Bit for bit, while sequences come, grow over their blocks' ends, and go."""
    checkpoint = write_tiny(architecture, tmp_path, num_hidden_layers=3, **settings)
    eager, recorded = (
        ModelHarness(checkpoint, dtype=dtype, kv_sharing="every:2", memory=4 << 20, decode_graphs=graphs)
        for graphs in (False, True)
    )
    if not has_only_compiled_kernels(CPU, getattr(torch, dtype)):
        assert recorded.runner._graphs is None
        return
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(4, VOCAB_SIZE, (length,), generator=generator).tolist() for length in (3, 18, 30, 47)]
    both = [[harness.sequence(prompt, 80) for prompt in prompts] for harness in (eager, recorded)]
    for harness, sequences in zip((eager, recorded), both, strict=True):
        for sequence in sequences:
            harness.step([(sequence, len(sequence.tokens))])
    for step in range(24):
        live = [index for index in range(4) if index != step // 4]
        expected, found = (
            next_logits(harness, [sequences[index] for index in live])
            for harness, sequences in zip((eager, recorded), both, strict=True)
        )
        assert torch.equal(expected, found), step
    assert eager.runner._graphs is None
    assert recorded.runner._graphs is not None
    assert {size.rows for size in recorded.runner._graphs._graphs} == {3, 4}
    for mine, theirs in zip(recorded.runner.buffers.values(), eager.runner.buffers.values(), strict=True):
        assert torch.equal(mine, theirs)


def test_a_recording_serves_every_context(tmp_path: Path) -> None:
    """Up to the last token that there may be."""
    checkpoint = write_tiny("llama", tmp_path, num_hidden_layers=2, max_position_embeddings=1034)
    harnesses = [ModelHarness(checkpoint, memory=8 << 20, decode_graphs=graphs) for graphs in (False, True)]
    both = [harness.sequence([5 + index % 90 for index in range(1020)], 1034) for harness in harnesses]
    for harness, sequence in zip(harnesses, both, strict=True):
        harness.step([(sequence, 1020)])
    for _ in range(14):
        expected, found = (next_logits(*one) for one in zip(harnesses, ([sequence] for sequence in both), strict=True))
        assert torch.equal(expected, found)
    graphs = harnesses[1].runner._graphs
    assert graphs is not None
    assert [*graphs._graphs] == [GraphSize(1, 1034)]
