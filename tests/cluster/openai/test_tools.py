"""Tools in a chat: what the prompt says of them, what engines are held to, and how calls come back."""

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from cluster.openai.app import build_app
from cluster.openai.limits import ApiLimits
from cluster.text.chat_template import ChatTemplate
from cluster.text.tokenizer import Tokenizer
from tests.cluster.openai.conftest import MODEL
from tests.cluster.scripted_engine import ScriptedEngine, always
from worker.wire.engine_pb2 import FINISH_REASON_STOP

pytestmark = pytest.mark.anyio

TEMPLATE = (
    "{% if tools %}T{{ tools | map(attribute='function') | map(attribute='name') | join('+') }} <tool_call> {% endif %}"
    "{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}!{{ c.function.name }}({{ c.function.arguments.x }}){% endfor %};{% endfor %}"
)
PATH = "/v1/chat/completions"
PARAMETERS = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}


def tool(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": PARAMETERS, **more}}


BODY = {"messages": [{"role": "user", "content": "hi"}], "tools": [tool("f"), tool("g")]}
CALLS = (
    'Well.\n<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>\n'
    '<tool_call>\n{"name": "g", "arguments": {"x": 2}}\n</tool_call>'
)


@pytest.fixture
def ask(tokenizer: Tokenizer) -> Callable[..., Any]:
    async def ask(body: dict[str, Any], answer: str = CALLS, path: str = PATH) -> tuple[httpx.Response, ScriptedEngine]:
        tokens = tokenizer.encode(answer, add_special_tokens=False)
        engine = ScriptedEngine(always([*tokens, 2], finish=FINISH_REASON_STOP, stop_token_id=2))
        app = build_app(
            engine=engine,
            tokenizer=tokenizer,
            chat_template=ChatTemplate(TEMPLATE, {}),
            model=MODEL.__class__(MODEL.name, 1024, MODEL.vocab_size, MODEL.eos_token_ids, MODEL.created),
            limits=ApiLimits(),
            metrics=CollectorRegistry(),
        )
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://front") as http:
            return await http.post(path, json=body), engine

    return ask


async def test_a_call_without_arguments_may_have_none(ask) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": ""}}
    turns = [{"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "x"}]
    response, _ = await ask({"messages": [*BODY["messages"], *turns]})
    assert response.status_code == 200, response.text


async def test_tools_are_counted_with_their_conversation(ask) -> None:
    response, engine = await ask(BODY)
    assert response.status_code == 200, response.text
    counted, _ = await ask(BODY, path="/tokenize")
    assert counted.json()["tokens"] == list(engine.submits[0].token_ids)


async def test_calls_come_back_as_calls(ask) -> None:
    response, _ = await ask(BODY)
    (choice,) = response.json()["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Well."
    assert [call["function"] for call in choice["message"]["tool_calls"]] == [
        {"name": "f", "arguments": '{"x": 1}'},
        {"name": "g", "arguments": '{"x": 2}'},
    ]


async def test_a_stream_has_the_same_calls(ask) -> None:
    response, _ = await ask(BODY | {"stream": True})
    events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    deltas = [event["choices"][0]["delta"] for event in events]
    assert "".join(delta.get("content") or "" for delta in deltas) == "Well."
    arguments, names = ["", ""], {}
    for call in (call for delta in deltas for call in delta.get("tool_calls", ())):
        arguments[call["index"]] += call["function"]["arguments"]
        if "name" in call["function"]:
            names[call["index"]] = call["function"]["name"]
            assert call["type"] == "function"
            assert call["id"]
    assert (arguments, names) == (['{"x": 1}', '{"x": 2}'], {0: "f", 1: "g"})
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"


async def test_text_stays_text(ask) -> None:
    response, _ = await ask(BODY, "No call.")
    (choice,) = response.json()["choices"]
    assert (choice["finish_reason"], choice["message"]) == ("stop", {"role": "assistant", "content": "No call."})


async def test_the_conversation_with_calls_reaches_the_template(ask, tokenizer: Tokenizer) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 5}'}}
    history = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "25"},
    ]
    _, engine = await ask(BODY | {"messages": history})
    prompt = tokenizer.decode(engine.submits[0].token_ids)
    assert prompt == "Tf+g <tool_call> user:hi;assistant:!f(5);tool:25;"
    _, engine = await ask(BODY | {"tool_choice": "none"})
    assert tokenizer.decode(engine.submits[0].token_ids) == "user:hi;"


@pytest.mark.parametrize(
    ("fields", "begins", "one"),
    [
        ({"tool_choice": "required"}, ["f", "g"], False),
        ({"tool_choice": "required", "parallel_tool_calls": False}, ["f", "g"], True),
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}}, ["g"], True),
        ({"tools": [tool("f", strict=True)]}, ["f"], False),
    ],
    ids=str,
)
async def test_what_the_model_is_held_to(ask, fields: dict[str, Any], begins: list[str], one: bool) -> None:
    _, engine = await ask(BODY | fields)
    tag = json.loads(engine.submits[0].sampling.grammar.structural_tag)["format"]
    assert [each["begin"] for each in tag["tags"]] == [
        f'<tool_call>\n{{"name": "{name}", "arguments": ' for name in begins
    ]
    assert all(each["content"] == {"type": "json_schema", "json_schema": PARAMETERS} for each in tag["tags"])
    assert tag["stop_after_first"] == one
    assert (tag["type"] == "triggered_tags") == ("tool_choice" not in fields)


@pytest.mark.parametrize("choice", [None, "auto", "none"])
async def test_a_free_choice_holds_the_model_to_nothing(ask, choice: str | None) -> None:
    _, engine = await ask(BODY | {"tool_choice": choice})
    assert not engine.submits[0].sampling.HasField("grammar")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [tool("f"), tool("f")]}, "tools.1.function.name"),
        ({"tools": [tool("not a name")]}, "tools.0.function.name"),
        ({"tool_choice": {"type": "function", "function": {"name": "h"}}}, "tool_choice"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [tool("f", parameters={"not": {}})], "tool_choice": "required"}, "tools.0.function.parameters"),
        ({"tool_choice": "required", "guided_regex": "a"}, "tools"),
    ],
    ids=str,
)
async def test_what_is_refused_names_its_field(ask, fields: dict[str, Any], param: str) -> None:
    response, engine = await ask(BODY | fields)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    assert not engine.submits
