"""Depthwise causal convolution over a stream of rows: each channel is a weighted sum of its last ``kernel`` inputs.

A sequence comes in pieces, so its last ``kernel - 1`` inputs are its state: ``[channels, kernel - 1]``, oldest first,
zero at the beginning. Plain PyTorch references. Weights are ``[channels, kernel]``, the newest input's last; sums are
in float32 at least. Nothing is changed in place, and no activation is applied.
"""

import torch


def convolve_row(
    rows: torch.Tensor, state: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """One further input of each of many sequences.

    ``rows`` ``[sequences, channels]`` and ``state`` ``[sequences, channels, kernel - 1]`` have one dtype; ``bias`` is
    ``[channels]``. Returns outputs and new states, shaped and typed like ``rows`` and ``state``.
    """
    inputs = torch.cat([state, rows.unsqueeze(-1)], dim=-1)
    sums = (_widened(inputs) * weight).sum(dim=-1)
    if bias is not None:
        sums += bias
    return sums.to(rows.dtype), inputs[..., 1:]


def convolve_chunk(
    rows: torch.Tensor, state: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Any number of further inputs of one sequence.

    ``rows`` ``[rows, channels]`` and ``state`` ``[channels, kernel - 1]`` have one dtype; ``bias`` is ``[channels]``.
    Returns outputs and the new state, shaped and typed like ``rows`` and ``state``.
    """
    count = len(rows)
    inputs = torch.cat([state.t(), rows])
    wide = _widened(inputs)
    sums = wide[:count] * weight[:, 0]
    for tap in range(1, weight.shape[1]):
        sums += wide[tap : tap + count] * weight[:, tap]
    if bias is not None:
        sums += bias
    return sums.to(rows.dtype), inputs[count:].t()


def _widened(inputs: torch.Tensor) -> torch.Tensor:
    return inputs.to(torch.promote_types(inputs.dtype, torch.float32))
