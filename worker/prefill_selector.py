"""How the cluster lets a decode engine choose among prefill replicas: the one thing that is injected from above."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class PrefillCandidate:
    """A prefill replica that can take another stream now; ``outstanding_tokens`` are ours that it has not finished."""

    incarnation: str
    outstanding_tokens: int


class PrefillSelector(Protocol):
    """Chooses one of several prefill replicas for a prompt."""

    def choose(self, candidates: Sequence[PrefillCandidate], token_ids: Sequence[int], salt: str) -> str:
        """The incarnation to ask. ``candidates`` is not empty."""
        ...
