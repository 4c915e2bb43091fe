"""``POST /v1/chat/completions``."""

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from pydantic_core import to_json

from cluster.journal import Entry
from cluster.openai.api_keys import Caller
from cluster.openai.choice import Delta
from cluster.openai.error_code import ErrorCode
from cluster.openai.errors import invalid
from cluster.openai.event_stream import DONE, ChunkWriter
from cluster.openai.exchange import Answer, parse
from cluster.openai.generation import Generation
from cluster.openai.logprobs import chat_logprobs, prompt_logprobs
from cluster.openai.prompts import Prompt, check_length
from cluster.openai.protocol import ChatCompletionBody
from cluster.openai.sampling import logprobs_of, max_tokens_of
from cluster.openai.serving import Serving
from cluster.openai.structured_output import to_wire
from cluster.openai.tools import Tool, chunk_of, for_template, tool_grammar, usable_tools, whole_calls
from cluster.text.tool_calls import ToolCallFormat, ToolCallParser
from worker.wire.engine_pb2 import Sampling


class ChatCompletions:
    """Handles the bodies of one front end's chat requests."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def handle(self, data: bytes, caller: Caller, seconds: float | None, entry: Entry) -> Answer:
        """Validate, render, submit; return the whole answer or its events."""
        serving = self._serving
        serving.require_room(caller.name)
        body = parse(ChatCompletionBody, data)
        serving.check(body)
        top_logprobs = logprobs_of(body.top_logprobs or 0, serving.limits, "top_logprobs")
        tools = usable_tools(body.tools, body.tool_choice)
        sampling = serving.sampling(body)
        if body.logprobs:
            sampling.logprobs = top_logprobs or 0
        prompt = await serving.prompts.of_chat(
            body.messages,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            variables=body.chat_template_kwargs,
            add_special_tokens=bool(body.add_special_tokens),
            tools=for_template(tools) or None,
        )
        calls = self._tool_calls(body, tools, sampling) if tools else None
        check_length(len(prompt.token_ids), 1, serving.model, "messages")
        param = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        requested = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        sampling.max_tokens = max_tokens_of(
            requested, None, sampling.min_tokens, len(prompt.token_ids), serving.model, param
        )
        response = _ChatResponse(entry.request_id, body, serving, prompt, calls)
        generation = serving.generation(
            body,
            caller,
            entry,
            [prompt],
            [sampling],
            seconds,
            keep_special_tokens=calls is not None and serving.tokenizer.special_id(calls.opening) is not None,
        )
        return response.events(generation) if body.stream else await response.whole(generation)

    def _tool_calls(self, body: ChatCompletionBody, tools: list[Tool], sampling: Sampling) -> ToolCallFormat:
        """Return how the model writes calls, and keep it to them where it must."""
        format, name = self._serving.tool_calls, self._serving.model.name
        if format is None:
            raise invalid(
                f"tools: model {name}'s chat template does not show how it calls tools; --tool-call-parser says it",
                "tools",
                ErrorCode.UNSUPPORTED_PARAMETER,
            )
        grammar = tool_grammar(
            tools, body.tool_choice, body.parallel_tool_calls is not False, format, self._serving.tokenizer
        )
        if grammar is not None:
            if sampling.HasField("grammar"):
                raise invalid("tool_choice and strict tools exclude another grammar, such as response_format", "tools")
            sampling.grammar.CopyFrom(to_wire(grammar))
        return format


class _ChatResponse:
    """The answer to one request, in either form."""

    def __init__(
        self,
        response_id: str,
        body: ChatCompletionBody,
        serving: Serving,
        prompt: Prompt,
        tool_calls: ToolCallFormat | None,
    ) -> None:
        self._tool_calls = tool_calls
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
        message: dict[str, Any] = {"role": "assistant", "content": "".join(delta.text for delta in deltas)}
        finish_reason = deltas[-1].finish_reason
        if self._tool_calls is not None:
            parser = ToolCallParser(self._tool_calls)
            parsed = [parser.push(message["content"]), parser.finish()]
            message["content"] = "".join(part.content for part in parsed)
            if parser.calls:
                message["content"] = message["content"] or None
                message["tool_calls"] = whole_calls([call for part in parsed for call in part.calls])
                finish_reason = "tool_calls" if finish_reason == "stop" else finish_reason
        choice: dict[str, Any] = {
            "index": index,
            "message": message,
            "logprobs": chat_logprobs(self._tokenizer, entries) if self._body.logprobs else None,
            "finish_reason": finish_reason,
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
        parsers = [
            None if self._tool_calls is None else ToolCallParser(self._tool_calls)
            for _ in range(generation.plan.choices)
        ]
        async with aclosing(generation.deltas()) as messages:
            async for deltas in messages:
                if continuous:
                    usage = to_json(generation.usage.as_dict())
                events = [
                    writer.chunk(news, usage)
                    for delta in deltas
                    if (news := self._news(delta, parsers[delta.choice])) is not None
                ]
                if opening or events:
                    yield b"".join(opening + events)
                    opening = []
        if with_usage:
            yield writer.usage(to_json(generation.usage.as_dict()))
        yield DONE

    def _news(self, delta: Delta, parser: ToolCallParser | None) -> dict[str, Any] | None:
        """Return what a delta has for the client; None if that is nothing."""
        message: dict[str, Any] = {"content": delta.text} if delta.text else {}
        finish_reason = delta.finish_reason
        if parser is not None:
            message = _parsed(parser, delta)
            finish_reason = "tool_calls" if parser.calls and finish_reason == "stop" else finish_reason
        wanted = self._body.logprobs or self._body.return_token_ids
        if not (message or finish_reason or (wanted and delta.token_ids)):
            return None
        choice = _chunk_choice(delta.choice, message)
        if self._body.logprobs:
            choice["logprobs"] = chat_logprobs(self._tokenizer, delta.logprobs)
        if finish_reason is not None:
            choice["finish_reason"] = finish_reason
            choice["stop_reason"] = delta.stop_reason
        if self._body.return_token_ids:
            choice["token_ids"] = list(delta.token_ids)
        return choice


def _parsed(parser: ToolCallParser, delta: Delta) -> dict[str, Any]:
    parts = [parser.push(delta.text)] + ([parser.finish()] if delta.finish_reason is not None else [])
    content = "".join(part.content for part in parts)
    calls = [chunk_of(call) for part in parts for call in part.calls]
    return ({"content": content} if content else {}) | ({"tool_calls": calls} if calls else {})


def _chunk_choice(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
