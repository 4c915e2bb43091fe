"""Sequences without an engine."""

from worker.kv_cache.manager import KVCacheManager
from worker.sampling_params import SamplingParams
from worker.sequence import RequestId, Sequence


def make_sequence(tokens: list[int], salt: str = "", name: str = "r") -> Sequence:
    return Sequence(
        request_id=RequestId(name),
        choice=0,
        tokens=list(tokens),
        prompt_len=len(tokens),
        sampling=SamplingParams(),
        salt=salt,
        arrival=0.0,
        deadline=1e9,
    )


def compute(cache: KVCacheManager, sequence: Sequence, tokens: int) -> None:
    """One step of so many tokens, for which there must be room."""
    assert tokens <= cache.chunk(sequence, tokens), "a step must end at a checkpoint"
    assert cache.extend(sequence, tokens)
    sequence.computed += tokens
    cache.advance(sequence)
