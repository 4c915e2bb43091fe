"""Token embedding and the head that turns hidden states into logits.

Over several ranks each has some of the vocabulary's rows: what it does not find it takes for zero, and ranks' findings
are added; logits are put side by side on rank 0.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from kernels import table
from worker.layers.matrix import Matrix
from worker.layers.weights import Slot, TensorPart, WeightFormat
from worker.ranks.rank_group import split_rows
from worker.ranks.span import Span


class Embedding:
    """``weight`` ``[vocab, hidden]``; what is looked up is multiplied by ``scale``, rounded to the weight's dtype.

    ``rows`` are this rank's. All ranks' weights have one shape; rows beyond the vocabulary are zero.
    """

    def __init__(
        self, vocab_size: int, hidden_size: int, weight_format: WeightFormat, *, scale: float | None = None
    ) -> None:
        self.rows = split_rows(weight_format.ranks, vocab_size)
        self.weight = vocabulary_weight(self.rows, hidden_size, weight_format)
        self._ranks = weight_format.ranks
        self._take_rows = weight_format.pointwise.take_rows
        self._scale = None if scale is None else weight_format.rounded(scale)

    def slots(self, name: str) -> Iterator[Slot]:
        """Where ``{name}.weight`` goes."""
        yield vocabulary_slot(name, self.weight, self.rows)

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Int64 ``[rows]`` to ``[rows, hidden]``."""
        hidden = self._take_rows(self.weight, token_ids) if self._ranks.size == 1 else self._found(token_ids)
        return hidden if self._scale is None else hidden.mul_(self._scale)

    def _found(self, token_ids: torch.Tensor) -> torch.Tensor:
        """What all ranks find together."""
        elsewhere = (token_ids < self.rows.begin) | (token_ids >= self.rows.end)
        found = F.embedding((token_ids - self.rows.begin).masked_fill_(elsewhere, 0), self.weight)
        return self._ranks.sum(found.masked_fill_(elsewhere[:, None], 0.0))


class LogitsHead:
    """Logits of some rows; with ``tied`` it uses the embedding's weight and has none of its own.

    With ``soft_cap`` logits stay between plus and minus that: ``cap * tanh(logits / cap)`` (Bello et al. 2016).
    """

    def __init__(
        self, embedding: Embedding, weight_format: WeightFormat, *, tied: bool, soft_cap: float | None = None
    ) -> None:
        self._tied = tied
        self._soft_cap = soft_cap
        self._ranks = weight_format.ranks
        self._rows = embedding.rows
        hidden_size = embedding.weight.shape[1]
        weight = embedding.weight if tied else vocabulary_weight(self._rows, hidden_size, weight_format)
        self._matrix = Matrix(weight, arrange=table.wide_matrix)

    def slots(self, name: str) -> Iterator[Slot]:
        """Where ``{name}.weight`` goes, unless it is tied."""
        if not self._tied:
            yield vocabulary_slot(name, self._matrix.weight, self._rows)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """``[rows, hidden]`` to float32 ``[rows, vocab]`` on rank 0, None elsewhere."""
        gathered = self._ranks.gather(self._matrix(hidden))
        if gathered is None:
            return None
        logits = gathered[:, : self._rows.whole]
        return logits if self._soft_cap is None else logits.div_(self._soft_cap).tanh_().mul_(self._soft_cap)


def vocabulary_weight(rows: Span, hidden_size: int, weight_format: WeightFormat) -> torch.Tensor:
    """A rank's part of a matrix with a row per token, as long as every other rank's."""
    weight = weight_format.empty(-(-rows.whole // weight_format.ranks.size), hidden_size)
    weight[len(rows) :].zero_()
    return weight


def vocabulary_slot(name: str, weight: torch.Tensor, rows: Span) -> Slot:
    """Where ``{name}.weight`` goes."""
    return Slot(f"{name}.weight", weight[: len(rows)], TensorPart(0, (rows,)))
