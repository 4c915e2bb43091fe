"""What a request says its text must be, in OpenAI's words or vLLM's, as the grammar that engines are given.

``response_format`` is OpenAI's. vLLM takes ``structured_outputs``, and took its parts as ``guided_json`` and so on.
"""

import json
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field

from cluster.openai.errors import invalid, not_supported
from worker.grammar.grammar import Grammar, GrammarError, GrammarKind
from worker.grammar.json_schema import enforceable
from worker.grammar.pattern import check_regex
from worker.wire import engine_pb2 as wire

if TYPE_CHECKING:
    from cluster.openai.protocol import GenerationBody

ANY_OBJECT = '{"type": "object"}'

Asked = tuple[str, Grammar]
"""The field that asks, and for what."""


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", frozen=True)


class JsonSchemaPart(_Part):
    """``response_format.json_schema``. It is kept to whether ``strict`` or not."""

    name: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(_Part):
    """OpenAI's ``response_format``."""

    type: str
    json_schema: JsonSchemaPart | None = None


class StructuredOutputs(_Part):
    """vLLM's ``structured_outputs``: one of the first six."""

    json_: str | dict[str, Any] | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None
    disable_any_whitespace: bool | None = None


def grammar_of(body: "GenerationBody") -> Grammar | None:
    """Return what a request asks for, checked as far as it can be here; raise ``ApiError`` naming the field."""
    asked = list(_asked(body))
    if len(asked) > 1:
        raise invalid(f"{asked[0][0]} and {asked[1][0]} exclude each other", asked[1][0])
    for param, grammar in asked:
        check_grammar(grammar, param)
        return grammar
    return None


def check_grammar(grammar: Grammar, param: str) -> None:
    """Raise ``ApiError`` for a grammar that no engine would take, as far as that is quick to see."""
    try:
        grammar.check_size()
        if grammar.kind is GrammarKind.JSON_SCHEMA:
            enforceable(grammar.text)
        elif grammar.kind is GrammarKind.REGEX:
            check_regex(grammar.text)
    except GrammarError as error:
        raise invalid(f"{param}: {error}", param) from None


def to_wire(grammar: Grammar) -> wire.Grammar:
    """Return the grammar as engines are told it."""
    message = wire.Grammar(compact=grammar.compact)
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            message.json_schema = grammar.text
        case GrammarKind.REGEX:
            message.regex = grammar.text
        case GrammarKind.EBNF:
            message.ebnf = grammar.text
        case GrammarKind.STRUCTURAL_TAG:
            message.structural_tag = grammar.text
    return message


def structural_tag(content: dict[str, Any]) -> Grammar:
    """Return XGrammar's structural tag of some format."""
    text = json.dumps({"type": "structural_tag", "format": content})
    return Grammar(GrammarKind.STRUCTURAL_TAG, text)


def _asked(body: "GenerationBody") -> Iterator[Asked]:
    if body.response_format is not None:
        yield from _of_response_format(body.response_format)
    if body.guided_json is not None:
        yield "guided_json", Grammar(GrammarKind.JSON_SCHEMA, _schema_text(body.guided_json))
    if body.guided_regex is not None:
        yield "guided_regex", Grammar(GrammarKind.REGEX, body.guided_regex)
    if body.guided_choice is not None:
        yield "guided_choice", _one_of(body.guided_choice, "guided_choice")
    if body.guided_grammar is not None:
        yield "guided_grammar", Grammar(GrammarKind.EBNF, body.guided_grammar)
    if body.structured_outputs is not None:
        yield from _of_structured_outputs(body.structured_outputs)


def _of_response_format(wanted: ResponseFormat) -> Iterator[Asked]:
    match wanted.type:
        case "text":
            pass
        case "json_object":
            yield "response_format", Grammar(GrammarKind.JSON_SCHEMA, ANY_OBJECT)
        case "json_schema":
            if wanted.json_schema is None:
                raise invalid("response_format.json_schema is missing", "response_format.json_schema")
            text = json.dumps(wanted.json_schema.schema_)
            yield "response_format", Grammar(GrammarKind.JSON_SCHEMA, text)
        case other:
            raise not_supported(f"response_format.type {other!r:.60}")


def _of_structured_outputs(wanted: StructuredOutputs) -> Iterator[Asked]:
    for name, value in (wanted.model_extra or {}).items():
        if value not in (None, False):
            raise not_supported(f"structured_outputs.{name:.60}")
    prefix = "structured_outputs."
    compact = bool(wanted.disable_any_whitespace)
    if wanted.json_ is not None:
        yield prefix + "json", Grammar(GrammarKind.JSON_SCHEMA, _schema_text(wanted.json_), compact)
    if wanted.json_object:
        yield prefix + "json_object", Grammar(GrammarKind.JSON_SCHEMA, ANY_OBJECT, compact)
    if wanted.regex is not None:
        yield prefix + "regex", Grammar(GrammarKind.REGEX, wanted.regex)
    if wanted.choice is not None:
        yield prefix + "choice", _one_of(wanted.choice, prefix + "choice")
    if wanted.grammar is not None:
        yield prefix + "grammar", Grammar(GrammarKind.EBNF, wanted.grammar)
    if wanted.structural_tag is not None:
        yield prefix + "structural_tag", Grammar(GrammarKind.STRUCTURAL_TAG, wanted.structural_tag)


def _schema_text(schema: str | dict[str, Any]) -> str:
    return schema if isinstance(schema, str) else json.dumps(schema)


def _one_of(choices: Iterable[str], param: str) -> Grammar:
    elements = [{"type": "const_string", "value": choice} for choice in dict.fromkeys(choices)]
    if not elements or not all(element["value"] for element in elements):
        raise invalid(f"{param} holds no text, or an empty one", param)
    return structural_tag({"type": "or", "elements": elements})
