"""A model runner without a model: logits are a function of the tokens before them, pages remember nothing."""

import hashlib
from collections.abc import Sequence as Sequences

import torch

from kernels.pages import IntArray
from kv_transfer.layout import CacheLayout, OwnerLayer, Piece
from worker.kv_cache.manager import BlockCopy
from worker.scheduler import ScheduledRows

VOCAB_SIZE = 32
LAYOUT = CacheLayout("model", "float32", (OwnerLayer("a", 1, 4), OwnerLayer("b", 1, 8)), "digest", 1)


def logits_after(tokens: Sequences[int]) -> torch.Tensor:
    """What the scripted model thinks of the token after ``tokens``, float32 ``[vocab]``."""
    seed = int.from_bytes(hashlib.sha256(repr(list(tokens)).encode()).digest()[:8], "little") >> 1
    return torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 3


class ScriptedRunner:
    """Stands for a ``ModelRunner``. The steps of which ``broken`` says so fail."""

    layout = LAYOUT
    unshared_bytes_per_token = 16
    eos_token_ids = frozenset[int]()
    vocab_size = VOCAB_SIZE

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.max_model_len = num_blocks * block_size
        self.model = self
        self.broken = False

    def execute(self, scheduled: Sequences[ScheduledRows]) -> torch.Tensor | None:
        if self.broken:
            raise RuntimeError("out of memory")
        rows = [
            logits_after(s.sequence.tokens[: index + 1])
            for s in scheduled
            for index in range(s.first + s.rows - s.logit_rows, s.first + s.rows)
        ]
        return torch.stack(rows) if rows else None

    def copy_blocks(self, copies: Sequences[BlockCopy]) -> None:
        pass

    def read_piece(self, piece: Piece, blocks: IntArray) -> memoryview:
        del blocks
        return memoryview(bytes(piece.payload_bytes(LAYOUT)))
