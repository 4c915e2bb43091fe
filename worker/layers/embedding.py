"""Token embedding and the head that turns hidden states into logits."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from worker.layers.weights import Slot, WeightFormat


class Embedding:
    """``weight`` ``[vocab, hidden]``; what is looked up is multiplied by ``scale``, rounded to the weight's dtype."""

    def __init__(
        self, vocab_size: int, hidden_size: int, weight_format: WeightFormat, *, scale: float | None = None
    ) -> None:
        self.weight = weight_format.empty(vocab_size, hidden_size)
        self._scale = None if scale is None else weight_format.rounded(scale)

    def slots(self, name: str) -> Iterator[Slot]:
        """Where ``{name}.weight`` goes."""
        yield Slot(f"{name}.weight", self.weight)

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Int64 ``[rows]`` to ``[rows, hidden]``."""
        hidden = F.embedding(token_ids, self.weight)
        return hidden if self._scale is None else hidden.mul_(self._scale)


class LogitsHead:
    """Logits of some rows; with ``tied`` it uses the embedding's weight and has none of its own.

    With ``soft_cap`` logits stay between plus and minus that: ``cap * tanh(logits / cap)`` (Bello et al. 2016).
    """

    def __init__(
        self, embedding: Embedding, weight_format: WeightFormat, *, tied: bool, soft_cap: float | None = None
    ) -> None:
        self._tied = tied
        self._soft_cap = soft_cap
        self.weight = embedding.weight if tied else weight_format.empty(*embedding.weight.shape)

    def slots(self, name: str) -> Iterator[Slot]:
        """Where ``{name}.weight`` goes, unless it is tied."""
        if not self._tied:
            yield Slot(f"{name}.weight", self.weight)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[rows, hidden]`` to float32 ``[rows, vocab]``."""
        logits = F.linear(hidden, self.weight).float()
        return logits if self._soft_cap is None else logits.div_(self._soft_cap).tanh_().mul_(self._soft_cap)
