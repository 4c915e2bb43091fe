"""A product whose first half of outputs gates the second, one after the other: where no kernel does both."""

from collections.abc import Callable

import torch


class GatedProduct:
    """``activate(product(hidden))``."""

    def __init__(
        self, product: Callable[[torch.Tensor], torch.Tensor], activate: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        self._product = product
        self._activate = activate

    def __call__(self, hidden: torch.Tensor, added: torch.Tensor | None = None, /) -> torch.Tensor:
        """``[rows, inputs]`` to ``[rows, width]``; nothing is added."""
        assert added is None, "nothing is added to a gated product"
        return self._activate(self._product(hidden))
