"""Log probabilities in the three shapes that clients know: chat's, completions', and vLLM's ``prompt_logprobs``."""

from collections.abc import Sequence
from itertools import islice
from typing import Any

from cluster.text.tokenizer import Tokenizer
from worker.wire.engine_pb2 import TokenLogprobs

# JSON has no infinity. This is what other servers send for a token that cannot be.
_IMPOSSIBLE = -9999.0


def chat_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """Return a chat choice's ``logprobs``."""
    return {"content": [_chat_entry(tokenizer, entry) for entry in entries]}


def _chat_entry(tokenizer: Tokenizer, entry: TokenLogprobs) -> dict[str, Any]:
    top = zip(entry.top_token_ids, entry.top_logprobs, strict=True)
    return {
        **_chat_token(tokenizer, entry.token_id, entry.logprob),
        "top_logprobs": [_chat_token(tokenizer, token_id, logprob) for token_id, logprob in top],
    }


def _chat_token(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    return {
        "token": tokenizer.token_text(token_id),
        "logprob": _finite(logprob),
        "bytes": list(tokenizer.piece(token_id)),
    }


class CompletionLogprobs:
    """A completion choice's ``logprobs``, a list per kind, filled token by token."""

    def __init__(self, tokenizer: Tokenizer, alternatives: int) -> None:
        self._tokenizer = tokenizer
        self._alternatives = alternatives
        self._tokens: list[str] = []
        self._token_logprobs: list[float | None] = []
        self._top_logprobs: list[dict[str, float] | None] = []
        self._text_offset: list[int] = []

    def add_first(self, token_id: int) -> None:
        """Add the first token of a prompt, which nothing predicts."""
        self._tokens.append(self._tokenizer.token_text(token_id))
        self._token_logprobs.append(None)
        self._top_logprobs.append(None)
        self._text_offset.append(0)

    def add(self, entry: TokenLogprobs, offset: int) -> None:
        """Add a token whose text begins ``offset`` characters into the choice's text."""
        token = self._tokenizer.token_text(entry.token_id)
        logprob = _finite(entry.logprob)
        top: dict[str, float] = {}
        ranked = zip(entry.top_token_ids, entry.top_logprobs, strict=True)
        for token_id, top_logprob in islice(ranked, self._alternatives):
            top.setdefault(self._tokenizer.token_text(token_id), _finite(top_logprob))
        top.setdefault(token, logprob)
        self._tokens.append(token)
        self._token_logprobs.append(logprob)
        self._top_logprobs.append(top)
        self._text_offset.append(offset)

    def as_dict(self) -> dict[str, Any]:
        """Return OpenAI's object."""
        return {
            "tokens": self._tokens,
            "token_logprobs": self._token_logprobs,
            "top_logprobs": self._top_logprobs,
            "text_offset": self._text_offset,
        }


def prompt_logprobs(
    tokenizer: Tokenizer, entries: Sequence[TokenLogprobs], alternatives: int
) -> list[dict[str, Any] | None]:
    """Return vLLM's ``prompt_logprobs``: per prompt token, the token ids that were considered; null for the first."""
    return [None, *(_prompt_entry(tokenizer, entry, alternatives) for entry in entries)]


def _prompt_entry(tokenizer: Tokenizer, entry: TokenLogprobs, alternatives: int) -> dict[str, Any]:
    ranked = [(entry.token_id, entry.logprob, entry.rank)]
    top = zip(entry.top_token_ids, entry.top_logprobs, strict=True)
    ranked += [(token_id, logprob, rank) for rank, (token_id, logprob) in enumerate(islice(top, alternatives), 1)]
    considered: dict[str, Any] = {}
    for token_id, logprob, rank in ranked:
        description = {"logprob": _finite(logprob), "rank": rank, "decoded_token": tokenizer.token_text(token_id)}
        considered.setdefault(str(token_id), description)
    return considered


def _finite(logprob: float) -> float:
    return logprob if logprob >= _IMPOSSIBLE else _IMPOSSIBLE  # NaN compares false
