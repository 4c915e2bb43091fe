"""Tools of a chat request: what the chat template is told, and what the model must say if it has to call one."""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from cluster.openai.errors import invalid
from cluster.openai.structured_output import check_grammar, structural_tag
from cluster.text.tokenizer import Tokenizer
from cluster.text.tool_calls import CallDelta, ToolCallFormat
from worker.grammar.grammar import Grammar, GrammarKind

_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", frozen=True)


class FunctionTool(_Part):
    """A function. With ``strict`` its arguments are kept to ``parameters`` also where the model need not call it."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(_Part):
    """One of ``tools``."""

    type: Literal["function"]
    function: FunctionTool


class NamedFunction(_Part):
    """The function of a ``NamedToolChoice``."""

    name: str


class NamedToolChoice(_Part):
    """``tool_choice`` of one function."""

    type: Literal["function"]
    function: NamedFunction


ToolChoice = Literal["none", "auto", "required"] | NamedToolChoice


def usable_tools(tools: list[Tool] | None, choice: ToolChoice | None) -> list[Tool]:
    """Return the tools that the model is to know of; raise ``ApiError`` for a choice among others."""
    if not tools:
        if choice not in (None, "none", "auto"):
            raise invalid("tool_choice wants a tool, but there are no tools", "tool_choice")
        return []
    names: set[str] = set()
    for index, name in enumerate(tool.function.name for tool in tools):
        if name in names:
            raise invalid(f"tools.{index}.function.name: {name} is there already", f"tools.{index}.function.name")
        names.add(name)
    if isinstance(choice, NamedToolChoice) and choice.function.name not in names:
        raise invalid(f"tool_choice wants {choice.function.name!r:.80}, which is not among the tools", "tool_choice")
    return [] if choice == "none" else list(tools)


def for_template(tools: list[Tool]) -> list[dict[str, Any]]:
    """Return the tools as chat templates know them, which is as the client wrote them."""
    return [tool.model_dump(exclude_unset=True) for tool in tools]


def tool_grammar(
    tools: list[Tool], choice: ToolChoice | None, parallel: bool, format: ToolCallFormat, tokenizer: Tokenizer
) -> Grammar | None:
    """Return what keeps the model to calls of the tools that it must make, or to those that it makes; None for neither.

    Raises ``ApiError`` for parameters that cannot be enforced.
    """
    if choice in (None, "auto"):
        strict = [tool for tool in tools if tool.function.strict]
        if not (strict and format.begin):
            return None
        trigger = format.begin.rstrip()
        tags = [_call(tool, index, format) for index, tool in enumerate(tools)]
        content = {"type": "triggered_tags", "triggers": [trigger], "tags": tags, "stop_after_first": not parallel}
        return structural_tag(content)
    if isinstance(choice, NamedToolChoice):
        tools = [tool for tool in tools if tool.function.name == choice.function.name]
        parallel = False
    calls: dict[str, Any] = {
        "type": "tags_with_separator",
        "tags": [_call(tool, index, format) for index, tool in enumerate(tools)],
        "separator": format.separator,
        "at_least_one": True,
        "stop_after_first": not parallel,
    }
    if not format.opening:
        return structural_tag(calls)
    special = tokenizer.special_id(format.opening)
    opening = _text(format.opening) if special is None else {"type": "token", "token": special}
    return structural_tag({"type": "sequence", "elements": [opening, _text("["), calls, _text("]")]})


def chunk_of(call: CallDelta) -> dict[str, Any]:
    """Return what a stream tells of a call."""
    function = {"arguments": call.arguments} if call.name is None else {"name": call.name, "arguments": call.arguments}
    begun = {} if call.call_id is None else {"id": call.call_id, "type": "function"}
    return {"index": call.index, **begun, "function": function}


def whole_calls(deltas: Sequence[CallDelta]) -> list[dict[str, Any]]:
    """Return calls as an answer lists them."""
    calls: list[dict[str, Any]] = [
        {"id": delta.call_id, "type": "function", "function": {"name": delta.name, "arguments": ""}}
        for delta in deltas
        if delta.call_id is not None
    ]
    for index, call in enumerate(calls):
        call["function"]["arguments"] = "".join(delta.arguments for delta in deltas if delta.index == index)
    return calls


def _call(tool: Tool, index: int, format: ToolCallFormat) -> dict[str, Any]:
    function = tool.function
    parameters = _NO_PARAMETERS if function.parameters is None else function.parameters
    param = f"tools.{index}.function.parameters"
    check_grammar(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(parameters)), param)
    return {
        "type": "tag",
        "begin": f'{format.begin}{{"name": {json.dumps(function.name)}, "{format.arguments}": ',
        "content": {"type": "json_schema", "json_schema": parameters},
        "end": "}" + format.end,
    }


def _text(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}
