"""The gated delta rule: linear attention whose state is an associative memory that forgets and corrects itself.

Every value head's state is a matrix ``S`` ``[key_dim, value_dim]``. A row decays it, replaces what it recalls under the
row's key by the row's value, as far as ``beta`` says, and reads it under the row's query:

    S <- exp(log_decay) * S
    S <- S + key (beta * (value - key S))
    out = query S

Plain PyTorch references for Gated DeltaNet (Yang et al. 2024, "Gated Delta Networks: Improving Mamba2 with Delta
Rule"). Nothing is changed in place.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

UNIT_EPSILON = 1e-6
"""Added to a squared length, as models with this rule are trained."""

BLOCK_ROWS = 64
"""Rows that ``delta_rule_chunk`` answers with matrix products; the state advances once per block."""


@dataclass(frozen=True, slots=True)
class DeltaRows:
    """What the rule needs of some rows, all of one floating-point dtype, float32 in a model.

    ``query`` and ``key`` are ``[rows, key_heads, key_dim]``, ``value`` is ``[rows, value_heads, value_dim]``,
    ``log_decay`` (at most 0) and ``beta`` (from 0 to 1) are ``[rows, value_heads]``. Each key head serves
    ``value_heads / key_heads`` consecutive value heads.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    log_decay: torch.Tensor
    beta: torch.Tensor

    @property
    def group(self) -> int:
        """Value heads of one key head."""
        return self.value.shape[1] // self.key.shape[1]

    def at(self, rows: slice | torch.Tensor) -> "DeltaRows":
        """Some of the rows."""
        return DeltaRows(self.query[rows], self.key[rows], self.value[rows], self.log_decay[rows], self.beta[rows])


def unit_vectors(heads: torch.Tensor) -> torch.Tensor:
    """Scale the last dimension to length 1: what queries and keys go through first. Same shape and dtype."""
    return heads * (heads.square().sum(dim=-1, keepdim=True) + UNIT_EPSILON).rsqrt()


def delta_rule_row(rows: DeltaRows, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One row of each of many sequences.

    Row ``i`` belongs to ``state[i]``; ``state`` is ``[rows, value_heads, key_dim, value_dim]``. Returns outputs
    ``[rows, value_heads, value_dim]`` and the new states.
    """
    decay = rows.log_decay.exp()[..., None, None]
    heads = torch.stack((rows.key, rows.query), dim=2).repeat_interleave(rows.group, dim=1)
    recalled, read = (heads @ state).mul_(decay).unbind(dim=2)
    correction = (rows.value - recalled) * rows.beta[..., None]
    match = (rows.query * rows.key).sum(dim=-1, keepdim=True).repeat_interleave(rows.group, dim=1)
    new_state = (state * decay).addcmul_(heads[:, :, 0, :, None], correction[:, :, None])
    return torch.addcmul(read, match, correction), new_state


def delta_rule_chunk(rows: DeltaRows, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Any number of consecutive rows of one sequence, whose ``state`` is ``[value_heads, key_dim, value_dim]``.

    Returns outputs ``[rows, value_heads, value_dim]`` and the state after the last row. Within a block the product of
    all rows' updates is written in WY form: one triangular system per block gives every row's correction, first as if
    the block's incoming state were zero, and then what that state subtracts (Yang et al. 2024, "Parallelizing Linear
    Transformers with the Delta Rule over Sequence Length"; with decay, section 3.3 of "Gated Delta Networks").
    """
    count, key_heads, key_dim = rows.key.shape
    value_heads, value_dim = rows.value.shape[1:]
    group = rows.group
    size = min(BLOCK_ROWS, count)
    query, key = (_cut_into_blocks(tensor, size, key_heads, 1) for tensor in (rows.query, rows.key))
    value, log_decay, beta = (
        _cut_into_blocks(tensor, size, key_heads, group)
        for tensor in (rows.value, rows.log_decay[..., None], rows.beta[..., None])
    )

    since_begin = log_decay.cumsum(dim=-2)
    # decays[i, j]: from after row j until row i, of row i's past only.
    future = torch.ones(size, size, dtype=torch.bool, device=key.device).triu(1)
    decays = (since_begin - since_begin.mT).masked_fill(future, -torch.inf).exp()
    system = (key @ key.mT) * decays * beta
    right = torch.cat((value * beta, key * (beta * since_begin.exp())), dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    corrections, recalls = solved[..., :value_dim], solved[..., value_dim:]
    within = (query @ key.mT) * decays
    decayed_query = query * since_begin.exp()
    last = since_begin[..., -1:, :]
    decayed_key = key * (last - since_begin).exp()
    block_decay = last.exp()

    state = state.view(key_heads, group, key_dim, value_dim)
    out = torch.empty_like(value)
    for block in range(value.shape[2]):
        at = (slice(None), slice(None), block)
        correction = corrections[at] - recalls[at] @ state
        out[at] = decayed_query[at] @ state + within[at] @ correction
        state = state * block_decay[at] + decayed_key[at].mT @ correction
    flat = out.permute(2, 3, 0, 1, 4).reshape(-1, value_heads, value_dim)
    return flat[:count], state.view(value_heads, key_dim, value_dim)


def _cut_into_blocks(tensor: torch.Tensor, size: int, key_heads: int, group: int) -> torch.Tensor:
    """``[rows, heads, dim]`` to ``[key_heads, group, blocks, size, dim]``.

    The last block is filled up with rows of zeros, which neither decay a state nor correct it.
    """
    padded = F.pad(tensor, (0, 0, 0, 0, 0, -len(tensor) % size))
    return padded.view(-1, size, key_heads, group, tensor.shape[-1]).permute(2, 3, 0, 1, 4)
