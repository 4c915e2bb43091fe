"""Which schemas are let through, and what XGrammar makes of those."""

import contextlib
import json
import re
from typing import Any

import pytest
import xgrammar
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.grammar.grammar import GrammarError
from worker.grammar.json_schema import TYPED, WHOLE, enforceable
from worker.grammar.pattern import check_regex, json_pattern


def accepts(schema: Any, text: str | bytes) -> bool:
    """Whether a text follows the grammar of a schema that was let through."""
    info = xgrammar.TokenizerInfo([bytes([byte]) for byte in range(256)], stop_token_ids=[])
    compiler = xgrammar.GrammarCompiler(info, max_threads=1)
    matcher = xgrammar.GrammarMatcher(
        compiler.compile_json_schema(enforceable(json.dumps(schema)).text, any_whitespace=False)
    )
    return matcher.accept_string(text) and matcher.is_completed()


def obj(**keywords: Any) -> dict[str, Any]:
    return {"type": "object", **keywords}


A = {"a": {"type": "integer"}}


@pytest.mark.parametrize(
    ("schema", "place", "keyword"),
    [
        ({"not": {}}, "#", "not"),
        ({"type": "integer", "if": {}, "then": {}}, "#", "if"),
        (obj(properties={"x": {"type": "array", "uniqueItems": True}}), "#/properties/x", "uniqueItems"),
        ({"type": "array", "contains": {}}, "#", "contains"),
        ({"type": "array", "items": [{}]}, "#", "items"),
        (obj(dependentRequired={"a": ["b"]}), "#", "dependentRequired"),
        ({"allOf": [{"type": "integer"}, {"minimum": 3}]}, "#", "allOf"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "#", "oneOf"),
        ({"oneOf": [{"const": 1}, {"enum": [2, 1.0]}]}, "#", "oneOf"),
        ({"oneOf": [obj(properties=A), obj(properties=A)]}, "#", "oneOf"),
        ({"anyOf": [{"type": "string"}], "maxLength": 3}, "#", "maxLength"),
        (obj(anyOf=[{"required": ["a"]}], properties=A), "#", "properties"),
        ({"$ref": "#/$defs/a", "minimum": 3, "$defs": {"a": {"type": "integer"}}}, "#", "minimum"),
        ({"$ref": "http://elsewhere/schema"}, "#", "$ref"),
        ({"$ref": "#/$defs/missing"}, "#", "$ref"),
        ({"$ref": "#/examples/0", "examples": [{}]}, "#", "$ref"),
        ({"$ref": "#anchor"}, "#", "$ref"),
        ({"type": "string", "pattern": "^a+$", "maxLength": 3}, "#", "maxLength"),
        ({"type": "string", "format": "date", "minLength": 3}, "#", "minLength"),
        ({"type": "string", "pattern": "^(?!x)"}, "#", "pattern"),
        ({"type": "string", "minLength": 3, "maxLength": 2}, "#", "minLength"),
        ({"type": "number", "multipleOf": 0.5}, "#", "multipleOf"),
        ({"type": "integer", "multipleOf": 7, "maximum": 70}, "#", "multipleOf"),
        ({"type": "integer", "minimum": "3"}, "#", "minimum"),
        ({"type": "integer", "exclusiveMinimum": True}, "#", "exclusiveMinimum"),
        ({"type": "text"}, "#", "type"),
        ({"type": []}, "#", "type"),
        ({"type": "string", "enum": ["a", 1]}, "#", "enum"),
        ({"enum": []}, "#", "enum"),
        ({"anyOf": []}, "#", "anyOf"),
        (obj(properties=A, required=["b"], additionalProperties=False), "#", "required"),
        (obj(additionalProperties={"type": "null"}, minProperties=2), "#", "minProperties"),
        (obj(patternProperties={"a": {}, "b": {}}), "#", "patternProperties"),
        (obj(propertyNames={"maxLength": 1}, properties=A), "#", "propertyNames"),
        (obj(properties={"x": {"$id": "other"}}), "#/properties/x", "$id"),
        (obj(properties=[]), "#", "properties"),
    ],
    ids=str,
)
def test_what_would_be_ignored_is_refused_by_name(schema: Any, place: str, keyword: str) -> None:
    with pytest.raises(GrammarError) as refused:
        enforceable(json.dumps(schema))
    assert re.match(rf"JSON schema, {re.escape(place)}: {re.escape(keyword)} ", str(refused.value)), refused.value


@pytest.mark.parametrize(
    "text", ["", "{", "[1]", '"x"', "NaN", '{"minimum": NaN}', "[" * 5000, '{"a":' * 5000], ids=str
)
def test_what_is_no_schema(text: str) -> None:
    with pytest.raises(GrammarError, match="JSON schema"):
        enforceable(text)


def test_depth_is_limited() -> None:
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(100):
        schema = {"type": "array", "items": schema}
    with pytest.raises(GrammarError, match="more than 64 deep"):
        enforceable(json.dumps(schema))


@pytest.mark.timeout(60)
def test_schemas_within_schemas_are_looked_at_once() -> None:
    schema: Any = {"type": "string"}
    for _ in range(60):
        schema = {"allOf": [schema]}
    assert json.loads(enforceable(json.dumps(schema)).text) == schema


def test_values_that_are_nested_too_deeply_are_refused_wherever_they_are() -> None:
    deep = ["[" * depth + "]" * depth for depth in (800, 799)]
    schema = f'{{"oneOf": [{{"const": {deep[0]}}}, {{"const": {deep[1]}}}]}}'
    for _ in range(60):
        schema = f'{{"anyOf": [{schema}]}}'
    with pytest.raises(GrammarError, match="nested more than"):
        enforceable(schema)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("alternatives", [2, 60])
def test_long_lists_of_values_are_told_apart_quickly(alternatives: int) -> None:
    each = 9_000 // alternatives
    enums = [{"enum": list(range(i * each, (i + 1) * each))} for i in range(alternatives)]
    enforceable(json.dumps({"oneOf": [*enums, {"type": "string"}]}))
    with pytest.raises(GrammarError, match="oneOf"):
        enforceable(json.dumps({"oneOf": [*enums, {"const": 3.0}]}))


@pytest.mark.parametrize(("one", "other"), [(0, -0.0), ({"a": 1, "b": [2]}, {"b": [2.0], "a": 1.0})], ids=repr)
def test_equal_values_are_one_however_they_are_written(one: Any, other: Any) -> None:
    with pytest.raises(GrammarError, match="oneOf"):
        enforceable(json.dumps({"oneOf": [{"const": one}, {"const": other}]}))


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        # Lengths count characters; control characters and halves of surrogate pairs are none.
        (
            {"minLength": 2, "maxLength": 3},
            ['"ab"', '"é😀"', '"\\n\\""', '"a\\\\b"'],
            ['"a"', '"abcd"', '"a\x08"', '"a"b"', b'"a\xed\xa0\x80"'],
        ),
        ({"type": "string", "pattern": "^[ä-ü]ß[^a]$"}, ['"öß!"'], ['"öß""', '"öß\x08"', '"öß\\n"', '"öß\\"']),
        (obj(patternProperties={"^.[^a]$": {}}), ['{"xy": 1}'], ['{"x"": 1}', '{"x\x08": 1}', '{"xa": 1}']),
        ({"type": "string", "pattern": "b"}, ['"b"'], ['"a"', '"c"']),
        ({"type": "string", "format": "ipv4"}, ['"10.0.255.1"'], ['"10.00.255.1"', '"1.2.3"', '"1.2.3.256"']),
        ({"type": "string", "format": "unheard-of"}, ['"x"'], ["1"]),
        ({"type": "null", "minLength": 3}, ["null"], ['"abc"']),
        ({"minimum": 3}, ["3", "4.5"], ["2", '"x"']),
        ({"type": "integer", "minimum": 1.5, "exclusiveMaximum": 4}, ["2", "3"], ["1", "4"]),
        ({"type": "integer", "multipleOf": 7}, ["14", "-7", "0"], ["15", "20"]),
        (obj(required=["b"]), ['{"b": 1}'], ["{}"]),
        (obj(properties=A, required=["b"], additionalProperties={"type": "null"}), ['{"b": null}'], ['{"a": 1}']),
        (obj(properties=A, additionalProperties={"type": "boolean"}), ['{"a": 1, "b": true}'], ['{"a": 1, "a": true}']),
        (obj(propertyNames={"maxLength": 2}), ['{"ab": 1}'], ['{"abc": 1}', '{"\x08": 1}']),
        ({"oneOf": [{"type": "integer"}, {"type": ["null", "string"]}]}, ["1", "null"], ["true"]),
        ({"allOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"const": 5}}, "description": "d"}, ["5"], ["6"]),
        ({"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"const": 5}}}, ["5"], ["6"]),
        ({"type": "array", "uniqueItems": False, "maxItems": 1}, ["[]", "[1]"], ["[1, 1]"]),
        (True, ["1", '{"a": []}'], ["", "{"]),
    ],
    ids=str,
)
def test_what_is_let_through_means_what_it_says(schema: Any, good: list[str], bad: list[str | bytes]) -> None:
    assert all(accepts(schema, text) for text in good)
    assert not any(accepts(schema, text) for text in bad)


@pytest.mark.parametrize(
    "regex",
    [
        "x^b",
        "a$b",
        r"\(^b",
        r"a\|^b",
        r"\(?:^b",
        "(?<=a)b",
        "(?!a)b",
        "[a",
        "\\",
        "\\bword",
        "\\p{L}",
        r"\ud800",
        "\\cA",
    ],
)
def test_expressions_that_would_be_misunderstood(regex: str) -> None:
    with pytest.raises(GrammarError):
        check_regex(regex)


@pytest.mark.parametrize(
    "regex", ["^a|b$", "^(?:^a$|b)$", r"(^a|\\(^b))", r"[\^$a]\$", "(?:a)(?<x>b)", "a{2,3}?", r"\d\W\x41\u{1F600}"]
)
def test_expressions_that_are_understood(regex: str) -> None:
    check_regex(regex)


@pytest.mark.parametrize("pattern", ['^["]$', r"^[a\\]$", "^[\n]$", "^\x01$", '"', r"\x22", r"\n", r"\u{a}", r"\\"])
def test_patterns_that_json_text_cannot_have(pattern: str) -> None:
    with pytest.raises(GrammarError):
        json_pattern(pattern)


def test_patterns_stay_what_they_are_where_json_escapes_nothing() -> None:
    for pattern in (r"^[a-z]+\d{2,}(x|y)?$", r"[^\"\\\n]", r"a\/b", r"\u00e4"):
        assert json_pattern(pattern) == pattern
    assert json_pattern("größ[eE]") == r"gr\u{f6}\u{df}[eE]"


KEYWORDS = [*TYPED, *WHOLE, "type", "$defs", "not", "title"]
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats(allow_nan=False) | st.sampled_from(["a", "#", "object"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYWORDS), inner, max_size=3),
    max_leaves=12,
)


@given(schema=json_values)
@settings(max_examples=300)
def test_any_json_is_let_through_or_refused(schema: Any) -> None:
    with contextlib.suppress(GrammarError):
        json.loads(enforceable(json.dumps(schema)).text)
