"""When an answer agrees with the reference: the same greedy tokens, and the same log-probabilities."""

import torch

from tests.engine_process import Choice
from tests.peers.reference import Generation

TOLERANCE = 1e-4
"""On logits in float32. Where the reference's two best are closer than this, either may win."""


def require_agreement(choice: Choice, expected: Generation, tolerance: float = TOLERANCE) -> int:
    """Raise ``AssertionError`` unless a choice agrees; returns how many tokens could be compared.

    ``choice`` has logprobs, which may be off by ``tolerance``. After a token on which the reference itself is undecided, the texts may differ.
    """
    assert len(choice.tokens) == len(choice.logprobs) == len(expected.tokens)
    logprobs = torch.log_softmax(expected.logits, dim=-1)
    for index, (token, described) in enumerate(zip(choice.tokens, choice.logprobs, strict=True)):
        where = f"token {index} after a prompt of {len(expected.prompt)}"
        ids = [described.token_id, *described.top_token_ids]
        values = torch.tensor([described.logprob, *described.top_logprobs])
        error = (values - logprobs[index, ids]).abs().max().item()
        assert error <= tolerance, f"{where}: log-probabilities are off by {error:.2e}"
        assert token == described.token_id
        if token != expected.tokens[index]:
            best, second = expected.logits[index].topk(2).values.tolist()
            assert best - second < TOLERANCE, (
                f"{where} is {token}, the reference has {expected.tokens[index]}, which leads by {best - second:.2e}"
            )
            return index + 1
    return len(choice.tokens)
