"""The selective scan of Mamba (Gu & Dao 2023): every channel has ``d_state`` numbers that decay at a rate of its input.

For a token with input ``x``, step ``dt``, and ``b`` and ``c`` of its own, a channel's state ``h`` and output ``y`` are

    h ← exp(dt · a) · h + dt · x · b        y = c · h + d · x

with the channel's constants ``a < 0`` and ``d``. Plain PyTorch references. Everything is float32: the state is a sum
over the whole past. Nothing that is passed in is changed.
"""

import torch

# Tokens whose states are held at once: ``BLOCK * channels * d_state`` numbers, twice.
BLOCK = 64


def scan_row(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One further token of each of many sequences.

    ``state`` ``[sequences, channels, d_state]``; ``x`` and ``dt`` ``[sequences, channels]``; ``a``
    ``[channels, d_state]``; ``b`` and ``c`` ``[sequences, d_state]``; ``d`` ``[channels]``. Returns outputs, shaped
    like ``x``, and new states.
    """
    state = torch.exp(dt[:, :, None] * a).mul_(state).addcmul_((dt * x)[:, :, None], b[:, None, :])
    return torch.addcmul(torch.bmm(state, c[:, :, None])[:, :, 0], x, d), state


def scan_chunk(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Any number of further tokens of one sequence, whose first dimension is that of ``scan_row``'s sequences.

    ``state`` is ``[channels, d_state]``. Decays and inputs of a block of tokens are computed together; from one token
    to the next there is a single fused multiply and add.
    """
    out = torch.empty_like(x)
    for begin in range(0, len(x), BLOCK):
        block = slice(begin, begin + BLOCK)
        decays = torch.exp(dt[block, :, None] * a)
        states = (dt[block] * x[block])[:, :, None] * b[block, None, :]
        for decay, added in zip(decays, states, strict=True):
            state = added.addcmul_(decay, state)
        torch.addcmul(torch.bmm(states, c[block, :, None])[:, :, 0], x[block], d, out=out[block])
        state = state.clone()
    return out, state
