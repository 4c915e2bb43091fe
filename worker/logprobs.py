"""Log-probabilities that requests asked for: of their prompts, of the tokens drawn for them, and as messages."""

from collections.abc import Mapping

import torch

from worker.request import Request
from worker.sampler import TokenLogprobs, token_logprobs
from worker.scheduler import StepPlan
from worker.sequence import RequestId
from worker.wire import engine_pb2 as wire


def take_prompt_logprobs(requests: Mapping[RequestId, Request], plan: StepPlan, logits: torch.Tensor) -> None:
    """Add to requests what a step's logits say of their prompts."""
    row = 0
    for scheduled in plan.rows:
        sequence = scheduled.sequence
        if sequence.wants_prompt_logprobs:
            # The row of token i predicts token i + 1; the prompt's last row predicts no prompt token.
            begin = max(scheduled.first, sequence.prefix_len)
            end = min(scheduled.first + scheduled.rows, sequence.prompt_len - 1)
            count, first_row = max(0, end - begin), row + begin - scheduled.first
            described = token_logprobs(
                logits[first_row : first_row + count],
                sequence.tokens[begin + 1 : begin + 1 + count],
                sequence.sampling.prompt_logprobs or 0,
            )
            entries = requests[sequence.request_id].prompt_logprobs
            # A prompt that was preempted halfway is computed from its start again.
            del entries[begin - sequence.prefix_len :]
            entries += described
            if scheduled.first + scheduled.rows >= sequence.prompt_len:
                sequence.prompt_reported = True
        row += scheduled.logit_rows


def drawn_logprobs(plan: StepPlan, tokens: list[int], logits: torch.Tensor) -> dict[int, TokenLogprobs]:
    """Log-probabilities of the draws that asked for them, by index of the draw."""
    wanted = [index for index, draw in enumerate(plan.draws) if draw.sequence.sampling.logprobs is not None]
    if not wanted:
        return {}
    rows = logits[[plan.draws[index].row for index in wanted]]
    top = max(plan.draws[index].sequence.sampling.logprobs or 0 for index in wanted)
    described = token_logprobs(rows, [tokens[index] for index in wanted], top)
    return dict(zip(wanted, described, strict=True))


def logprobs_message(described: TokenLogprobs, top: int) -> wire.TokenLogprobs:
    """As it crosses the wire, with at most ``top`` alternatives."""
    return wire.TokenLogprobs(
        token_id=described.token,
        logprob=described.logprob,
        rank=described.rank,
        top_token_ids=[token for token, _ in described.top[:top]],
        top_logprobs=[logprob for _, logprob in described.top[:top]],
    )
