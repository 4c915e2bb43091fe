"""Ends a text before any of the given strings.

A choice whose request has stop strings has one ``StopStringMatcher`` from its first examined character to its match or
its end. It holds back what may turn out to be the start of a stop string, and nothing else.
"""

from collections.abc import Sequence


class StopStringMatcher:
    """Finds the stop string that ends first in a text that arrives in pieces; of two that end together, the longer.

    Which one is found does not depend on how the text is cut. Each string is followed by its own Knuth-Morris-Pratt
    automaton (Knuth, Morris, Pratt 1977), so that a character costs O(1) per stop string, amortised.
    """

    def __init__(self, stops: Sequence[str], *, include_in_output: bool = False) -> None:
        """Take non-empty ``stops``; ``include_in_output`` leaves the string that was found in the text."""
        assert all(stops), "an empty stop string matches everywhere"
        self._stops = tuple(dict.fromkeys(stops))
        self._borders = tuple(_borders(stop) for stop in self._stops)
        self._states = [0] * len(self._stops)
        self._first_characters = frozenset(stop[0] for stop in self._stops)
        self._include = include_in_output
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Return what may be shown now. After a match, which ``matched`` names, nothing more is shown."""
        if self.matched is not None:
            return ""
        if not self._held and self._first_characters.isdisjoint(text):
            return text
        seen = len(self._held)
        text = self._held + text
        for position in range(seen, len(text)):
            self._advance(text[position])
            if self.matched is not None:
                self._held = ""
                end = position + 1
                return text[: end if self._include else end - len(self.matched)]
        shown = len(text) - max(self._states)
        self._held = text[shown:]
        return text[:shown]

    def finish(self) -> str:
        """Return what was held back when no text follows."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str) -> None:
        for index, stop in enumerate(self._stops):
            state = self._states[index]
            borders = self._borders[index]
            while state and stop[state] != character:
                state = borders[state - 1]
            if stop[state] == character:
                state += 1
            self._states[index] = state
            if state == len(stop) and (self.matched is None or len(stop) > len(self.matched)):
                self.matched = stop


def _borders(pattern: str) -> list[int]:
    """Return, for each prefix of ``pattern``, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(pattern)
    length = 0
    for index in range(1, len(pattern)):
        while length and pattern[index] != pattern[length]:
            length = borders[length - 1]
        if pattern[index] == pattern[length]:
            length += 1
        borders[index] = length
    return borders
