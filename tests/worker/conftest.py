"""The model that tests of whole replicas use."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.peers.reference import Reference
from tests.tiny_checkpoints import write_tiny
from tests.worker.tiny_llama import LAYERS, TinyLlama


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> TinyLlama:
    torch.set_num_threads(1)
    checkpoint = write_tiny("llama", tmp_path_factory.mktemp("tiny-llama"), num_hidden_layers=LAYERS)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    return TinyLlama(checkpoint, Reference(model))
