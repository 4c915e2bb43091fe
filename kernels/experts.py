"""The experts of a mixture of experts, as a plain PyTorch reference: every row through the few chosen for it."""

from collections.abc import Callable

import torch
import torch.nn.functional as F


def routed_experts(
    hidden: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    activate: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """``sum over k of weights[:, k] * down(activate(gate_up(hidden)))`` of the expert ``experts[:, k]``.

    ``hidden`` ``[rows, hidden]``, ``gate_up`` ``[experts, 2 * width, hidden]``, ``down`` ``[experts, hidden, width]``,
    all of one dtype; ``experts`` int64 and ``weights`` of any float dtype, both ``[rows, k]``. ``activate`` turns
    ``[n, 2 * width]`` into ``[n, width]``. Returns a new tensor like ``hidden``. Rows are grouped by expert with one
    sort, so that each expert in use is one product; sums are made per row in a fixed order.
    """
    rows, choices = experts.shape
    order = experts.view(-1).argsort(stable=True)
    counts = _rows_by_expert(experts, len(down))
    outputs = hidden.new_empty(rows * choices, hidden.shape[1])
    begin = 0
    for expert, count in enumerate(counts):
        if count:
            chosen = order[begin : begin + count]
            inputs = hidden.index_select(0, chosen.div(choices, rounding_mode="floor"))
            outputs[chosen] = F.linear(activate(F.linear(inputs, gate_up[expert])), down[expert])
            begin += count
    return torch.bmm(weights.to(hidden.dtype)[:, None, :], outputs.view(rows, choices, -1))[:, 0]


def _rows_by_expert(experts: torch.Tensor, count: int) -> list[int]:
    """How many rows each expert has. Of meta tensors, which hold no numbers, the first has all: they cost the same."""
    if experts.is_meta:
        return [experts.numel()]
    return torch.bincount(experts.view(-1), minlength=count).tolist()
