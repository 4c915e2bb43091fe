"""Schemas and tools through the official client and a whole cluster: what it says, one engine alone says too."""

import json
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field

from cluster.text.tokenizer import Tokenizer
from tests.cluster.system.conftest import Serving
from tests.conftest import EngineProcesses
from tests.engine_client import EngineClient
from tests.engine_process import RankProcesses
from tests.replicas import colocated
from worker.config import EngineConfig, Role
from worker.wire import engine_pb2 as wire

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "Berlin", "Größe"]},
        "size": {"type": "integer", "minimum": 1, "maximum": 99},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 4}, "maxItems": 2},
    },
    "required": ["city", "size", "tags"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA, "strict": True}}
MESSAGES = [{"role": "user", "content": "What is the capital of France? Answer in JSON."}]
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "Looks it up.", "parameters": SCHEMA}}
    for name in ("find", "visit")
]
FEW = {"top_k": 8}
"""Few candidates: the random number then hardly ever falls so near to a border that rounding decides."""
ONE_CALL = {"parallel_tool_calls": False}
CHOICES = 6


@pytest.fixture
def client(serving: Serving) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{serving.base_url}/v1", api_key="unused", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def terse(tiny_model: Path) -> dict[str, int]:
    """A ``logit_bias`` against blanks between things, of which a random model would write page after page."""
    tokenizer = Tokenizer.from_directory(tiny_model)
    return {str(i): -100 for i in range(tokenizer.vocab_size) if tokenizer.piece(i).isspace()}


def ask(client: openai.OpenAI, **more: Any) -> Any:
    settings = {"model": "tiny", "messages": MESSAGES, "seed": 5, "max_tokens": 150, **more}
    return client.chat.completions.create(**settings)


def test_a_schema(client: openai.OpenAI, terse: dict[str, int]) -> None:
    """Whole and streamed, several choices of one prompt: the same texts, and those that end by themselves validate."""
    settings = {"n": CHOICES, "response_format": FORMAT, "logit_bias": terse, "extra_body": FEW}
    whole = ask(client, **settings)
    assert whole.usage.crosskv["payload_bytes"] == whole.usage.crosskv["lower_bound_bytes"] > 0
    texts = dict.fromkeys(range(CHOICES), "")
    ends = {}
    for chunk in ask(client, stream=True, **settings):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            ends[choice.index] = choice.finish_reason
    assert [choice.message.content for choice in whole.choices] == list(texts.values())
    assert [choice.finish_reason for choice in whole.choices] == [ends[index] for index in range(CHOICES)]
    assert {*ends.values()} == {"stop"}
    for text in texts.values():
        jsonschema.validate(json.loads(text), SCHEMA)
    assert len({*texts.values()}) > 1


@pytest.mark.parametrize("tool_choice", ["required", {"type": "function", "function": {"name": "visit"}}], ids=str)
def test_calls_of_tools(client: openai.OpenAI, terse: dict[str, int], tool_choice: Any) -> None:
    settings = {"n": CHOICES, "tools": TOOLS, "tool_choice": tool_choice, "logit_bias": terse} | ONE_CALL
    whole = ask(client, **settings)
    streamed: dict[int, list[str]] = {index: ["", ""] for index in range(CHOICES)}
    for chunk in ask(client, stream=True, **settings):
        for choice in chunk.choices:
            for call in choice.delta.tool_calls or ():
                streamed[choice.index][0] += call.function.name or ""
                streamed[choice.index][1] += call.function.arguments or ""
    for choice in whole.choices:
        assert choice.finish_reason == "tool_calls"
        (call,) = choice.message.tool_calls
        assert streamed[choice.index] == [call.function.name, call.function.arguments]
        assert call.function.name in (("find", "visit") if tool_choice == "required" else ("visit",))
        jsonschema.validate(json.loads(call.function.arguments), SCHEMA)


def test_a_conversation_goes_on_after_a_call(client: openai.OpenAI, terse: dict[str, int]) -> None:
    """What the client's own objects say of an answer is a turn of the next request."""
    message = ask(client, tools=TOOLS, tool_choice="required", logit_bias=terse, **ONE_CALL).choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "2,100,000 people"}
    answer = ask(client, messages=[*MESSAGES, message, result], tools=TOOLS, max_tokens=4)
    assert answer.usage.prompt_tokens > ask(client, tools=TOOLS, max_tokens=4).usage.prompt_tokens


class Kind(StrEnum):
    CITY = "city"
    VILLAGE = "village"


class Mayor(BaseModel):
    name: str = Field(max_length=6)


class Place(BaseModel):
    """Somewhere."""

    kind: Kind
    mayor: Mayor | None = None
    size: int = Field(ge=1, le=99, description="in thousands")
    twins: list[Kind] = Field(max_length=2)


def test_a_schema_that_the_client_makes(client: openai.OpenAI, terse: dict[str, int]) -> None:
    """From a class, by the client's own helpers: for an answer, a stream, and a call's arguments."""
    settings = {"model": "tiny", "messages": MESSAGES, "seed": 1, "max_tokens": 200, "logit_bias": terse}
    answer = client.chat.completions.parse(response_format=Place, **settings)
    place = answer.choices[0].message.parsed
    assert isinstance(place, Place)
    with client.chat.completions.stream(response_format=Place, **settings) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == place
    tools = [openai.pydantic_function_tool(Place)]
    with client.chat.completions.stream(tools=tools, tool_choice="required", **settings, **ONE_CALL) as stream:
        (call,) = stream.get_final_completion().choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, Place)


def test_one_engine_alone_says_the_same(
    client: openai.OpenAI, terse: dict[str, int], engine_processes: EngineProcesses, tiny_model: Path
) -> None:
    """Also one that is split over two ranks."""
    ids = {"return_token_ids": True}
    answer = ask(client, n=CHOICES, response_format=FORMAT, logit_bias=terse, extra_body=FEW | ids)
    expected = [choice.token_ids for choice in answer.choices]
    config = EngineConfig(str(tiny_model), Role.COLOCATED, dtype="float32", kv_cache_memory=16 << 20)
    both = RankProcesses([engine_processes.first, engine_processes.second])

    def ask_alone(engine: EngineClient) -> list[list[int]]:
        alone = engine.generate(
            answer.prompt_token_ids,
            n=CHOICES,
            seed=5,
            temperature=1.0,
            max_tokens=150,
            ignore_eos=False,
            logit_bias={int(token_id): bias for token_id, bias in terse.items()},
            grammar=wire.Grammar(json_schema=json.dumps(SCHEMA)),
            **FEW,
        )
        return [choice.tokens for choice in alone.choices]

    with colocated(engine_processes.first, config) as engine:
        assert ask_alone(engine) == expected
    with colocated(both, config) as engine:
        assert ask_alone(engine) == expected
