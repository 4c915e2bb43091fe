"""A matrix in oneDNN's own layout, for processors that multiply bfloat16 but have no matrix unit, or no compiler."""

import torch


class MkldnnMatrix:
    """``hidden @ weight.T + bias`` for a ``weight`` ``[outputs, inputs]``, whose memory is not needed afterwards."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
        self._bias = bias

    def __call__(self, hidden: torch.Tensor, added: torch.Tensor | None = None, /) -> torch.Tensor:
        """``[rows, inputs]`` to ``[rows, outputs]``; ``added`` is one summand more."""
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            hidden.contiguous(), self._packed, self._bias, "none", [], ""
        )
        return out if added is None else out.add_(added)
