"""From a request's fields to the engine's ``Sampling``: defaults, and the checks that need the model or the limits.

Defaults are OpenAI's, whatever the checkpoint's generation_config.json says.
"""

import math
import secrets
from dataclasses import dataclass

from cluster.openai.error_code import ErrorCode
from cluster.openai.errors import ApiError, invalid
from cluster.openai.limits import ApiLimits, ModelCard
from cluster.openai.protocol import GenerationBody
from worker.wire.engine_pb2 import Sampling

# Below this an engine takes the most likely token anyway, and a division by it would overflow.
_GREEDY_BELOW = 1e-5
_MAX_BIAS = 100.0


@dataclass(frozen=True, slots=True)
class StopRule:
    """What ends a choice by its text. ``min_tokens`` tokens pass unexamined."""

    strings: tuple[str, ...]
    min_tokens: int
    include_in_output: bool


def check_model(name: str | None, model: ModelCard) -> None:
    """Refuse the name of a model that is not served; no name means the one that is."""
    if name is not None and name != model.name:
        raise ApiError(
            ErrorCode.MODEL_NOT_FOUND,
            f"the model {name!r:.200} does not exist; this server has {model.name!r}",
            param="model",
        )


def sampling_of(body: GenerationBody, model: ModelCard, limits: ApiLimits) -> Sampling:
    """Return everything but the number of tokens and the logprobs; raise ``ApiError`` for what cannot be."""
    temperature = 1.0 if body.temperature is None else body.temperature
    return Sampling(
        temperature=temperature if temperature >= _GREEDY_BELOW else 0.0,
        top_k=max(body.top_k or 0, 0),
        top_p=1.0 if body.top_p is None else body.top_p,
        min_p=body.min_p or 0.0,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        seed=secrets.randbits(63) if body.seed is None else body.seed % (1 << 64),
        min_tokens=body.min_tokens or 0,
        ignore_eos=bool(body.ignore_eos),
        stop_token_ids=_stop_token_ids(body, model, limits),
        logit_bias=_logit_bias(body, model, limits),
    )


def stop_rule_of(body: GenerationBody, limits: ApiLimits) -> StopRule:
    """Return the stop strings with what belongs to them."""
    strings = [body.stop] if isinstance(body.stop, str) else list(body.stop or ())
    if len(strings) > limits.max_stop_strings:
        raise invalid(f"stop has {len(strings)} strings; at most {limits.max_stop_strings} are allowed", "stop")
    for string in strings:
        if not string:
            raise invalid("stop holds an empty string", "stop")
        if len(string) > limits.max_stop_string_length:
            raise invalid(
                f"stop holds a string of {len(string)} characters; at most {limits.max_stop_string_length} are allowed",
                "stop",
            )
    return StopRule(tuple(strings), body.min_tokens or 0, bool(body.include_stop_str_in_output))


def choices_of(body: GenerationBody, limits: ApiLimits) -> int:
    """Return the number of choices of each prompt."""
    n = 1 if body.n is None else body.n
    if n > limits.max_choices:
        raise invalid(f"n is {n}; at most {limits.max_choices} choices are allowed", "n")
    return n


def timeout_ms_of(body: GenerationBody, limits: ApiLimits, header: float | None = None) -> int:
    """Return the request's own deadline in milliseconds, the shorter of body and header, or 0 if it has none."""
    if body.timeout is not None and body.timeout > limits.max_timeout:
        raise invalid(f"timeout is {body.timeout} s; at most {limits.max_timeout} s are allowed", "timeout")
    given = [seconds for seconds in (body.timeout, header) if seconds is not None]
    return math.ceil(min(given) * 1000) if given else 0


def logprobs_of(count: int | None, limits: ApiLimits, param: str) -> int | None:
    """Return how many alternatives to report for each token, or None for no logprobs at all."""
    if count is not None and count > limits.max_logprobs:
        raise invalid(f"{param} is {count}; at most {limits.max_logprobs} are allowed", param)
    return count


def max_tokens_of(
    requested: int | None, default: int | None, min_tokens: int, prompt_len: int, model: ModelCard, param: str
) -> int:
    """Return how many tokens a choice may have: ``requested``, or else ``default`` or what the context leaves."""
    room = model.max_model_len - prompt_len
    if requested is None:
        max_tokens = room if default is None else min(default, room)
    elif requested > room:
        raise invalid(
            f"{param} is {requested}, but the prompt's {prompt_len} tokens leave {room} of the model's context "
            f"(max_model_len) of {model.max_model_len} tokens",
            param,
            ErrorCode.CONTEXT_LENGTH_EXCEEDED,
        )
    else:
        max_tokens = requested
    if min_tokens > max_tokens:
        raise invalid(f"min_tokens is {min_tokens}, which is more than {param}, {max_tokens}", "min_tokens")
    return max_tokens


def _stop_token_ids(body: GenerationBody, model: ModelCard, limits: ApiLimits) -> list[int]:
    token_ids = list(dict.fromkeys(body.stop_token_ids or ()))
    if len(token_ids) > limits.max_stop_token_ids:
        raise invalid(
            f"stop_token_ids has {len(token_ids)} entries; at most {limits.max_stop_token_ids} are allowed",
            "stop_token_ids",
        )
    for token_id in token_ids:
        if token_id >= model.vocab_size:
            raise invalid(
                f"stop_token_ids: {token_id} is not in the model's vocabulary of {model.vocab_size}", "stop_token_ids"
            )
    return token_ids


def _logit_bias(body: GenerationBody, model: ModelCard, limits: ApiLimits) -> dict[int, float]:
    entries = body.logit_bias or {}
    if len(entries) > limits.max_logit_bias_entries:
        raise invalid(
            f"logit_bias has {len(entries)} entries; at most {limits.max_logit_bias_entries} are allowed", "logit_bias"
        )
    biases: dict[int, float] = {}
    for key, bias in entries.items():
        token_id = int(key) if key.isascii() and key.isdecimal() and len(key) <= 10 else -1
        if not 0 <= token_id < model.vocab_size:
            raise invalid(
                f"logit_bias: {key[:40]!r} is not a token id of the model's vocabulary of {model.vocab_size}",
                "logit_bias",
            )
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -_MAX_BIAS <= bias <= _MAX_BIAS:
            raise invalid(f"logit_bias: the bias of {key} is not a number from -100 to 100", "logit_bias")
        biases[token_id] = float(bias)
    return biases
