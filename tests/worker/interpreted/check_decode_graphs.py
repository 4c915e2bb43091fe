"""Decode steps from a graph's tensors, in Triton's interpreter: what is captured runs again in place of a launch."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from kernels.attention.paged import PagedAttention
from kernels.tuning import Gpu
from tests.model_harness import ModelHarness
from tests.tiny_checkpoints import VOCAB_SIZE, write_tiny
from worker.captures import CudaCapture, Launch
from worker.decode_graphs import DecodeGraphs, GraphSize, can_be_captured
from worker.models import model as models

CPU = torch.device("cpu")
FEW_SPLITS = Gpu(80, 8)


@dataclass
class Again:
    """Captures by computing the step again."""

    captured: list[Launch]

    def rows(self, rows: int) -> int | None:
        """As CUDA graphs have them."""
        return CudaCapture.rows(rows)

    def context(self, longest: int) -> int:
        """As they are."""
        return CudaCapture.context(longest)

    def __call__(self, run: Launch) -> Launch:
        """The same."""
        self.captured.append(run)
        return run


def test_a_graphs_steps_are_the_eager_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "attention_backend", lambda device, dtype: PagedAttention(FEW_SPLITS))
    checkpoint = write_tiny("mistral", tmp_path, num_hidden_layers=1, sliding_window=20)
    capture = Again([])

    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(4, VOCAB_SIZE, (length,), generator=generator).tolist() for length in (3, 18, 30)]
    eager, graphed = (ModelHarness(checkpoint, block_size=16, memory=1 << 20, decode_graphs=False) for _ in range(2))
    assert can_be_captured(graphed.runner.model)
    sizes = [group.block_size for group in graphed.runner.cache.groups]
    graphed.runner._graphs = DecodeGraphs(graphed.runner.model, CPU, sizes, capture)
    with torch.inference_mode():
        expected = eager.greedy(prompts, 3, chunk=40)
        assert graphed.greedy(prompts, 3, chunk=40) == expected
    # One size served every step behind the prompts, and its fourth row left nothing in anybody's pages.
    assert len(capture.captured) == 1
    assert [*graphed.runner._graphs._graphs] == [GraphSize(4, 1024)]
    for mine, theirs in zip(graphed.runner.buffers.values(), eager.runner.buffers.values(), strict=True):
        assert torch.equal(mine, theirs)
