from pathlib import Path

import pytest

from cluster.text.tokenizer import Tokenizer
from tests.cluster.tiny_tokenizer import write_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="session")
def tokenizer(checkpoint: Path) -> Tokenizer:
    return Tokenizer.from_directory(checkpoint)
