"""What one front end serves and how much it takes: both are made once, at start."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelCard:
    """The served model. ``max_model_len`` is prompt and generated tokens together; ``created`` is in Unix seconds.

    ``root`` is what it was loaded from, where that says more than its name.
    """

    name: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    created: int
    root: str | None = None


@dataclass(frozen=True, slots=True)
class ApiLimits:
    """The largest request. Sizes are bytes, ``max_timeout`` is in seconds.

    A text of more than ``max_characters_per_token`` for each token of the model's context is refused before it is
    tokenized, which would take seconds only to find that it has too many.
    """

    max_body_bytes: int = 8 << 20
    max_choices: int = 128
    max_characters_per_token: int = 32
    max_batched_prompts: int = 256
    max_batched_choices: int = 1024
    max_stop_strings: int = 16
    max_stop_string_length: int = 1024
    max_stop_token_ids: int = 256
    max_logit_bias_entries: int = 1024
    max_logprobs: int = 20
    max_timeout: float = 86_400.0
