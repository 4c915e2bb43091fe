"""The sampler: logits to tokens, for a whole step at once.

It is the only place where tokens are chosen, so roles cannot disagree. Randomness is counter-based: the uniform number
behind a token is a pure function of (seed, choice, position), whatever else is in the batch and wherever the prompt was
computed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kernels.sampling import RowFilters
from kernels.table import token_draws
from worker.scheduler import Draw

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probability of one token under the model's own distribution, and the most likely alternatives.

    ``rank`` is 1 for the most likely token. ``top`` holds (token, log-probability), most likely first.
    """

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


def sample(logits: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
    """Choose one token per draw from float32 ``[rows, vocab]``.

    Penalties, bias and the ban of end tokens before ``min_tokens`` apply first, then grammars, then temperature, top-k,
    top-p, min-p.
    """
    if not draws:
        return []
    chosen = logits.index_select(0, torch.tensor([draw.row for draw in draws], device=logits.device))
    for row, draw in enumerate(draws):
        _adjust(chosen[row], draw)
    _constrain(chosen, draws)
    # Among numbers that are not, one is the highest: a pass over all to look for them would take longer than this.
    highest, tokens = chosen.max(dim=-1)
    if highest.isnan().any():
        raise FloatingPointError("the model's logits are not numbers; its weights may be damaged")
    random = [row for row, draw in enumerate(draws) if not draw.sequence.sampling.greedy]
    if random:
        index = torch.tensor(random, device=logits.device)
        tokens[index] = _sample_random(chosen.index_select(0, index), [draws[row] for row in random])
    return list(map(int, tokens.tolist()))


def token_logprobs(logits: torch.Tensor, tokens: Sequence[int], top: int) -> list[TokenLogprobs]:
    """Describe ``tokens``, one per row of unmodified float32 logits ``[rows, vocab]``."""
    logprobs = torch.log_softmax(logits, dim=-1)
    wanted = torch.tensor(tokens, device=logits.device)
    own = logprobs.gather(1, wanted[:, None])
    ranks = (logprobs > own).sum(dim=-1).add_(1).tolist()
    best, best_tokens = logprobs.topk(min(top, logits.shape[-1]), dim=-1)
    rows = zip(tokens, own[:, 0].tolist(), ranks, best_tokens.tolist(), best.tolist(), strict=True)
    return [
        TokenLogprobs(token, logprob, rank, tuple(zip(ids, values, strict=True)))
        for token, logprob, rank, ids, values in rows
    ]


def uniform(
    seeds: npt.NDArray[np.uint64], choices: npt.NDArray[np.uint64], positions: npt.NDArray[np.uint64]
) -> npt.NDArray[np.float64]:
    """Numbers in [0, 1) that depend on their three counters only.

    Three rounds of the SplitMix64 finaliser (Steele, Lea & Flood 2014), one per counter.
    """
    with np.errstate(over="ignore"):
        state = _mix(_mix(_mix(seeds + _GOLDEN) + choices * _GOLDEN + _GOLDEN) + positions * _GOLDEN + _GOLDEN)
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def _adjust(row: torch.Tensor, draw: Draw) -> None:
    """Change one row of logits in place by what its request asks for."""
    sequence = draw.sequence
    sampling = sequence.sampling
    if sampling.penalized:
        seen = np.unique(np.array(sequence.tokens[sequence.prefix_len :]))
        if sampling.repetition_penalty != 1.0:
            index = torch.from_numpy(seen).to(row.device)
            values = row[index]
            penalty = sampling.repetition_penalty
            row[index] = torch.where(values > 0, values / penalty, values * penalty)
        generated, counts = np.unique(
            np.array(sequence.tokens[sequence.prompt_len :], dtype=np.int64), return_counts=True
        )
        if len(generated):
            index = torch.from_numpy(generated).to(row.device)
            occurrences = torch.from_numpy(counts).to(row.device, row.dtype)
            row[index] -= sampling.presence_penalty + sampling.frequency_penalty * occurrences
    if sampling.logit_bias:
        tokens = torch.tensor(list(sampling.logit_bias), device=row.device)
        row[tokens] += torch.tensor(list(sampling.logit_bias.values()), device=row.device)
    if sequence.generated < sampling.min_tokens and sequence.end_tokens:
        row[torch.tensor(sorted(sequence.end_tokens), device=row.device)] = -torch.inf


def _constrain(logits: torch.Tensor, draws: Sequence[Draw]) -> None:
    """Leave of the rows ``[draws, vocab]``, in place, the tokens that their requests' grammars allow."""
    rows, masks = [], []
    for row, draw in enumerate(draws):
        constraint = draw.sequence.constraint
        if constraint is not None:
            assert constraint.next is not None, "a token is wanted, and it is not known what may follow"
            rows.append(row)
            masks.append(constraint.next.allowed)
    if not rows:
        return
    words = torch.from_numpy(np.stack(masks)).to(logits.device)
    bits = words[:, :, None] >> torch.arange(32, dtype=torch.int32, device=logits.device)
    allowed = (bits & 1).bool().flatten(1)[:, : logits.shape[1]]
    index = torch.tensor(rows, device=logits.device)
    logits[index] = logits[index].masked_fill(~allowed, -torch.inf)


def _sample_random(logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    params = [draw.sequence.sampling for draw in draws]
    temperature = torch.tensor([p.temperature for p in params], device=logits.device)
    numbers = uniform(
        np.array([p.seed for p in params], dtype=np.uint64),
        np.array([draw.choice for draw in draws], dtype=np.uint64),
        np.array([len(draw.sequence.tokens) for draw in draws], dtype=np.uint64),
    )
    filters = [RowFilters(p.top_k, p.top_p, p.min_p) for p in params]
    return token_draws(logits.device)(logits / temperature[:, None], filters, numbers)
