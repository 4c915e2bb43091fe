"""Prompts as token ids: what a request's text, ids or conversation becomes before an engine sees it."""

import asyncio
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from cluster.openai.error_code import ErrorCode
from cluster.openai.errors import ApiError, invalid, not_supported
from cluster.openai.limits import ApiLimits, ModelCard
from cluster.openai.protocol import ChatMessage, ToolCall, refuse_unsupported_messages
from cluster.text.chat_template import ChatTemplate, ConversationError
from cluster.text.tokenizer import TextError, Tokenizer

T = TypeVar("T")

# Up to here a thread costs more than it gains; beyond, tokenizing would hold up everyone's tokens.
_INLINE_CHARACTERS = 2048
_THREADS = 2
_QUEUED_TEXTS = 256


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt. ``text`` is what the client wrote, or None for token ids."""

    token_ids: list[int]
    text: str | None


class PromptEncoder:
    """Makes prompts for one front end. Its errors are ``ApiError``s that name the field.

    Long texts are handled on threads of its own, so that they delay only each other. ``close`` ends the threads.
    """

    def __init__(
        self, tokenizer: Tokenizer, chat_template: ChatTemplate | None, model: ModelCard, limits: ApiLimits
    ) -> None:
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self._model = model
        self._limits = limits
        self._threads = ThreadPoolExecutor(_THREADS, "prompt-encoder")
        self._queued = 0

    def close(self) -> None:
        """End the threads after the work that they have."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def of_completion(self, prompt: str | list[Any], *, add_special_tokens: bool) -> list[Prompt]:
        """Return the prompts of a completion: a text, texts, token ids, or lists of token ids."""
        if not prompt:
            raise invalid("prompt is empty", "prompt")
        items: list[Any] = [prompt] if isinstance(prompt, str) or type(prompt[0]) is int else prompt
        if len(items) > self._limits.max_batched_prompts:
            raise invalid(
                f"prompt holds {len(items)} prompts; at most {self._limits.max_batched_prompts} are allowed", "prompt"
            )
        return [await self._of_item(item, add_special_tokens) for item in items]

    async def of_text(self, text: str, *, add_special_tokens: bool, param: str = "prompt") -> Prompt:
        """Return the prompt of one text."""
        self._check_characters(len(text), param)

        def encode() -> list[int]:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

        try:
            return Prompt(await self._run(len(text), encode), text)
        except TextError as error:
            raise invalid(f"{param}: {error}", param) from None

    async def of_chat(
        self,
        messages: list[ChatMessage],
        *,
        add_generation_prompt: bool | None,
        continue_final_message: bool | None,
        variables: dict[str, Any] | None,
        add_special_tokens: bool,
        tools: list[dict[str, Any]] | None = None,
    ) -> Prompt:
        """Return the prompt that the model's chat template makes of a conversation."""
        template = self._chat_template
        if template is None:
            raise invalid(
                f"model {self._model.name} has no chat template; use /v1/completions",
                "messages",
                ErrorCode.NO_CHAT_TEMPLATE,
            )
        refuse_unsupported_messages(messages)
        self._require_tools(template, messages, tools)
        turns = [_as_turn(message, index) for index, message in enumerate(messages)]
        characters = sum(len(turn["content"]) for turn in turns)
        self._check_characters(characters, "messages")

        def render() -> str:
            return template.render(
                turns,
                add_generation_prompt=not continue_final_message
                if add_generation_prompt is None
                else add_generation_prompt,
                continue_final_message=bool(continue_final_message),
                tools=tools,
                variables=variables,
            )

        size = characters + (_INLINE_CHARACTERS if tools else 0)
        try:
            text = await self._run(size, render)
        except ConversationError as error:
            raise invalid(f"messages: {error}", "messages") from None
        return await self.of_text(text, add_special_tokens=add_special_tokens, param="messages")

    def _require_tools(
        self, template: ChatTemplate, messages: list[ChatMessage], tools: list[dict[str, Any]] | None
    ) -> None:
        if template.knows_tools:
            return
        param = "tools" if tools else None
        param = param or next((f"messages.{i}" for i, message in enumerate(messages) if message.about_tools), None)
        if param is not None:
            raise invalid(
                f"{param}: the chat template of model {self._model.name} knows no tools",
                param,
                ErrorCode.UNSUPPORTED_PARAMETER,
            )

    def _check_characters(self, characters: int, param: str) -> None:
        most = self._limits.max_characters_per_token * self._model.max_model_len
        if characters > most:
            raise invalid(
                f"{param} has {characters} characters; at most {most} are allowed, "
                f"{self._limits.max_characters_per_token} for each token of the model's context (max_model_len)",
                param,
                ErrorCode.CONTEXT_LENGTH_EXCEEDED,
            )

    async def _of_item(self, item: Any, add_special_tokens: bool) -> Prompt:
        if isinstance(item, str):
            return await self.of_text(item, add_special_tokens=add_special_tokens)
        # The length first: what cannot be used is not worth looking through.
        if isinstance(item, list):
            check_length(len(item), 0, self._model, "prompt")
        if isinstance(item, list) and all(type(token_id) is int for token_id in item):
            vocab_size = self._model.vocab_size
            wrong = next((token_id for token_id in item if not 0 <= token_id < vocab_size), None)
            if wrong is not None:
                raise invalid(
                    f"prompt: token id {_shortened(wrong)} is not in the model's vocabulary of {vocab_size}", "prompt"
                )
            return Prompt(item, None)
        raise invalid("prompt must be a text, a list of texts, a list of token ids, or a list of such lists", "prompt")

    async def _run(self, characters: int, work: Callable[[], T]) -> T:
        if characters <= _INLINE_CHARACTERS:
            return work()
        if self._queued >= _QUEUED_TEXTS:
            raise ApiError(
                ErrorCode.OVERLOADED, f"{self._queued} long prompts wait to be tokenized already", retry_after=1
            )
        self._queued += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        finally:
            self._queued -= 1


def check_length(length: int, reserved: int, model: ModelCard, param: str) -> None:
    """Refuse a prompt of ``length`` tokens that is empty or leaves less than ``reserved`` of the model's context."""
    if length == 0:
        raise invalid(f"{param} is empty: it has no tokens", param)
    if length + reserved > model.max_model_len:
        room = f" and {reserved} must be left to generate" if reserved else ""
        raise invalid(
            f"{param} has {length} tokens{room}, but the model's context (max_model_len) holds {model.max_model_len}",
            param,
            ErrorCode.CONTEXT_LENGTH_EXCEEDED,
        )


def _shortened(value: int) -> str:
    return str(value) if value.bit_length() < 100 else "that large"


def _as_turn(message: ChatMessage, index: int) -> dict[str, Any]:
    """Return what the chat template sees: content is always text, parts of it are joined by line breaks."""
    content = "" if message.content is None and message.tool_calls else message.content
    if content is None:
        raise invalid(f"messages.{index}.content is missing", f"messages.{index}.content")
    if isinstance(content, list):
        for number, part in enumerate(content):
            if part.text is None:
                param = f"messages.{index}.content.{number}.text"
                raise (
                    not_supported(f"{param}: {part.type}")
                    if part.type == "refusal"
                    else invalid(f"{param} is missing", param)
                )
        content = "\n".join(part.text or "" for part in content)
    extra = {name: value for name, value in (message.model_extra or {}).items() if value is not None}
    if message.tool_call_id is not None:
        extra["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        extra["tool_calls"] = [
            _as_call(call, f"messages.{index}.tool_calls.{i}") for i, call in enumerate(message.tool_calls)
        ]
    return extra | {"role": message.role, "content": content}


def _as_call(call: ToolCall, param: str) -> dict[str, Any]:
    """Return what the chat template sees of a call: arguments as an object, as templates expect them."""
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise invalid(f"{param}.function.arguments is not a JSON object", f"{param}.function.arguments")
    return {"id": call.id, "type": call.type, "function": {"name": call.function.name, "arguments": arguments}}
