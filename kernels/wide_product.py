"""A product whose result is float32, whatever its weight is: where no kernel gives its sums as they are."""

from collections.abc import Callable

import torch


class WideProduct:
    """``product(hidden)`` as float32."""

    def __init__(self, product: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._product = product

    def __call__(self, hidden: torch.Tensor, added: torch.Tensor | None = None, /) -> torch.Tensor:
        """``[rows, inputs]`` to float32 ``[rows, outputs]``; ``added`` is one summand more."""
        wide = self._product(hidden).float()
        return wide if added is None else wide.add_(added)
