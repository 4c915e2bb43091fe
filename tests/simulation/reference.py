"""What every request must be answered: the same model, undisturbed."""

import numpy as np

from tests.simulation.shadow_model import LONGEST, VOCAB_SIZE, WORD, ShadowRunner, logits_of, model_shape
from worker.config import EngineConfig, Role
from worker.kv_cache.specs import LastState
from worker.ranks.commands import SequenceRows
from worker.sampler import sample
from worker.sampling_params import SamplingParams
from worker.scheduler import Draw
from worker.sequence import RequestId, Sequence


class Reference:
    """An undisturbed colocated computation: one sequence with memory of its own, no scheduler, cache or transfer."""

    def __init__(self, family: str, prefix_tokens: tuple[int, ...]) -> None:
        self._prefix_tokens = prefix_tokens
        self._shape = model_shape(family, LONGEST)
        groups = self._shape.plan.groups
        count = [1 if isinstance(g.retention, LastState) else -(-LONGEST // g.block_size) for g in groups]
        starts = [sum(count[:index]) for index in range(len(count))]
        config = EngineConfig(model="", role=Role.COLOCATED)
        self._runner = ShadowRunner(config, self._shape, sum(count))
        self._tables = tuple(
            np.array([start, start] if isinstance(g.retention, LastState) else range(start, start + number))
            for g, start, number in zip(groups, starts, count, strict=True)
        )

    def answer(self, prompt: list[int], salt: str, sampling: SamplingParams, choice: int, limit: int) -> list[int]:
        """What this choice must be, in at most ``limit`` tokens, prompt included."""
        tokens = [*self._prefix_tokens, *prompt]
        prompt_len = len(tokens)
        sequence = Sequence(RequestId("reference"), choice, tokens, prompt_len, sampling, salt, 0.0, 0.0)
        sequence.eos_token_ids = self._runner.eos_token_ids
        self._runner.cache.salts = lambda: _Everywhere(salt)  # type: ignore[method-assign]
        random = not sampling.greedy
        while True:
            known = len(sequence.tokens)
            new = np.array(sequence.tokens[sequence.computed :], dtype=np.int64)
            words = self._runner.compute([SequenceRows(new, sequence.computed, 1, self._tables)])
            (token,) = sample(logits_of(words), [Draw(0, sequence, choice)]) if random else map(_likeliest, words)
            sequence.computed = known
            sequence.tokens.append(token)
            ended = token in sequence.end_tokens and sequence.generated >= sampling.min_tokens
            if ended or sequence.generated == sampling.max_tokens or len(sequence.tokens) == limit:
                return sequence.tokens[prompt_len:]


class _Everywhere(dict[int, str]):
    """Every block is the one sequence's."""

    def __init__(self, salt: str) -> None:
        super().__init__()
        self._salt = salt

    def __missing__(self, block: int) -> str:
        return self._salt


def _likeliest(word: int) -> int:
    """The token with the largest logit."""
    logits = word.to_bytes(WORD, "little", signed=True)
    return max(range(VOCAB_SIZE), key=lambda token: (logits[token], token))
