import math

import pytest

from cluster.text.tokenizer import Tokenizer
from tests.cluster.openai.events import chat_texts, chunks_of
from tests.cluster.scripted_engine import TRANSFER, ScriptedEngine, always, emit, prompt_info
from worker.wire.engine_pb2 import FINISH_REASON_STOP, Submit

pytestmark = pytest.mark.anyio

MESSAGES = [{"role": "user", "content": "hi"}]
RENDERED = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
ANSWER = "Hello, wörld 😀! STOP now"


async def test_the_whole_answer(client, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(ANSWER)
    engine = ScriptedEngine(
        lambda s: emit(s, ids, info=prompt_info(s, cached_tokens=4, prefill_cached_tokens=2, transfer=TRANSFER))
    )
    async with client(engine) as http:
        answer = (await http.post("/v1/chat/completions", json={"model": "org/tiny", "messages": MESSAGES})).json()
    prompt = tokenizer.encode(RENDERED, add_special_tokens=False)
    assert answer["object"] == "chat.completion"
    assert answer["model"] == "org/tiny"
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": ANSWER},
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
        }
    ]
    assert answer["usage"] == {
        "prompt_tokens": len(prompt),
        "completion_tokens": len(ids),
        "total_tokens": len(prompt) + len(ids),
        "prompt_tokens_details": {"cached_tokens": 4},
        "crosskv": {
            "payload_bytes": 1000,
            "lower_bound_bytes": 1000,
            "unshared_bytes": 2000,
            "retransmitted_bytes": 0,
            "resumptions": 0,
            "attempts": 1,
            "queue_ms": 0.25,
            "transfer_ms": 1.5,
            "prefill_cached_tokens": 2,
            "prefill_replica": "prefill-0",
        },
    }


async def test_what_the_engine_is_asked_by_default(client, tokenizer: Tokenizer) -> None:
    engine = ScriptedEngine(always([5]))
    async with client(engine) as http:
        for _ in range(2):
            await http.post("/v1/chat/completions", json={"messages": MESSAGES, "stop": None, "temperature": None})
    first, second = engine.submits
    prompt = tokenizer.encode(RENDERED, add_special_tokens=False)
    assert list(first.token_ids) == prompt
    assert first.prompt_len == len(prompt)
    assert first.n == 1
    assert first.request_id != second.request_id
    sampling = first.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (1, 1, 0, 0)
    assert sampling.repetition_penalty == 1
    assert sampling.max_tokens == 64 - len(prompt)  # the rest of the context
    assert not sampling.HasField("logprobs")
    assert not sampling.HasField("prompt_logprobs")
    # An unseeded request gets a seed of its own.
    assert 0 <= sampling.seed < 1 << 63
    assert sampling.seed != second.sampling.seed


async def test_every_parameter_reaches_the_engine(client) -> None:
    engine = ScriptedEngine(always([5]))
    body = {
        "messages": MESSAGES,
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 40,
        "min_p": 0.125,
        "presence_penalty": -1.5,
        "frequency_penalty": 1.5,
        "repetition_penalty": 1.25,
        "seed": -1,
        "max_tokens": 3,
        "max_completion_tokens": 7,
        "min_tokens": 2,
        "ignore_eos": True,
        "stop_token_ids": [9, 8, 9],
        "logit_bias": {"17": -100, "4": 2.5},
        "logprobs": True,
        "top_logprobs": 3,
        "prompt_logprobs": 2,
        "n": 2,
        "cache_salt": "mine",
        "timeout": 1.5,
        "user": "ignored",
    }
    async with client(engine) as http:
        answer = await http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    (submit,) = engine.submits
    sampling = submit.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.25, 40, 0.125)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (-1.5, 1.5)
    assert sampling.repetition_penalty == 1.25
    assert sampling.seed == (1 << 64) - 1
    assert (sampling.max_tokens, sampling.min_tokens, sampling.ignore_eos) == (7, 2, True)
    assert list(sampling.stop_token_ids) == [9, 8]
    assert dict(sampling.logit_bias) == {17: -100, 4: 2.5}
    assert (sampling.logprobs, sampling.prompt_logprobs) == (3, 2)
    assert (submit.n, submit.cache_salt, submit.timeout_ms) == (2, "mine", 1500)


@pytest.mark.parametrize("temperature", [0, 1e-6, 1e-300])
async def test_a_temperature_that_would_overflow_is_greedy(client, temperature: float) -> None:
    engine = ScriptedEngine(always([5]))
    async with client(engine) as http:
        await http.post("/v1/chat/completions", json={"messages": MESSAGES, "temperature": temperature})
    assert engine.submits[0].sampling.temperature == 0


@pytest.mark.parametrize("per_message", [1, 3, 100])
@pytest.mark.parametrize("n", [1, 3])
async def test_a_stream_has_the_same_text(client, tokenizer: Tokenizer, per_message: int, n: int) -> None:
    ids = tokenizer.encode(ANSWER)
    engine = ScriptedEngine(always(ids, per_message=per_message, finish=FINISH_REASON_STOP))
    async with client(engine) as http:
        answer = await http.post("/v1/chat/completions", json={"messages": MESSAGES, "stream": True, "n": n})
    assert answer.headers["content-type"].startswith("text/event-stream")
    chunks = chunks_of(answer.text)
    assert all(chunk["object"] == "chat.completion.chunk" for chunk in chunks)
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    for index in range(n):
        assert chunks[index]["choices"][0] == {
            "index": index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
    assert chat_texts(chunks) == dict.fromkeys(range(n), ANSWER)
    # Each choice ends once, in its last chunk.
    choices = [chunk["choices"][0] for chunk in chunks]
    for index in range(n):
        reasons = [choice["finish_reason"] for choice in choices if choice["index"] == index]
        assert reasons == [None] * (len(reasons) - 1) + ["stop"]
    assert all("usage" not in chunk for chunk in chunks)
    # No character is split, and nothing is sent for half of one.
    assert not any("\ufffd" in choice["delta"].get("content", "") for choice in choices)


async def test_usage_at_the_end_of_a_stream(client, tokenizer: Tokenizer) -> None:
    engine = ScriptedEngine(lambda s: emit(s, tokenizer.encode("Hello you"), info=prompt_info(s, transfer=TRANSFER)))
    body = {"messages": MESSAGES, "stream": True, "stream_options": {"include_usage": True}}
    async with client(engine) as http:
        *chunks, last = chunks_of((await http.post("/v1/chat/completions", json=body)).text)
        whole = (await http.post("/v1/chat/completions", json={"messages": MESSAGES})).json()
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"] == whole["usage"]
    assert last["usage"]["crosskv"]["payload_bytes"] == 1000


async def test_usage_in_every_chunk(client, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("Hello you")
    engine = ScriptedEngine(always(ids))
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with client(engine) as http:
        answer = await http.post(
            "/v1/chat/completions", json={"messages": MESSAGES, "stream": True, "stream_options": options}
        )
    _, *chunks, _ = chunks_of(answer.text)
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == list(range(1, len(ids) + 1))


async def test_logprobs(client, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("Hé!")
    body = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2}
    async with client(ScriptedEngine(always(ids))) as http:
        whole = (await http.post("/v1/chat/completions", json=body)).json()
        chunks = chunks_of((await http.post("/v1/chat/completions", json=body | {"stream": True})).text)
        none = (await http.post("/v1/chat/completions", json={"messages": MESSAGES, "logprobs": True})).json()
    content = whole["choices"][0]["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in content) == "Hé!".encode()
    assert [entry["logprob"] for entry in content] == [-0.5 - i / 1024 for i in ids]
    assert content[0]["top_logprobs"] == [
        {"token": tokenizer.token_text(i), "logprob": -0.25 - i, "bytes": list(tokenizer.piece(i))} for i in range(2)
    ]
    # A stream has the same entries, those of half a character too.
    streamed = [c["choices"][0]["logprobs"]["content"] for c in chunks if c["choices"][0]["logprobs"]]
    assert [entry for part in streamed for entry in part] == content
    assert [entry["top_logprobs"] for entry in none["choices"][0]["logprobs"]["content"]] == [[]] * len(ids)


@pytest.mark.parametrize("logprob", [-math.inf, math.nan])
async def test_a_logprob_that_json_cannot_hold(client, logprob: float) -> None:
    def script(submit: Submit):
        (message,) = emit(submit, [5])
        message[0].logprobs[0].logprob = logprob
        yield message

    async with client(ScriptedEngine(script)) as http:
        answer = (await http.post("/v1/chat/completions", json={"messages": MESSAGES, "logprobs": True})).json()
    assert answer["choices"][0]["logprobs"]["content"][0]["logprob"] == -9999.0


async def test_the_token_that_ends_the_text_is_counted_and_not_shown(client, tokenizer: Tokenizer) -> None:
    end = tokenizer.encode("!")
    scripts = {
        "eos": lambda s: emit(s, [*tokenizer.encode("Hi"), 2], finish=FINISH_REASON_STOP, stop_token_id=2),
        "stop id": lambda s: emit(s, [*tokenizer.encode("Hi"), *end], finish=FINISH_REASON_STOP, stop_token_id=end[0]),
    }
    body = {"messages": MESSAGES, "skip_special_tokens": False}
    for name, script in scripts.items():
        async with client(ScriptedEngine(script)) as http:
            answer = (await http.post("/v1/chat/completions", json=body)).json()
            included = (
                await http.post("/v1/chat/completions", json=body | {"include_stop_str_in_output": True})
            ).json()
        choice = answer["choices"][0]
        assert choice["message"]["content"] == "Hi"
        assert choice["finish_reason"] == "stop"
        assert choice["stop_reason"] == (None if name == "eos" else end[0])
        assert answer["usage"]["completion_tokens"] == len(tokenizer.encode("Hi")) + 1
        assert included["choices"][0]["message"]["content"] == ("Hi<|im_end|>" if name == "eos" else "Hi!")


async def test_a_length_end_on_an_eos_token_hides_nothing(client, tokenizer: Tokenizer) -> None:
    body = {"messages": MESSAGES, "skip_special_tokens": False, "ignore_eos": True}
    async with client(ScriptedEngine(always([*tokenizer.encode("Hi"), 2]))) as http:
        answer = (await http.post("/v1/chat/completions", json=body)).json()
    assert answer["choices"][0]["message"]["content"] == "Hi<|im_end|>"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_ends_the_request_at_once(client, tokenizer: Tokenizer, stream: bool) -> None:
    engine = ScriptedEngine(always(tokenizer.encode("one two STOP three")))
    async with client(engine) as http:
        answer = await http.post(
            "/v1/chat/completions", json={"messages": MESSAGES, "stop": ["nowhere", "o ST"], "stream": stream}
        )
    if stream:
        chunks = chunks_of(answer.text)
        assert chat_texts(chunks) == {0: "one tw"}
        last = chunks[-1]["choices"][0]
    else:
        last = answer.json()["choices"][0]
        assert last["message"]["content"] == "one tw"
        # The tokens up to the match count, the rest does not.
        assert answer.json()["usage"]["completion_tokens"] == len(tokenizer.encode("one two STOP"))
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", "o ST")
    assert len(engine.aborted) == 1


async def test_a_stop_string_ends_only_its_own_choice(client, tokenizer: Tokenizer) -> None:
    def script(submit: Submit):
        stopped = emit(submit, tokenizer.encode("aSTOP and on and on"), choice=0)
        other = emit(submit, tokenizer.encode("b and on and on and on"), choice=1)
        for index in range(max(len(stopped), len(other))):
            yield [
                output for messages in (stopped, other) for output in messages[index : index + 1] for output in output
            ]

    engine = ScriptedEngine(script)
    async with client(engine) as http:
        answer = (await http.post("/v1/chat/completions", json={"messages": MESSAGES, "stop": "STOP", "n": 2})).json()
    assert [c["message"]["content"] for c in answer["choices"]] == ["a", "b and on and on and on"]
    assert [c["finish_reason"] for c in answer["choices"]] == ["stop", "length"]
    assert engine.aborted == []


@pytest.mark.parametrize("per_message", [1, 100])
async def test_stop_strings_wait_for_min_tokens(client, tokenizer: Tokenizer, per_message: int) -> None:
    engine = ScriptedEngine(always(tokenizer.encode("xxxyxyx"), per_message=per_message))
    assert len(tokenizer.encode("xxxyxyx")) == 7
    async with client(engine) as http:
        for min_tokens, expected in ((0, ""), (1, "x"), (3, "xxxy"), (7, "xxxyxyx")):
            body = {"messages": MESSAGES, "stop": "x", "min_tokens": min_tokens}
            answer = (await http.post("/v1/chat/completions", json=body)).json()
            assert answer["choices"][0]["message"]["content"] == expected


async def test_what_was_held_back_is_shown_at_the_end(client, tokenizer: Tokenizer) -> None:
    async with client(ScriptedEngine(always(tokenizer.encode("one STO")))) as http:
        answer = (await http.post("/v1/chat/completions", json={"messages": MESSAGES, "stop": "STOP"})).json()
    assert answer["choices"][0]["message"]["content"] == "one STO"
    assert answer["choices"][0]["finish_reason"] == "length"


async def test_a_broken_character_at_the_end(client, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a😀")[:-1]
    async with client(ScriptedEngine(always(ids))) as http:
        answer = (await http.post("/v1/chat/completions", json={"messages": MESSAGES})).json()
        chunks = chunks_of((await http.post("/v1/chat/completions", json={"messages": MESSAGES, "stream": True})).text)
    assert answer["choices"][0]["message"]["content"] == "a\ufffd" == chat_texts(chunks)[0]


async def test_token_ids_on_request(client, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(ANSWER)
    body = {"messages": MESSAGES, "return_token_ids": True}
    async with client(ScriptedEngine(always(ids))) as http:
        answer = (await http.post("/v1/chat/completions", json=body)).json()
        chunks = chunks_of((await http.post("/v1/chat/completions", json=body | {"stream": True})).text)
    assert answer["choices"][0]["token_ids"] == ids
    assert answer["prompt_token_ids"] == tokenizer.encode(RENDERED)
    assert [i for chunk in chunks for i in chunk["choices"][0].get("token_ids", [])] == ids


async def test_content_parts_and_template_variables(client, tokenizer: Tokenizer) -> None:
    engine = ScriptedEngine(always([5]))
    messages = [
        {"role": "system", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
        {"role": "assistant", "content": "and"},
    ]
    body = {"messages": messages, "continue_final_message": True, "chat_template_kwargs": {"unused": 1}}
    async with client(engine) as http:
        assert (await http.post("/v1/chat/completions", json=body)).status_code == 200
        body = {"messages": messages, "add_generation_prompt": False}
        assert (await http.post("/v1/chat/completions", json=body)).status_code == 200
    continued, closed = (tokenizer.decode(s.token_ids, skip_special_tokens=False) for s in engine.submits)
    assert continued == "<|im_start|>system\none\ntwo<|im_end|>\n<|im_start|>assistant\nand"
    assert closed == continued + "<|im_end|>\n"


async def test_prompt_logprobs(client, tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode(RENDERED)
    body = {"messages": MESSAGES, "prompt_logprobs": 1}
    async with client(ScriptedEngine(always([5]))) as http:
        entries = (await http.post("/v1/chat/completions", json=body)).json()["prompt_logprobs"]
    assert entries[0] is None
    assert len(entries) == len(prompt)
    assert entries[1] == {
        str(prompt[1]): {
            "logprob": -0.5 - prompt[1] / 1024,
            "rank": 1 + prompt[1] % 3,
            "decoded_token": tokenizer.token_text(prompt[1]),
        },
        "0": {"logprob": -0.25, "rank": 1, "decoded_token": "<|endoftext|>"},
    }
