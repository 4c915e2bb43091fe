"""What each token adds to a text, in bytes: all that a grammar has to know about a model's tokenizer."""

from collections.abc import Callable
from dataclasses import dataclass

SPECIAL_PIECE = b"\xff"
"""No part of any text in UTF-8. A grammar allows a special token only if it names the token itself."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """``pieces[i]`` is what token ``i`` adds: nothing if it has no text, ``SPECIAL_PIECE`` if it is special."""

    pieces: tuple[bytes, ...]


VocabularySource = Callable[[], Vocabulary]
"""Reads the model's vocabulary, once and only if a grammar comes. Raises ``GrammarError`` if it has none of this kind.

The cluster injects it, because tokenizers are its business.
"""
