"""How one request wants its tokens chosen. Checked by the front end and again here, since engines accept any client."""

import math
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

from worker.grammar.grammar import Grammar, GrammarError

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_LOGPROBS = 64


class InvalidRequest(ValueError):
    """A request that can never be served; the message names the field and both values."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling of one request; every choice of it uses the same.

    ``top_k`` 0 keeps every token. ``logprobs`` None means none; 0 the sampled token's; k also the k most likely ones.
    ``stop_token_ids`` end a choice like the model's own end-of-sequence tokens, but also under ``ignore_eos``. Where a
    ``grammar`` lets nothing follow, the choice ends whatever ``min_tokens`` and ``ignore_eos`` say.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    max_tokens: int = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: frozenset[int] = frozenset()
    logit_bias: "Mapping[int, float]" = field(default_factory=lambda: MappingProxyType({}))
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature < 1e-5

    @property
    def penalized(self) -> bool:
        """Whether logits depend on the tokens so far."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)

    def validate(self, vocab_size: int) -> None:
        """Raise ``InvalidRequest`` for the first field that is out of range."""
        ranges = (
            ("temperature", self.temperature, 0.0, 100.0),
            ("top_p", self.top_p, 0.0, 1.0),
            ("min_p", self.min_p, 0.0, 1.0),
            ("presence_penalty", self.presence_penalty, -2.0, 2.0),
            ("frequency_penalty", self.frequency_penalty, -2.0, 2.0),
            ("repetition_penalty", self.repetition_penalty, 1e-3, 1e3),
            ("logprobs", self.logprobs or 0, 0, MAX_LOGPROBS),
            ("prompt_logprobs", self.prompt_logprobs or 0, 0, MAX_LOGPROBS),
            ("min_tokens", self.min_tokens, 0, self.max_tokens),
            *((f"logit_bias[{token}]", bias, -1e4, 1e4) for token, bias in self.logit_bias.items()),
        )
        for name, value, low, high in ranges:
            if not (math.isfinite(value) and low <= value <= high):
                raise InvalidRequest(f"{name} is {value}, which is not between {low} and {high}")
        if self.top_p == 0.0:
            raise InvalidRequest("top_p is 0, which keeps no token; use a value above 0")
        if self.max_tokens == 0 and self.prompt_logprobs is None:
            raise InvalidRequest("max_tokens is 0, which is only possible together with prompt_logprobs")
        if self.grammar is not None:
            try:
                self.grammar.check_size()
            except GrammarError as error:
                raise InvalidRequest(str(error)) from None
        for token in (*self.stop_token_ids, *self.logit_bias):
            if not 0 <= token < vocab_size:
                raise InvalidRequest(f"token id {token} is not in the model's vocabulary of {vocab_size}")
