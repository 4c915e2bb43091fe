"""Token embedding and the head that turns hidden states into logits."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from worker.layers.weights import Slot, WeightFormat


class Embedding:
    """``weight`` ``[vocab, hidden]``."""

    def __init__(self, vocab_size: int, hidden_size: int, weight_format: WeightFormat) -> None:
        self.weight = weight_format.empty(vocab_size, hidden_size)

    def slots(self, name: str) -> Iterator[Slot]:
        """Where ``{name}.weight`` goes."""
        yield Slot(f"{name}.weight", self.weight)

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Int64 ``[rows]`` to ``[rows, hidden]``."""
        return F.embedding(token_ids, self.weight)


class LogitsHead:
    """Logits of some rows; with ``tied`` it uses the embedding's weight and has none of its own."""

    def __init__(self, embedding: Embedding, weight_format: WeightFormat, *, tied: bool) -> None:
        self._tied = tied
        self.weight = embedding.weight if tied else weight_format.empty(*embedding.weight.shape)

    def slots(self, name: str) -> Iterator[Slot]:
        """Where ``{name}.weight`` goes, unless it is tied."""
        if not self._tied:
            yield Slot(f"{name}.weight", self.weight)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[rows, hidden]`` to float32 ``[rows, vocab]``."""
        return F.linear(hidden, self.weight).float()
