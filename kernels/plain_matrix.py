"""A matrix as it was loaded, multiplied with by PyTorch: on GPUs, and where there is nothing better."""

import torch
import torch.nn.functional as F


class PlainMatrix:
    """``hidden @ weight.T + bias`` for a ``weight`` ``[outputs, inputs]``."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, hidden: torch.Tensor, added: torch.Tensor | None = None, /) -> torch.Tensor:
        """``[rows, inputs]`` to ``[rows, outputs]``; ``added`` is one summand more."""
        out = F.linear(hidden, self._weight, self._bias)
        return out if added is None else out.add_(added)
