"""The sequences that wait for their turn, and whose turn it is: fair between callers, by priority within one.

Part of a scheduler, which knows when there is room for the next; this only orders. A caller is whoever is to get a fair
share, such as the owner of an API key. Callers share by virtual token counters (Sheng et al., "Fairness in Serving
Large Language Models", OSDI 2024): what is computed for a caller raises its counter, and the lowest counter of those
who wait is next. A caller that had nothing to do begins no lower than that, so that idling earns no credit.

What was admitted before and came back (preempted, or without the KV that it waited for) goes before all that is new,
and is not charged again. A caller's own requests go by priority, lower first, then in the order in which they came.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator

from worker.sequence import Sequence

GENERATED_TOKEN_COST = 2
"""A generated token weighs as much as this many prompt tokens: it costs a pass over all weights, in a batch."""

# Priority, 0 if it was admitted before, number of arrival, choice.
_Rank = tuple[int, int, int, int]


class WaitingQueue:
    """See the module. Iterates in no order that means anything."""

    def __init__(self) -> None:
        self._ranks: dict[Sequence, _Rank] = {}
        self._lines: dict[str, list[tuple[_Rank, Sequence]]] = {}
        self._counters: dict[str, float] = {}
        self._floor = 0.0
        self._arrivals = 0
        self.tokens = 0
        """Of all that waits."""

    def __len__(self) -> int:
        return len(self._ranks)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._ranks)

    def push(self, sequence: Sequence) -> None:
        """Add a sequence, new or ``admitted`` before."""
        if not sequence.admitted:
            self._arrivals += 1
            sequence.arrival_number = self._arrivals
        if sequence.caller not in self._lines:
            self._lift(sequence.caller)
        rank = (sequence.priority, int(not sequence.admitted), sequence.arrival_number, sequence.choice)
        self._ranks[sequence] = rank
        insort(self._lines.setdefault(sequence.caller, []), (rank, sequence))
        self.tokens += len(sequence.tokens)

    @property
    def head(self) -> Sequence:
        """Whose turn it is. The queue is not empty."""
        return min(self._lines.values(), key=self._urgency)[0][1]

    def pop(self) -> Sequence:
        """Take the head out."""
        sequence = self.head
        self._floor = max(self._floor, self._counters.get(sequence.caller, self._floor))
        self.remove(sequence)
        # Whoever does not wait and is not above the floor would be lifted to it anyway.
        self._counters = {
            caller: counter
            for caller, counter in self._counters.items()
            if caller in self._lines or counter > self._floor
        }
        return sequence

    def remove(self, sequence: Sequence) -> None:
        """Take out a sequence that is there, wherever it stands."""
        rank = self._ranks.pop(sequence)
        line = self._lines[sequence.caller]
        del line[bisect_left(line, rank, key=lambda entry: entry[0])]
        if not line:
            del self._lines[sequence.caller]
        self.tokens -= len(sequence.tokens)

    def charge(self, caller: str, cost: float) -> None:
        """Something was computed for a caller; ``cost`` is in prompt tokens."""
        self._counters[caller] = self._counters.get(caller, self._floor) + cost

    def ahead_of(self, caller: str, priority: int) -> int:
        """About how many would be taken before a new request: callers take turns."""
        own = bisect_left(self._lines.get(caller, []), priority + 1, key=lambda entry: entry[0][0])
        return own + sum(min(len(line), own + 1) for other, line in self._lines.items() if other != caller)

    def displaced_by(self, caller: str) -> Sequence | None:
        """Who must leave a full queue for a new request: the last of the longest line, if that is not the caller's.

        Nobody, if it would only change places; never one that was admitted before.
        """
        longest = max(self._lines, key=lambda other: len(self._lines[other]), default=caller)
        if len(self._lines.get(longest, [])) <= len(self._lines.get(caller, [])) + 1:
            return None
        return next((sequence for _, sequence in reversed(self._lines[longest]) if not sequence.admitted), None)

    def _lift(self, caller: str) -> None:
        lowest = min((self._counters.get(other, self._floor) for other in self._lines), default=self._floor)
        self._counters[caller] = max(self._counters.get(caller, lowest), lowest)

    def _urgency(self, line: list[tuple[_Rank, Sequence]]) -> tuple[int, float, int]:
        (_, new, number, _), sequence = line[0]
        return (new, self._counters[sequence.caller] if new else 0.0, number)
