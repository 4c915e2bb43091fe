"""What engines are asked for in the name of structured output, and what is refused before."""

import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import httpx
import pytest

from tests.cluster.scripted_engine import ScriptedEngine, always
from worker.wire.engine_pb2 import ERROR_KIND_INVALID, FINISH_REASON_ERROR, Error, Output

pytestmark = pytest.mark.anyio

Connect = Callable[..., AbstractAsyncContextManager[httpx.AsyncClient]]

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
CHAT = "/v1/chat/completions"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3},
    "/v1/completions": {"prompt": "hi", "max_tokens": 3},
}


def choice_of(*texts: str) -> dict[str, Any]:
    elements = [{"type": "const_string", "value": text} for text in texts]
    return {"type": "structural_tag", "format": {"type": "or", "elements": elements}}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("fields", "kind", "text", "compact"),
    [
        ({"response_format": {"type": "json_object"}}, "json_schema", {"type": "object"}, False),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "strict": True, "schema": SCHEMA},
                }
            },
            "json_schema",
            SCHEMA,
            False,
        ),
        ({"guided_json": SCHEMA}, "json_schema", SCHEMA, False),
        ({"guided_json": json.dumps(SCHEMA)}, "json_schema", SCHEMA, False),
        ({"guided_regex": "a+"}, "regex", "a+", False),
        ({"guided_choice": ["x", "y", "x"]}, "structural_tag", choice_of("x", "y"), False),
        ({"guided_grammar": 'root ::= "a"'}, "ebnf", 'root ::= "a"', False),
        (
            {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
            "json_schema",
            SCHEMA,
            True,
        ),
        ({"structured_outputs": {"json_object": True}}, "json_schema", {"type": "object"}, False),
        ({"structured_outputs": {"regex": "a+"}}, "regex", "a+", False),
        ({"structured_outputs": {"choice": ["x"]}}, "structural_tag", choice_of("x"), False),
        ({"structured_outputs": {"grammar": 'root ::= "a"'}}, "ebnf", 'root ::= "a"', False),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structural_tag", {}, False),
    ],
    ids=str,
)
async def test_every_way_to_ask(
    client: Connect, path: str, fields: dict[str, Any], kind: str, text: Any, compact: bool
) -> None:
    engine = ScriptedEngine(always([5, 6, 7]))
    async with client(engine) as http:
        assert (await http.post(path, json=BODIES[path] | fields)).status_code == 200
    grammar = engine.submits[0].sampling.grammar
    assert grammar.WhichOneof("source") == kind
    stated = getattr(grammar, kind)
    assert (json.loads(stated) if isinstance(text, dict) else stated) == text
    assert grammar.compact == compact


@pytest.mark.parametrize(
    "fields", [{}, {"response_format": {"type": "text"}}, {"structured_outputs": {}}, {"guided_json": None}], ids=str
)
async def test_nothing_is_asked_for(client: Connect, fields: dict[str, Any]) -> None:
    engine = ScriptedEngine(always([5, 6, 7]))
    async with client(engine) as http:
        assert (await http.post(CHAT, json=BODIES[CHAT] | fields)).status_code == 200
    assert not engine.submits[0].sampling.HasField("grammar")


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type 'xml'", "not supported yet"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "missing"),
        ({"response_format": "json"}, "response_format", ""),
        ({"guided_json": {"not": {}}}, "guided_json", "not is not supported"),
        ({"guided_json": "{"}, "guided_json", "not JSON"),
        ({"guided_json": {"type": "string", "title": "t" * 70_000}}, "guided_json", "at most 65536"),
        ({"guided_regex": "(?=a)"}, "guided_regex", "lookarounds"),
        ({"guided_regex": ""}, "guided_regex", "empty"),
        ({"guided_choice": []}, "guided_choice", "no text"),
        ({"guided_choice": [1]}, "guided_choice.0", "string"),
        ({"guided_regex": "a", "guided_json": {}}, "guided_regex", "exclude each other"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs.regex", "exclude each other"),
        ({"structured_outputs": {"whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern", "not supported"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "not supported"),
    ],
    ids=str,
)
async def test_what_is_refused_names_its_field(
    client: Connect, fields: dict[str, Any], param: str, message: str
) -> None:
    engine = ScriptedEngine(always([5]))
    async with client(engine) as http:
        response = await http.post(CHAT, json=BODIES[CHAT] | fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert message in response.json()["error"]["message"]
    assert not engine.submits


@pytest.mark.parametrize("stream", [False, True])
async def test_what_the_engine_refuses_is_a_400(client: Connect, stream: bool) -> None:
    error = Error(kind=ERROR_KIND_INVALID, message="the regex cannot be used")
    engine = ScriptedEngine(
        lambda submit: [[Output(request_id=submit.request_id, finish_reason=FINISH_REASON_ERROR, error=error)]]
    )
    async with client(engine) as http:
        response = await http.post(CHAT, json=BODIES[CHAT] | {"guided_regex": "a{1}", "stream": stream})
    assert response.status_code == 400
    assert response.json()["error"]["message"] == "the regex cannot be used"
