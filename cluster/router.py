"""Choosing a replica: by what it has to do already and by how much of the prompt it probably holds.

Pure bookkeeping. A front end keeps one ``PrefixIndex`` for decode replicas, every decode replica one for prefill
replicas; both only remember what they themselves have sent where, so no replica has to publish its cache.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from worker.kv_cache.block_pool import BlockHash
from worker.kv_cache.prefix_hash import chain
from worker.prefill_selector import PrefillCandidate

PREFIX_TOKENS = 16
"""Granularity of the index; replicas may use another block size."""
REMEMBERED_PREFIXES = 200_000
REQUEST_COST_TOKENS = 256
"""A request that decodes weighs as much as this many prompt tokens that wait."""


@dataclass(frozen=True, slots=True)
class Target:
    """A replica that could take a request. ``cost`` is in prompt tokens; ``room``: whether KV memory is left."""

    name: str
    cost: float
    room: bool = True


class PrefixIndex:
    """Which replica was last sent each prefix; the oldest are forgotten."""

    def __init__(self, capacity: int = REMEMBERED_PREFIXES) -> None:
        self._capacity = capacity
        self._holders: OrderedDict[BlockHash, str] = OrderedDict()

    def held(self, prefixes: Iterable[BlockHash], name: str) -> int:
        """Tokens of the longest remembered prefix that went to ``name``."""
        tokens = 0
        for prefix in prefixes:
            if self._holders.get(prefix) != name:
                break
            tokens += PREFIX_TOKENS
        return tokens

    def remember(self, prefixes: Iterable[BlockHash], name: str) -> None:
        """A prompt goes to ``name``."""
        for prefix in prefixes:
            self._holders[prefix] = name
            self._holders.move_to_end(prefix)
        while len(self._holders) > self._capacity:
            self._holders.popitem(last=False)

    def forget(self, name: str) -> None:
        """A replica is gone, and its cache with it."""
        for prefix in [prefix for prefix, holder in self._holders.items() if holder == name]:
            del self._holders[prefix]


def choose(targets: Sequence[Target], index: PrefixIndex, token_ids: Sequence[int], salt: str) -> str:
    """The target with the least work once this prompt is added; remembers the choice.

    Targets without room count only when none has any. Ties go to the first.
    """
    prefixes = tuple(chain(token_ids, PREFIX_TOKENS, salt))
    candidates = [target for target in targets if target.room] or list(targets)
    best = min(candidates, key=lambda target: target.cost + len(token_ids) - index.held(prefixes, target.name))
    index.remember(prefixes, best.name)
    return best.name


class PrefillRouter:
    """How a decode replica chooses a prefill replica; see ``worker.prefill_selector.PrefillSelector``."""

    def __init__(self) -> None:
        self._index = PrefixIndex()

    def choose(self, candidates: Sequence[PrefillCandidate], token_ids: Sequence[int], salt: str) -> str:
        """Outstanding tokens plus what this prompt would add."""
        targets = [Target(candidate.incarnation, candidate.outstanding_tokens) for candidate in candidates]
        return choose(targets, self._index, token_ids, salt)
