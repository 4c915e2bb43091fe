"""``POST /v1/chat/completions``."""

import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from pydantic_core import to_json

from cluster.openai.api_keys import Caller
from cluster.openai.choice import Delta
from cluster.openai.event_stream import DONE, ChunkWriter
from cluster.openai.exchange import Answer, parse
from cluster.openai.generation import Generation
from cluster.openai.logprobs import chat_logprobs, prompt_logprobs
from cluster.openai.prompts import Prompt, check_length
from cluster.openai.protocol import ChatCompletionBody
from cluster.openai.sampling import logprobs_of, max_tokens_of
from cluster.openai.serving import Serving


class ChatCompletions:
    """Handles the bodies of one front end's chat requests."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def handle(self, data: bytes, caller: Caller) -> Answer:
        """Validate, render, submit; return the whole answer or its events."""
        serving = self._serving
        serving.require_room(caller.name)
        body = parse(ChatCompletionBody, data)
        serving.check(body)
        top_logprobs = logprobs_of(body.top_logprobs or 0, serving.limits, "top_logprobs")
        sampling = serving.sampling(body)
        if body.logprobs:
            sampling.logprobs = top_logprobs or 0
        prompt = await serving.prompts.of_chat(
            body.messages,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            variables=body.chat_template_kwargs,
            add_special_tokens=bool(body.add_special_tokens),
        )
        check_length(len(prompt.token_ids), 1, serving.model, "messages")
        param = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        requested = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        sampling.max_tokens = max_tokens_of(
            requested, None, sampling.min_tokens, len(prompt.token_ids), serving.model, param
        )
        response = _ChatResponse(f"chatcmpl-{uuid.uuid4().hex}", body, serving, prompt)
        generation = serving.generation(body, caller, response.response_id, [prompt], [sampling])
        return response.events(generation) if body.stream else await response.whole(generation)


class _ChatResponse:
    """The answer to one request, in either form."""

    def __init__(self, response_id: str, body: ChatCompletionBody, serving: Serving, prompt: Prompt) -> None:
        self.response_id = response_id
        self._created = int(time.time())
        self._body = body
        self._tokenizer = serving.tokenizer
        self._model = serving.model.name
        self._prompt = prompt

    async def whole(self, generation: Generation) -> bytes:
        """Return the JSON of all choices once they have ended."""
        collected: list[list[Delta]] = [[] for _ in range(generation.plan.choices)]
        async with aclosing(generation.deltas()) as messages:
            async for deltas in messages:
                for delta in deltas:
                    collected[delta.choice].append(delta)
        answer: dict[str, Any] = {
            "id": self.response_id,
            "object": "chat.completion",
            "created": self._created,
            "model": self._model,
            "choices": [self._choice(index, deltas) for index, deltas in enumerate(collected)],
            "usage": generation.usage.as_dict(),
        }
        if (count := self._body.prompt_logprobs) is not None:
            answer["prompt_logprobs"] = prompt_logprobs(self._tokenizer, generation.prompt_logprobs(0), count)
        if self._body.return_token_ids:
            answer["prompt_token_ids"] = self._prompt.token_ids
        return to_json(answer)

    def _choice(self, index: int, deltas: Sequence[Delta]) -> dict[str, Any]:
        entries = [entry for delta in deltas for entry in delta.logprobs]
        choice: dict[str, Any] = {
            "index": index,
            "message": {"role": "assistant", "content": "".join(delta.text for delta in deltas)},
            "logprobs": chat_logprobs(self._tokenizer, entries) if self._body.logprobs else None,
            "finish_reason": deltas[-1].finish_reason,
            "stop_reason": deltas[-1].stop_reason,
        }
        if self._body.return_token_ids:
            choice["token_ids"] = [token_id for delta in deltas for token_id in delta.token_ids]
        return choice

    async def events(self, generation: Generation) -> AsyncGenerator[bytes, None]:
        """Yield the events of a stream; those of one engine message together."""
        writer = ChunkWriter(self.response_id, "chat.completion.chunk", self._created, self._model)
        options = self._body.stream_options
        with_usage = options is not None and bool(options.include_usage)
        continuous = with_usage and options is not None and bool(options.continuous_usage_stats)
        usage = b"null" if with_usage else None
        opening = [
            writer.chunk(_chunk_choice(index, {"role": "assistant", "content": ""}), usage)
            for index in range(generation.plan.choices)
        ]
        async with aclosing(generation.deltas()) as messages:
            async for deltas in messages:
                if continuous:
                    usage = to_json(generation.usage.as_dict())
                events = [writer.chunk(self._news(delta), usage) for delta in deltas if self._is_news(delta)]
                if opening or events:
                    yield b"".join(opening + events)
                    opening = []
        if with_usage:
            yield writer.usage(to_json(generation.usage.as_dict()))
        yield DONE

    def _is_news(self, delta: Delta) -> bool:
        wanted = self._body.logprobs or self._body.return_token_ids
        return bool(delta.text or delta.finish_reason or (wanted and delta.token_ids))

    def _news(self, delta: Delta) -> dict[str, Any]:
        choice = _chunk_choice(delta.choice, {"content": delta.text} if delta.text else {})
        if self._body.logprobs:
            choice["logprobs"] = chat_logprobs(self._tokenizer, delta.logprobs)
        if delta.finish_reason is not None:
            choice["finish_reason"] = delta.finish_reason
            choice["stop_reason"] = delta.stop_reason
        if self._body.return_token_ids:
            choice["token_ids"] = list(delta.token_ids)
        return choice


def _chunk_choice(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
