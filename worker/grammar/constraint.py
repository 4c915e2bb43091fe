"""What a grammar lets follow one sequence's tokens.

Made when the grammar is compiled. After every token of the sequence it is followed on a thread of ``Grammars``, since
nobody knows how long that takes; ``next`` is None meanwhile, and the engine goes on without the sequence.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xgrammar

from worker.grammar.grammar import GrammarError

MAX_SECONDS = 1.0
"""Of computing, that following a sequence by what it got since the last time may take; most grammars take some 10 µs a
token. Not of waiting: that a machine is busy is no grammar's fault."""

Mask = npt.NDArray[np.int32]
"""One bit per token of the vocabulary, bit ``i % 32`` of word ``i // 32``, set where the token is allowed."""


@dataclass(frozen=True, slots=True)
class Next:
    """Which tokens may follow. ``complete``: none, and the text is what the grammar wants."""

    allowed: Mask
    complete: bool


class Constraint:
    """See the module. ``end_tokens`` are allowed where the text is complete, and nowhere else.

    ``followed`` of the sequence's tokens are behind it. ``late``: following it once took longer than a step waits.
    """

    def __init__(
        self, compiled: xgrammar.CompiledGrammar, vocab_size: int, end_tokens: frozenset[int], prompt_len: int
    ) -> None:
        self._compiled = compiled
        self._vocab_size = vocab_size
        self._end_tokens = end_tokens
        self._prompt_len = prompt_len
        self._ends = mask_of(end_tokens, vocab_size)
        self._matcher = xgrammar.GrammarMatcher(compiled)
        self.followed = prompt_len
        self.next: Next | None = None
        self.late = False

    def sibling(self) -> "Constraint":
        """The same for another choice of the prompt, as if nothing had been generated."""
        return Constraint(self._compiled, self._vocab_size, self._end_tokens, self._prompt_len)

    def follow(self, tokens: Sequence[int]) -> Next:
        """Take the sequence's tokens after the first ``followed`` and return what may be next.

        Not on the engine's thread. Raises ``GrammarError``.
        """
        began = time.thread_time()
        for token in tokens:
            if not self._matcher.accept_token(token):
                raise GrammarError(f"token {token} does not follow the request's grammar")
        self.followed += len(tokens)
        allowed = np.zeros((self._vocab_size + 31) // 32, dtype=np.int32)
        self._matcher.fill_next_token_bitmask(allowed[None])
        allowed &= ~self._ends
        more = bool(allowed.any())
        complete = self._matcher.is_completed()
        if not more and not complete:
            raise GrammarError("the request's grammar cannot be followed any further with this model's tokens")
        seconds = time.thread_time() - began
        if seconds > MAX_SECONDS:
            raise GrammarError(
                f"the request's grammar is too much: following it by a token took {seconds:.1f} s, more than "
                f"{MAX_SECONDS:.0f} s; make it less ambiguous"
            )
        return Next(allowed | self._ends if complete else allowed, complete and not more)


def mask_of(tokens: frozenset[int], vocab_size: int) -> Mask:
    """The mask that allows just these."""
    bits = np.zeros((vocab_size + 31) // 32 * 32, dtype=np.uint8)
    bits[list(tokens)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)
