"""What tests of whole replicas use: a model, and a process that they may kill."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.engine_process import EngineProcess
from tests.peers.reference import Reference
from tests.tiny_checkpoints import write_tiny
from tests.worker.tiny_llama import LAYERS, TinyLlama


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> TinyLlama:
    torch.set_num_threads(1)
    checkpoint = write_tiny("llama", tmp_path_factory.mktemp("tiny-llama"), num_hidden_layers=LAYERS)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    return TinyLlama(checkpoint, Reference(model))


@pytest.fixture
def doomed(tmp_path: Path) -> Iterator[EngineProcess]:
    """A process that the test may kill; pytest shows what it wrote if the test fails."""
    with EngineProcess(tmp_path / "doomed.log") as process:
        yield process
        print(process.new_output())
