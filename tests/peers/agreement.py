"""When an answer agrees with the reference: the same greedy tokens, and the same log-probabilities."""

import torch

from tests.engine_client import Choice
from tests.peers.reference import Generation
from worker.wire.engine_pb2 import TokenLogprobs

TOLERANCE = 1e-4
"""On logits in float32. Where the reference's two best are closer than this, either may win."""


def require_logprobs(choice: Choice, logits: torch.Tensor, tolerance: float = TOLERANCE) -> None:
    """Raise ``AssertionError`` unless a choice's log-probabilities are those of ``logits`` ``[tokens, vocab]``.

    Entry ``i`` must describe token ``i``, with its rank, and the most likely tokens in order.
    """
    assert len(choice.tokens) == len(choice.logprobs) == len(logits)
    logprobs = torch.log_softmax(logits, dim=-1)
    for index, (token, described) in enumerate(zip(choice.tokens, choice.logprobs, strict=True)):
        require_described(described, token, logprobs[index], f"token {index}", tolerance)


def require_described(
    described: TokenLogprobs, token: int, logprobs: torch.Tensor, where: str, tolerance: float = TOLERANCE
) -> None:
    """Raise ``AssertionError`` unless ``described`` is about ``token`` under ``logprobs`` ``[vocab]``."""
    assert described.token_id == token, f"{where} is {token}, but {described.token_id} is described"
    ids = [token, *described.top_token_ids]
    error = (torch.tensor([described.logprob, *described.top_logprobs]) - logprobs[ids]).abs().max().item()
    assert error <= tolerance, f"{where}: log-probabilities are off by {error:.2e}"
    above = int((logprobs > logprobs[token] + tolerance).sum())
    not_below = int((logprobs >= logprobs[token] - tolerance).sum())
    assert above < described.rank <= not_below, f"{where}: rank {described.rank}, not within ({above}, {not_below}]"
    best = logprobs.topk(len(described.top_token_ids)).values - torch.tensor([*described.top_logprobs])
    assert len(set(described.top_token_ids)) == len(best)
    assert not len(best) or best.abs().max().item() <= tolerance, f"{where}: these are not the most likely tokens"


def require_agreement(
    choice: Choice, expected: Generation, tolerance: float = TOLERANCE, undecided: float = TOLERANCE
) -> None:
    """Raise ``AssertionError`` unless a choice has the greedy tokens, and log-probabilities within ``tolerance``.

    What comes after a token on which the reference itself is undecided, its two best closer than that, is not compared.
    """
    length = len(expected.prompt)
    assert len(choice.tokens) == len(expected.tokens)
    agreeing = len(choice.tokens)
    for index, (token, wanted) in enumerate(zip(choice.tokens, expected.tokens, strict=True)):
        if token != wanted:
            best, second = expected.logits[index].topk(2).values.tolist()
            assert best - second < undecided, (
                f"token {index} after a prompt of {length} is {token}, the reference has {wanted}, "
                f"which leads by {best - second:.2e}"
            )
            agreeing = index
            break
    require_logprobs(
        Choice(choice.tokens[:agreeing], choice.logprobs[:agreeing]), expected.logits[:agreeing], tolerance
    )
