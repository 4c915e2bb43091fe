"""``POST /v1/completions``."""

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from pydantic_core import to_json

from cluster.journal import Entry
from cluster.openai.api_keys import Caller
from cluster.openai.choice import Delta
from cluster.openai.errors import invalid, not_supported
from cluster.openai.event_stream import DONE, ChunkWriter
from cluster.openai.exchange import Answer, parse
from cluster.openai.generation import Generation
from cluster.openai.logprobs import CompletionLogprobs, prompt_logprobs
from cluster.openai.prompts import Prompt, check_length
from cluster.openai.protocol import CompletionBody
from cluster.openai.sampling import choices_of, logprobs_of, max_tokens_of
from cluster.openai.serving import Serving
from cluster.text.detokenizer import make_detokenizer
from cluster.text.tokenizer import Tokenizer
from worker.wire.engine_pb2 import Sampling

_DEFAULT_MAX_TOKENS = 16


class Completions:
    """Handles the bodies of one front end's completion requests."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def handle(self, data: bytes, caller: Caller, seconds: float | None, entry: Entry) -> Answer:
        """Validate, tokenize, submit; return the whole answer or its events."""
        serving = self._serving
        serving.require_room(caller.name)
        body = parse(CompletionBody, data)
        serving.check(body)
        self._check(body)
        sampling = self._sampling(body)
        prompts = await serving.prompts.of_completion(
            body.prompt, add_special_tokens=body.add_special_tokens is not False
        )
        choices = len(prompts) * choices_of(body, serving.limits)
        if choices > serving.limits.max_batched_choices:
            raise invalid(
                f"n makes {choices} choices of all prompts; {serving.limits.max_batched_choices} are allowed", "n"
            )
        samplings = [self._sized(body, sampling, prompt) for prompt in prompts]
        response = _CompletionResponse(entry.request_id, body, serving, prompts)
        generation = serving.generation(body, caller, entry, prompts, samplings, seconds)
        return response.events(generation) if body.stream else await response.whole(generation)

    def _check(self, body: CompletionBody) -> None:
        if body.suffix:
            raise not_supported("suffix")
        if body.best_of is not None and body.best_of != (body.n or 1):
            raise not_supported("best_of other than n")
        if body.max_tokens == 0 and choices_of(body, self._serving.limits) > 1:
            raise invalid(f"n is {body.n}, but with max_tokens 0 all choices are the same", "n")

    def _sampling(self, body: CompletionBody) -> Sampling:
        sampling = self._serving.sampling(body)
        count = logprobs_of(body.logprobs, self._serving.limits, "logprobs")
        if count is not None:
            sampling.logprobs = count
            if body.echo:
                sampling.prompt_logprobs = max(count, sampling.prompt_logprobs)
        return sampling

    def _sized(self, body: CompletionBody, sampling: Sampling, prompt: Prompt) -> Sampling:
        """Return the sampling of one prompt of the batch: how much fits after it is its own."""
        model = self._serving.model
        check_length(len(prompt.token_ids), 0 if body.max_tokens == 0 else 1, model, "prompt")
        own = Sampling()
        own.CopyFrom(sampling)
        own.max_tokens = max_tokens_of(
            body.max_tokens, _DEFAULT_MAX_TOKENS, sampling.min_tokens, len(prompt.token_ids), model, "max_tokens"
        )
        return own


@dataclass(frozen=True, slots=True)
class _Echo:
    """A prompt as text: what ``echo`` puts before each of its choices. ``text_offsets`` has one entry per token."""

    text: str
    text_offsets: Sequence[int]

    @classmethod
    def of(cls, prompt: Prompt, tokenizer: Tokenizer, skip_special_tokens: bool) -> "_Echo":
        """Decode the prompt, up to its last whole character: what follows completes the character."""
        detokenizer = make_detokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
        text, offsets = [], []
        length = 0
        for token_id in prompt.token_ids:
            offsets.append(length)
            text.append(detokenizer.push(token_id))
            length += len(text[-1])
        return cls("".join(text) if prompt.text is None else prompt.text, offsets)


class _CompletionResponse:
    """The answer to one request, in either form."""

    def __init__(self, response_id: str, body: CompletionBody, serving: Serving, prompts: Sequence[Prompt]) -> None:
        self.response_id = response_id
        self._created = int(time.time())
        self._body = body
        self._tokenizer = serving.tokenizer
        self._model = serving.model.name
        self._prompts = prompts
        self._n = choices_of(body, serving.limits)
        skip = body.skip_special_tokens is not False
        self._echoes = [_Echo.of(prompt, serving.tokenizer, skip) if body.echo else _Echo("", ()) for prompt in prompts]

    async def whole(self, generation: Generation) -> bytes:
        """Return the JSON of all choices once they have ended."""
        collected: list[list[Delta]] = [[] for _ in range(len(self._prompts) * self._n)]
        async with aclosing(generation.deltas()) as messages:
            async for deltas in messages:
                for delta in deltas:
                    collected[delta.choice].append(delta)
        answer: dict[str, Any] = {
            "id": self.response_id,
            "object": "text_completion",
            "created": self._created,
            "model": self._model,
            "choices": [self._whole_choice(deltas, generation) for deltas in collected],
            "usage": generation.usage.as_dict(),
        }
        return to_json(answer)

    def _whole_choice(self, deltas: Sequence[Delta], generation: Generation) -> dict[str, Any]:
        choice = self._choice(deltas, generation, opening=True)
        prompt_index = choice["index"] // self._n
        if (count := self._body.prompt_logprobs) is not None:
            entries = generation.prompt_logprobs(prompt_index)
            choice["prompt_logprobs"] = prompt_logprobs(self._tokenizer, entries, count)
        if self._body.return_token_ids:
            choice["prompt_token_ids"] = self._prompts[prompt_index].token_ids
        return choice

    async def events(self, generation: Generation) -> AsyncGenerator[bytes, None]:
        """Yield the events of a stream; those of one engine message together."""
        writer = ChunkWriter(self.response_id, "text_completion", self._created, self._model)
        options = self._body.stream_options
        with_usage = options is not None and bool(options.include_usage)
        continuous = with_usage and options is not None and bool(options.continuous_usage_stats)
        usage = b"null" if with_usage else None
        opened: set[int] = set()
        async with aclosing(generation.deltas()) as messages:
            async for deltas in messages:
                if continuous:
                    usage = to_json(generation.usage.as_dict())
                events = []
                for delta in deltas:
                    opening = self._body.echo is True and delta.choice not in opened
                    if opening or self._is_news(delta):
                        opened.add(delta.choice)
                        events.append(writer.chunk(self._choice([delta], generation, opening), usage))
                if events:
                    yield b"".join(events)
        if with_usage:
            yield writer.usage(to_json(generation.usage.as_dict()))
        yield DONE

    def _is_news(self, delta: Delta) -> bool:
        wanted = self._body.logprobs is not None or self._body.return_token_ids
        return bool(delta.text or delta.finish_reason or (wanted and delta.token_ids))

    def _choice(self, deltas: Sequence[Delta], generation: Generation, opening: bool) -> dict[str, Any]:
        """Return what consecutive deltas add to a choice; ``opening`` puts the echo before it."""
        index = deltas[0].choice
        echo = self._echoes[index // self._n]
        text = "".join(delta.text for delta in deltas)
        choice: dict[str, Any] = {
            "index": index,
            "text": echo.text + text if opening else text,
            "logprobs": None,
            "finish_reason": deltas[-1].finish_reason,
            "stop_reason": deltas[-1].stop_reason,
        }
        if self._body.logprobs is not None:
            logprobs = CompletionLogprobs(self._tokenizer, self._body.logprobs)
            if opening and self._body.echo:
                self._add_prompt(logprobs, index // self._n, generation)
            for delta in deltas:
                for entry, offset in zip(delta.logprobs, delta.text_offsets, strict=True):
                    logprobs.add(entry, len(echo.text) + offset)
            choice["logprobs"] = logprobs.as_dict()
        if self._body.return_token_ids:
            choice["token_ids"] = [token_id for delta in deltas for token_id in delta.token_ids]
        return choice

    def _add_prompt(self, logprobs: CompletionLogprobs, prompt_index: int, generation: Generation) -> None:
        logprobs.add_first(self._prompts[prompt_index].token_ids[0])
        entries = generation.prompt_logprobs(prompt_index)
        for entry, offset in zip(entries, self._echoes[prompt_index].text_offsets[1:], strict=True):
            logprobs.add(entry, offset)
