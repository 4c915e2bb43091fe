"""Token ids to text, one at a time.

A choice has one ``Detokenizer`` from its first token to its last. The pieces that it returns are always whole
characters, and together they are the text of all tokens at once.
"""

import codecs
from collections.abc import Sequence
from typing import Protocol

from cluster.text.tokenizer import Tokenizer

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# The last character of a prompt is unfinished for at most this many tokens: one per byte but the last.
_PROMPT_TAIL = 4
# Beyond this a replacement character at the end is what the tokens say, not a character still on its way.
_MAX_HELD_TOKENS = 8


class Detokenizer(Protocol):
    """Incremental decoding of one sequence."""

    def push(self, token_id: int) -> str:
        """Return the text that is certain now and was not before; empty in the middle of a character."""

    def finish(self) -> str:
        """Return what is left when no token follows: a replacement character for each broken one."""


def make_detokenizer(
    tokenizer: Tokenizer, *, prompt: Sequence[int] = (), skip_special_tokens: bool = True
) -> Detokenizer:
    """Return a detokenizer for the tokens that follow ``prompt``, which may end within a character."""
    tail = prompt[-_PROMPT_TAIL:]
    if tokenizer.has_pieces:
        return _PieceDetokenizer(tokenizer, tail, skip_special_tokens)
    return _WindowDetokenizer(tokenizer, tail, skip_special_tokens)


class _PieceDetokenizer:
    """For tokenizers whose text is the concatenation of bytes: an incremental UTF-8 decoder over the pieces."""

    def __init__(self, tokenizer: Tokenizer, prompt_tail: Sequence[int], skip_special_tokens: bool) -> None:
        self._piece = tokenizer.piece
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._at_start = tokenizer.strips_leading_space and not prompt_tail
        for token_id in prompt_tail:
            self.push(token_id)

    def push(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        piece = self._piece(token_id)
        if self._at_start and piece:
            self._at_start = False
            piece = piece.removeprefix(b" ")
        return self._decoder.decode(piece)

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class _WindowDetokenizer:
    """For any other tokenizer: decodes a short window with and without the new token and takes the difference."""

    def __init__(self, tokenizer: Tokenizer, prompt_tail: Sequence[int], skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._window: list[int] = [token_id for token_id in prompt_tail if token_id not in self._skipped]
        self._emitted = len(self._window)

    def push(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        self._window.append(token_id)
        text = self._new_text()
        if text.endswith(_REPLACEMENT) and len(self._window) - self._emitted < _MAX_HELD_TOKENS:
            return ""
        return self._emit(text)

    def finish(self) -> str:
        return self._emit(self._new_text())

    def _new_text(self) -> str:
        before = self._tokenizer.decode(self._window[: self._emitted], skip_special_tokens=False)
        return self._tokenizer.decode(self._window, skip_special_tokens=False)[len(before) :]

    def _emit(self, text: str) -> str:
        # The next token is decoded after those that gave this text, so that it knows what it follows.
        keep = len(self._window) - self._emitted if text else _MAX_HELD_TOKENS
        del self._window[:-keep]
        self._emitted = len(self._window)
        return text
