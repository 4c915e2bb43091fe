"""The request bodies, as far as a field can be judged without knowing the model.

``null`` is the same as absent, as OpenAI has it. Unknown fields are ignored like everywhere; known ones that change
what a model says and that this server does not have are refused by name.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, FailFast, Field, model_validator
from typing_extensions import TypeAliasType

from cluster.openai.errors import ApiError, not_supported
from cluster.openai.structured_output import ResponseFormat, StructuredOutputs
from cluster.openai.tools import Tool, ToolChoice

Probability = Annotated[float, Field(ge=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
TokenId = Annotated[int, Field(ge=0, lt=1 << 32)]
Count = Annotated[int, Field(ge=0, lt=1 << 31)]
PositiveCount = Annotated[int, Field(ge=1, lt=1 << 31)]

# Lists end at their first wrong element. By name, because typing cannot hash FailFast, as it must in a union.
Texts = TypeAliasType("Texts", Annotated[list[str], FailFast()])
TokenIds = TypeAliasType("TokenIds", Annotated[list[TokenId], FailFast()])

# Values with which a field that is not supported asks for nothing.
_INERT: tuple[Any, ...] = (None, False, [], {}, "", 0)


class _Body(BaseModel):
    """One JSON document: strict types, finite numbers."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, frozen=True)

    # Field name to the values, beyond the inert ones, that need no support.
    not_yet: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    def refuse_unsupported(self) -> None:
        """Raise ``ApiError`` for the first field that asks for what does not exist yet."""
        for name, value in (self.model_extra or {}).items():
            if name in self.not_yet and value not in _INERT and value not in self.not_yet[name]:
                raise not_supported(name)


class StreamOptions(_Body):
    """What a stream carries besides text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationBody(_Body):
    """What both kinds of completion take: OpenAI's names, then those that vLLM added."""

    model: str | None = None
    max_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    n: PositiveCount | None = None
    stop: str | Texts | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    # Values are judged one by one later, so that a million wrong ones make one error.
    logit_bias: dict[str, Any] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 64)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    top_k: Annotated[int, Field(ge=-1, lt=1 << 31)] | None = None
    min_p: Probability | None = None
    repetition_penalty: Annotated[float, Field(ge=1e-3, le=1e3)] | None = None
    min_tokens: Count | None = None
    ignore_eos: bool | None = None
    stop_token_ids: TokenIds | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    prompt_logprobs: Count | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    cache_salt: Annotated[str, Field(max_length=256)] | None = None
    timeout: Annotated[float, Field(gt=0)] | None = None
    # Lower is served first, as in vLLM; it orders the requests of one caller.
    priority: Annotated[int, Field(ge=-1000, le=1000)] | None = None

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: Texts | None = None
    guided_grammar: str | None = None

    not_yet: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "allowed_token_ids": (),
        "bad_words": (),
        "chat_template": (),
        "documents": (),
        "guided_decoding_backend": ("auto", "xgrammar"),
        "guided_whitespace_pattern": (),
        "kv_transfer_params": (),
        "logits_processors": (),
        "logprob_token_ids": (),
        "lora": (),
        "lora_request": (),
        "prompt_embeds": (),
        "repetition_detection": (),
        "return_tokens_as_token_ids": (),
        "speculative": (),
        "speculative_config": (),
        "thinking_token_budget": (-1,),
        "truncate_prompt_tokens": (),
        "use_beam_search": (),
    }

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream to be true")
        if self.stream and self.prompt_logprobs is not None:
            raise ValueError("prompt_logprobs is not available together with stream")
        return self


class CompletionBody(GenerationBody):
    """``POST /v1/completions``."""

    # Text, token ids, or a list of either; told apart by ``prompts_of``, whose errors are better than a union's.
    prompt: str | list[Any]
    echo: bool | None = None
    logprobs: Count | None = None
    best_of: PositiveCount | None = None
    suffix: str | None = None


class ContentPart(_Body):
    """A piece of a message."""

    type: str
    text: str | None = None


ContentParts = TypeAliasType("ContentParts", Annotated[list[ContentPart], FailFast(), Field(max_length=4096)])


class CalledFunction(_Body):
    """A function that was called, with its arguments as JSON."""

    name: str
    arguments: str


class ToolCall(_Body):
    """A call in an earlier answer."""

    id: str
    type: Literal["function"]
    function: CalledFunction


ToolCalls = TypeAliasType("ToolCalls", Annotated[list[ToolCall], FailFast()])


class ChatMessage(_Body):
    """One turn. Fields beyond these reach the chat template as they are."""

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: str | ContentParts | None = None
    tool_calls: ToolCalls | None = None
    tool_call_id: str | None = None

    not_yet: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "audio": (),
        "function_call": (),
    }

    @property
    def about_tools(self) -> bool:
        """Whether it is a call of a tool or the answer to one."""
        return self.role == "tool" or bool(self.tool_calls)


Messages = TypeAliasType("Messages", Annotated[list[ChatMessage], FailFast(), Field(min_length=1, max_length=16384)])


class ChatTemplateBody(_Body):
    """What decides how a conversation becomes a prompt."""

    messages: Messages
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _one_ending(self) -> Self:
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("continue_final_message and add_generation_prompt exclude each other")
        return self


class ChatCompletionBody(GenerationBody, ChatTemplateBody):
    """``POST /v1/chat/completions``."""

    max_tokens: PositiveCount | None = None
    max_completion_tokens: PositiveCount | None = None
    logprobs: bool | None = None
    top_logprobs: Count | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    not_yet: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **GenerationBody.not_yet,
        "audio": (),
        "function_call": ("none",),
        "functions": (),
        "modalities": (["text"],),
        "web_search_options": (),
    }

    @model_validator(mode="after")
    def _top_needs_logprobs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs to be true")
        return self


class TokenizeBody(_Body):
    """``POST /tokenize``: a text, or a conversation that is rendered first."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _one_input(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("either prompt or messages is needed, and not both")
        return self


class DetokenizeBody(_Body):
    """``POST /detokenize``."""

    model: str | None = None
    tokens: TokenIds


def refuse_unsupported_messages(messages: list[ChatMessage]) -> None:
    """Raise ``ApiError`` for functions, tools' predecessors, and for content that is not text."""
    for index, message in enumerate(messages):
        if message.role == "function":
            raise not_supported(f"messages.{index}.role {message.role!r}")
        try:
            message.refuse_unsupported()
        except ApiError as error:
            raise not_supported(f"messages.{index}.{error.param}") from None
        for part in message.content if isinstance(message.content, list) else ():
            if part.type not in ("text", "input_text", "output_text", "refusal"):
                raise not_supported(f"messages.{index}.content type {part.type!r}")
