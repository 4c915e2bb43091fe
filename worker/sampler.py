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

from worker.sampling_params import SamplingParams
from worker.scheduler import Draw

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_LIKELIEST = 256
"""Tokens on which filters are decided at first. Hardly any text needs more, and to sort a vocabulary takes 20 times as
long as to find these."""


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
    if chosen.isnan().any():
        raise FloatingPointError("the model's logits are not numbers; its weights may be damaged")
    tokens = chosen.argmax(dim=-1)
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
    logits = logits / temperature[:, None]
    filtered = [row for row, p in enumerate(params) if p.top_k or p.top_p < 1.0 or p.min_p]
    if filtered:
        index = torch.tensor(filtered, device=logits.device)
        logits[index] = _filter(logits.index_select(0, index), [params[row] for row in filtered])
    cumulative = torch.softmax(logits, dim=-1, dtype=torch.float64).cumsum(dim=-1)
    numbers = uniform(
        np.array([p.seed for p in params], dtype=np.uint64),
        np.array([draw.choice for draw in draws], dtype=np.uint64),
        np.array([len(draw.sequence.tokens) for draw in draws], dtype=np.uint64),
    )
    # Scaled by the total, which rounding may leave a little off 1, so that the last token can never be overshot.
    targets = torch.from_numpy(numbers).to(logits.device)[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, targets, right=True).clamp_(max=logits.shape[-1] - 1)[:, 0]


def _filter(logits: torch.Tensor, params: Sequence[SamplingParams], count: int = _LIKELIEST) -> torch.Tensor:
    """Mask what top-k, top-p and min-p drop of rows ``[rows, vocab]``; of equally likely tokens the higher ids.

    Decided on a row's ``count`` likeliest tokens, and on all of them where these do not tell.
    """
    vocab = logits.shape[-1]
    if count < vocab:
        tokens = logits.topk(count, dim=-1).indices.sort(dim=-1).values
        values, places = logits.gather(-1, tokens).sort(dim=-1, descending=True, stable=True)
        tokens = tokens.gather(-1, places)
    else:
        values, tokens = logits.sort(dim=-1, descending=True, stable=True)
    kept = _kept(values, logits.logsumexp(dim=-1), params)
    filtered = torch.full_like(logits, -torch.inf).scatter_(-1, tokens, values.masked_fill(~kept, -torch.inf))
    if count < vocab:
        # What is kept and as unlikely as the last may have company among what was not looked at.
        reaches_last = (kept & (values == values[:, -1:])).any(dim=-1).tolist()
        undecided = [row for row, p in enumerate(params) if reaches_last[row] or p.top_k > count]
        if undecided:
            filtered[undecided] = _filter(logits[undecided], [params[row] for row in undecided], vocab)
    return filtered


def _kept(values: torch.Tensor, totals: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Which of the likeliest values ``[rows, count]``, most likely first, are left.

    ``totals`` are the logarithms of the summed exponentials of whole rows.
    """
    device = values.device
    top_k = torch.tensor([p.top_k for p in params], device=device)
    top_p = torch.tensor([p.top_p for p in params], device=device)[:, None]
    min_p = torch.tensor([p.min_p for p in params], device=device)[:, None]
    kept = values > -torch.inf
    kept &= (torch.arange(values.shape[1], device=device) < top_k[:, None]) | (top_k == 0)[:, None]
    # What is left by top-k is all that top-p and min-p know.
    left = values.masked_fill(~kept, -torch.inf)
    totals = torch.where(top_k > 0, left.logsumexp(dim=-1), totals)
    probabilities = (left - totals[:, None]).exp()
    before = probabilities.cumsum(dim=-1) - probabilities
    kept &= (before < top_p) | (top_p == 1.0)
    kept &= probabilities >= min_p * probabilities[:, :1]
    kept[:, 0] = True
    return kept
