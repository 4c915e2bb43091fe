"""Whatever a client sends: one clear error in OpenAI's shape, nothing for the engine, never a 500."""

import json
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cluster.openai.limits import ApiLimits
from cluster.openai.protocol import ChatCompletionBody, CompletionBody, DetokenizeBody, TokenizeBody
from tests.cluster.scripted_engine import ScriptedEngine, always

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]

# Fields that both endpoints judge alike, and the words that the error must hold.
WRONG_FIELDS: list[tuple[str, Any, str]] = [
    ("temperature", -0.1, "greater than or equal to 0"),
    ("temperature", 2.1, "less than or equal to 2"),
    ("temperature", "hot", "number"),
    ("temperature", True, "number"),
    ("top_p", 0, "greater than 0"),
    ("top_p", 1.5, "less than or equal to 1"),
    ("top_k", -2, "greater than or equal to -1"),
    ("top_k", 1.5, "integer"),
    ("top_k", 10**30, "less than"),
    ("min_p", 2, "less than or equal to 1"),
    ("presence_penalty", 2.5, "less than or equal to 2"),
    ("frequency_penalty", -2.5, "greater than or equal to -2"),
    ("repetition_penalty", 0, "greater than or equal to 0.001"),
    ("n", 0, "greater than or equal to 1"),
    ("n", 129, "at most 128"),
    ("n", 10**400, "less than"),
    ("max_tokens", -1, "greater than or equal to"),
    ("max_tokens", 10**9, "64"),
    ("max_tokens", 10**100, "less than"),
    ("min_tokens", 63, "more than"),
    ("seed", 1 << 64, "less than"),
    ("seed", 0.5, "integer"),
    ("stop", "", "empty"),
    ("stop", ["a", ""], "empty"),
    ("stop", ["a"] * 17, "at most 16"),
    ("stop", "a" * 2000, "at most 1024"),
    ("stop", 7, "string"),
    ("stop", [7] * 100_000, "string"),
    ("stop_token_ids", [512], "vocabulary of 512"),
    ("stop_token_ids", [-1], "greater than or equal to 0"),
    ("stop_token_ids", list(range(300)), "at most 256"),
    ("stop_token_ids", ["x"] * 100_000, "integer"),
    ("logit_bias", {"512": 1}, "vocabulary of 512"),
    ("logit_bias", {"-1": 1}, "not a token id"),
    ("logit_bias", {"one": 1}, "not a token id"),
    ("logit_bias", {"1": 101}, "from -100 to 100"),
    ("logit_bias", {"1": "x"}, "from -100 to 100"),
    ("logit_bias", {"1": True}, "from -100 to 100"),
    ("logit_bias", {str(i): 0 for i in range(2000)}, "at most 1024"),
    ("logit_bias", [1], "object"),
    ("prompt_logprobs", 21, "at most 20"),
    ("prompt_logprobs", -1, "greater than or equal to 0"),
    ("ignore_eos", "yes", "boolean"),
    ("stream", "yes", "boolean"),
    ("cache_salt", "x" * 1000, "at most 256"),
    ("timeout", 0, "greater than 0"),
    ("timeout", 1e300, "at most"),
    ("stream_options", [], "object"),
]

UNSUPPORTED: list[tuple[str, Any]] = [
    ("guided_whitespace_pattern", " ?"),
    ("lora_request", {"name": "x"}),
    ("speculative_config", {"k": 3}),
    ("use_beam_search", True),
    ("logits_processors", ["x"]),
    ("bad_words", ["x"]),
    ("allowed_token_ids", [1]),
    ("truncate_prompt_tokens", 5),
    ("logprob_token_ids", [1]),
    ("repetition_detection", {"max_pattern_size": 4}),
    ("return_tokens_as_token_ids", True),
    ("thinking_token_budget", 5),
    ("kv_transfer_params", {"do_remote_decode": True}),
]

WRONG_BODIES: list[tuple[str, Any, str]] = [
    (CHAT, {}, "messages: field required"),
    (CHAT, {"messages": []}, "at least 1 item"),
    (CHAT, {"messages": "hi"}, "messages"),
    (CHAT, {"messages": [7] * 100_000}, "messages.0"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages.0.content is missing"),
    (CHAT, {"messages": [{"content": "hi"}]}, "messages.0.role"),
    (CHAT, {"messages": [{"role": "user", "content": 7}]}, "messages.0.content"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text is missing"),
    (CHAT, {"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages.0.content.0.type"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "'image_url' is not"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "'input_audio' is not supported"),
    (
        CHAT,
        {"messages": [{"role": "tool", "content": "x"}]},
        "messages.0: the chat template of model org/tiny knows no",
    ),
    (CHAT, {"messages": [{"role": "function", "content": "x"}]}, "messages.0.role 'function' is not supported yet"),
    (CHAT, {"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]}, "messages.0.tool_calls.0.id"),
    (CHAT, {"messages": MESSAGES, "tools": [{"type": "function"}]}, "tools.0.function: field required"),
    (
        CHAT,
        {"messages": MESSAGES, "tools": [{"type": "function", "function": {"name": "f"}}]},
        "tools: the chat template of model org/tiny knows no tools",
    ),
    (CHAT, {"messages": MESSAGES, "functions": [{"name": "f"}]}, "functions is not supported yet"),
    (CHAT, {"messages": MESSAGES, "tool_choice": "required"}, "there are no tools"),
    (CHAT, {"messages": MESSAGES, "modalities": ["text", "audio"]}, "modalities is not supported yet"),
    (CHAT, {"messages": MESSAGES, "chat_template": "{{ x }}"}, "chat_template is not supported yet"),
    (CHAT, {"messages": MESSAGES, "top_logprobs": 2}, "needs logprobs"),
    (CHAT, {"messages": MESSAGES, "logprobs": True, "top_logprobs": 21}, "at most 20"),
    (CHAT, {"messages": MESSAGES, "logprobs": 5}, "boolean"),
    (CHAT, {"messages": MESSAGES, "max_tokens": 0}, "greater than or equal to 1"),
    (CHAT, {"messages": MESSAGES, "max_completion_tokens": 64}, "max_completion_tokens is 64"),
    (CHAT, {"messages": MESSAGES, "stream_options": {"include_usage": True}}, "needs stream"),
    (CHAT, {"messages": MESSAGES, "stream": True, "prompt_logprobs": 1}, "not available together with stream"),
    (CHAT, {"messages": MESSAGES, "add_generation_prompt": True, "continue_final_message": True}, "exclude each other"),
    (CHAT, {"messages": [{"role": "user", "content": "hi " * 100}]}, "max_model_len) holds 64"),
    (TEXT, {}, "prompt: field required"),
    (TEXT, {"prompt": ""}, "prompt is empty"),
    (TEXT, {"prompt": []}, "prompt is empty"),
    (TEXT, {"prompt": [[]]}, "prompt is empty"),
    (TEXT, {"prompt": ["a", ""]}, "prompt is empty"),
    (TEXT, {"prompt": None}, "prompt"),
    (TEXT, {"prompt": {"a": 1}}, "prompt"),
    (TEXT, {"prompt": [None]}, "prompt must be"),
    (TEXT, {"prompt": ["a", 1]}, "prompt must be"),
    (TEXT, {"prompt": [1, "a"]}, "prompt must be"),
    (TEXT, {"prompt": [1.5]}, "prompt must be"),
    (TEXT, {"prompt": [True]}, "prompt must be"),
    (TEXT, {"prompt": [[1], [[2]]]}, "prompt must be"),
    (TEXT, {"prompt": [512]}, "token id 512 is not in the model's vocabulary of 512"),
    (TEXT, {"prompt": [-1]}, "token id -1"),
    (TEXT, {"prompt": [10**1000]}, "that large"),
    (TEXT, {"prompt": ["a"] * 257}, "at most 256"),
    (TEXT, {"prompt": ["a"] * 256, "n": 5}, "1280 choices of all prompts; 1024 are allowed"),
    (TEXT, {"prompt": [5] * 64}, "64 tokens and 1 must be left to generate"),
    (TEXT, {"prompt": [5] * 65, "max_tokens": 0, "echo": True}, "65 tokens"),
    (TEXT, {"prompt": [5] * 60, "max_tokens": 5}, "leave 4"),
    (TEXT, {"prompt": "a", "logprobs": 21}, "at most 20"),
    (TEXT, {"prompt": "a", "logprobs": True}, "integer"),
    (TEXT, {"prompt": "a", "suffix": "b"}, "suffix is not supported yet"),
    (TEXT, {"prompt": "a", "best_of": 2}, "best_of other than n is not supported yet"),
    (TEXT, {"prompt": "a", "max_tokens": 0, "n": 2, "echo": True, "logprobs": 1}, "max_tokens 0"),
    (TEXT, {"prompt": "a", "max_tokens": 2, "min_tokens": 3}, "min_tokens is 3, which is more than max_tokens, 2"),
    ("/tokenize", {}, "either prompt or messages"),
    ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "either prompt or messages"),
    ("/detokenize", {"tokens": [512]}, "vocabulary of 512"),
    ("/detokenize", {"tokens": ["a"] * 100_000}, "integer"),
    ("/detokenize", {}, "tokens: field required"),
]

WRONG_JSON: list[tuple[str, bytes]] = [
    ("nothing", b""),
    ("no JSON", b"hello"),
    ("cut off", b'{"prompt": "a'),
    ("an array", b"[]"),
    ("a number", b"1"),
    ("null", b"null"),
    ("trailing", b'{"prompt": "a"} x'),
    ("long integer", b'{"prompt": "a", "n": ' + b"9" * 10_000 + b"}"),
    ("lone surrogate", b'{"prompt": "\\ud800"}'),
    ("lone surrogate in a list", b'{"prompt": ["\\udfff"]}'),
    ("lone surrogate in stop", b'{"prompt": "a", "stop": "\\ud800"}'),
    ("not UTF-8", b'{"prompt": "\xff\xfe"}'),
    ("not UTF-8 JSON", '{"prompt": "a"}'.encode("utf-16")),
    ("deep", b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    ("deep elsewhere", b'{"prompt": "a", "x": ' + b'{"a":' * 50_000 + b"1" + b"}" * 50_000 + b"}"),
    ("zero byte", b'{"prompt": "a\x00b"}'),
]


NOT_FINITE: list[tuple[str, bytes]] = [
    ("NaN", b'{"prompt": "a", "temperature": NaN}'),
    ("infinity", b'{"prompt": "a", "temperature": Infinity}'),
    ("infinity by exponent", b'{"prompt": "a", "temperature": 1e999}'),
    ("NaN as a bias", b'{"prompt": "a", "logit_bias": {"1": NaN}}'),
]


def error_of(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert list(response.json()) == ["error"]
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert 0 < len(error["message"]) < 500
    return error


def complete(path: str, **fields: Any) -> dict[str, Any]:
    return ({"messages": MESSAGES} if path == CHAT else {"prompt": "a"}) | fields


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_wrong_fields(client, path: str) -> None:
    engine = ScriptedEngine(always([5]))
    async with client(engine) as http:
        for field, value, words in WRONG_FIELDS:
            error = error_of(await http.post(path, json=complete(path, **{field: value})))
            assert words in error["message"], (field, error)
            assert field in error["message"], (field, error)
            assert error["param"].split(".")[0] == field, (field, error)
            assert error["type"] == "invalid_request_error"
        for field, value in UNSUPPORTED:
            error = error_of(await http.post(path, json=complete(path, **{field: value})))
            assert error["message"] == f"{field} is not supported yet"
            assert error["param"] == field
    assert engine.submits == []


@pytest.mark.parametrize(("path", "body", "words"), WRONG_BODIES, ids=str)
async def test_wrong_bodies(client, path: str, body: Any, words: str) -> None:
    engine = ScriptedEngine(always([5]))
    async with client(engine) as http:
        error = error_of(await http.post(path, json=body))
    assert words in error["message"]
    assert engine.submits == []


@pytest.mark.parametrize(("name", "body"), WRONG_JSON, ids=[name for name, _ in WRONG_JSON])
async def test_wrong_json(client, name: str, body: bytes) -> None:
    engine = ScriptedEngine(always([5]))
    async with client(engine) as http:
        for path in (TEXT, CHAT, "/tokenize", "/detokenize"):
            error_of(await http.post(path, content=body))
    assert engine.submits == []


@pytest.mark.parametrize(("name", "body"), NOT_FINITE, ids=[name for name, _ in NOT_FINITE])
async def test_numbers_that_are_not_finite(client, name: str, body: bytes) -> None:
    engine = ScriptedEngine(always([5]))
    async with client(engine) as http:
        error_of(await http.post(TEXT, content=body))
    assert engine.submits == []


@pytest.mark.parametrize(
    "extra",
    [
        {"response_format": {"type": "text"}},
        {"tools": []},
        {"tools": None, "tool_choice": "none"},
        {"unknown": {"deep": [1]}, "user": "me", "metadata": {}},
        {"guided_json": None, "use_beam_search": False, "lora_request": None},
        {"spaces_between_special_tokens": True},
        {"stop": [], "logit_bias": {}, "stop_token_ids": []},
        {"seed": -(1 << 63), "top_k": -1},
        {"modalities": ["text"]},
    ],
    ids=str,
)
async def test_fields_that_ask_for_nothing_are_accepted(client, extra: dict[str, Any]) -> None:
    async with client(ScriptedEngine(always([5]))) as http:
        for path in (CHAT, TEXT):
            response = await http.post(path, json=complete(path, **extra))
            assert response.status_code == 200, response.text


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=5), children, max_size=3),
    max_leaves=6,
)
field_names = st.sampled_from(
    sorted({*ChatCompletionBody.model_fields, *CompletionBody.model_fields, *ChatCompletionBody.not_yet})
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from([CHAT, TEXT]), st.dictionaries(field_names, json_values, max_size=4), st.booleans())
async def test_no_body_is_the_servers_fault(client, path: str, fields: dict[str, Any], whole: bool) -> None:
    body = complete(path, **fields) if whole else fields
    async with client(ScriptedEngine(always([5]))) as http:
        # json.dumps writes NaN, infinities and lone surrogates, as some clients do.
        response = await http.post(path, content=json.dumps(body))
    assert response.status_code in (200, 400, 404), response.text


async def test_an_unknown_model(client) -> None:
    async with client(ScriptedEngine(always([5]))) as http:
        for path in (CHAT, TEXT):
            error = error_of(await http.post(path, json=complete(path, model="gpt-4")), 404)
            assert (error["param"], error["code"]) == ("model", "model_not_found")
            assert "'gpt-4'" in error["message"]
            assert "'org/tiny'" in error["message"]
        error_of(await http.post("/tokenize", json={"model": "x", "prompt": "a"}), 404)
        error_of(await http.get("/v1/models/x"), 404)


async def test_a_model_without_a_chat_template(client) -> None:
    async with client(ScriptedEngine(always([5])), chat=False) as http:
        error = error_of(await http.post(CHAT, json={"messages": MESSAGES}))
        assert "no chat template" in error["message"]
        assert (await http.post(TEXT, json={"prompt": "a"})).status_code == 200


async def test_unknown_routes_and_methods(client) -> None:
    async with client(ScriptedEngine(always([5]))) as http:
        error_of(await http.get("/v2/anything"), 404)
        refused = await http.get(CHAT)
        error_of(refused, 405)
        assert refused.headers["allow"] == "POST"


async def test_a_large_body_is_refused_before_it_is_read_whole(client) -> None:
    sent = 0

    async def endless():
        nonlocal sent
        while True:
            sent += 1000
            yield b"x" * 1000

    async with client(ScriptedEngine(always([5])), limits=ApiLimits(max_body_bytes=10_000)) as http:
        for path in (CHAT, TEXT, "/tokenize", "/detokenize"):
            for headers in ({}, {"Content-Length": str(10**30)}):
                sent = 0
                error = error_of(await http.post(path, content=endless(), headers=headers), 413)
                assert "10000 bytes" in error["message"]
                # Some is read and forgotten, so that a client that is still sending hears the answer.
                assert sent <= 55_000
            sent = 0
            waiting = {"Content-Length": "20000", "Expect": "100-continue"}
            error_of(await http.post(path, content=endless(), headers=waiting), 413)
            assert sent == 0


async def test_the_largest_body_is_taken(client) -> None:
    body = json.dumps({"prompt": "Hello"}).encode()
    async with client(ScriptedEngine(always([5])), limits=ApiLimits(max_body_bytes=len(body))) as http:
        assert (await http.post(TEXT, content=body)).status_code == 200
        error_of(await http.post(TEXT, content=body + b" "), 413)


async def test_a_million_tiny_objects_are_refused_before_they_are_parsed(
    client, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with client(ScriptedEngine(always([5]))) as http:
        body = b'{"prompt": "' + b"{[" * 30_000 + b'", "metadata": {}}'
        assert "context" in error_of(await http.post(TEXT, content=body), 400)["message"], "a text may be of anything"

        def fail(*_: object, **__: object) -> None:
            raise AssertionError("it was parsed")

        for kind in (CompletionBody, ChatCompletionBody, TokenizeBody, DetokenizeBody):
            monkeypatch.setattr(kind, "model_validate_json", fail)
        for path in (CHAT, TEXT, "/tokenize", "/detokenize"):
            error = error_of(await http.post(path, content=b'{"x": [' + b"{}," * 1_000_000 + b"{}]}"), 400)
            assert "50000 arrays and objects" in error["message"]


async def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(
    client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise AssertionError("it was tokenized")

    monkeypatch.setattr("cluster.text.tokenizer.Tokenizer.encode", fail)
    most = 64 * ApiLimits().max_characters_per_token
    engine = ScriptedEngine(always([5]))
    async with client(engine) as http:
        for path, body in (
            (TEXT, {"prompt": "a" * (most + 1)}),
            (TEXT, {"prompt": ["a" * (most + 1)]}),
            (CHAT, {"messages": [{"role": "user", "content": "a" * most}, {"role": "user", "content": "b"}]}),
            ("/tokenize", {"prompt": "a" * (most + 1)}),
        ):
            response = await http.post(path, json=body)
            assert response.status_code == 400, path
            error = response.json()["error"]
            assert error["code"] == "context_length_exceeded"
            assert f"at most {most} are allowed" in error["message"]
    assert engine.submits == []


async def test_lists_of_small_things_are_bounded_as_well(client) -> None:
    async with client(ScriptedEngine(always([5]))) as http:
        for path, body, param in (
            (CHAT, {"messages": [{"role": "user", "content": ""}] * 20_000}, "messages"),
            (CHAT, {"messages": [{"role": "user", "content": [{"type": "text"}] * 5000}]}, "messages.0.content"),
            ("/detokenize", {"tokens": [1] * 65}, "tokens"),
        ):
            response = await http.post(path, json=body)
            assert response.status_code == 400, path
            assert response.json()["error"]["param"] == param


@pytest.mark.parametrize("given", ["", "soon", "0", "-1", "nan", "inf", "1e9"])
async def test_a_timeout_header_that_is_no_time(client, given: str) -> None:
    async with client(ScriptedEngine(always([40]))) as http:
        response = await http.post("/v1/completions", json={"prompt": "a"}, headers={"X-Request-Timeout": given})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "X-Request-Timeout"


@pytest.mark.parametrize(
    ("header", "body", "expected"), [("2.5", {}, 2500), ("2.5", {"timeout": 1}, 1000), ("0.0001", {"timeout": 1}, 1)]
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_the_shorter_timeout_counts(client, path: str, header: str, body: dict, expected: int) -> None:
    engine = ScriptedEngine(always([40]))
    body = body | {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}
    async with client(engine) as http:
        response = await http.post(path, json=body, headers={"x-request-timeout": header})
    assert response.status_code == 200
    assert engine.submits[0].timeout_ms == expected
