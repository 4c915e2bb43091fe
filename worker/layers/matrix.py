"""A weight that is loaded as its checkpoint has it and multiplied with as the processor wants it.

Allocated with its layer; loading fills it. The first product arranges it anew, and the loaded form is given back.
"""

from collections.abc import Callable

import torch

from kernels import table

Arrange = Callable[[torch.Tensor, torch.Tensor | None], table.Matrix]
"""From a weight and a bias to what is multiplied with: ``table.matrix``, or one of its kin."""


class Matrix:
    """``hidden @ weight.T + bias``, ``weight`` ``[outputs, inputs]``, as ``arrange`` makes it."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None, arrange: Arrange = table.matrix) -> None:
        self._loaded: torch.Tensor | None = weight
        self._bias = bias
        self._arrange = arrange
        self._arranged: table.Matrix | None = None

    @property
    def weight(self) -> torch.Tensor:
        """The loaded form, until the first product."""
        assert self._loaded is not None, "a weight was wanted after it was multiplied with"
        return self._loaded

    def __call__(self, hidden: torch.Tensor, added: torch.Tensor | None = None) -> torch.Tensor:
        """``[rows, inputs]`` to ``[rows, outputs]``; ``added`` is one summand more."""
        if self._arranged is None:
            self._arranged = self._arrange(self.weight, self._bias)
            self._loaded = None
        return self._arranged(hidden, added)
