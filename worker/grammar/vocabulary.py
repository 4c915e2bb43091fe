"""What each token adds to a text, in bytes: all that a grammar has to know about a model's tokenizer."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """``pieces[i]`` is what token ``i`` adds; nothing, if it is special or has no text: grammars never allow those."""

    pieces: tuple[bytes, ...]


VocabularySource = Callable[[], Vocabulary]
"""Reads the model's vocabulary, once and only if a grammar comes. Raises ``GrammarError`` if it has none of this kind.

The cluster injects it, because tokenizers are its business.
"""
