import pytest

from cluster.text.tokenizer import Tokenizer
from tests.cluster.openai.events import chunks_of
from tests.cluster.scripted_engine import TRANSFER, ScriptedEngine, always, emit, prompt_info
from worker.wire.engine_pb2 import Submit

pytestmark = pytest.mark.anyio


def echoing(submit: Submit):
    """Every prompt's answer is the prompt again, in reverse, and each choice ends on its own number."""
    for choice in range(submit.n):
        yield from emit(submit, [*reversed(submit.token_ids), 20 + choice], choice=choice)


async def test_one_text(client, tokenizer: Tokenizer) -> None:
    engine = ScriptedEngine(always(tokenizer.encode(" you")))
    async with client(engine) as http:
        answer = (await http.post("/v1/completions", json={"model": "org/tiny", "prompt": "Hello"})).json()
    assert answer["object"] == "text_completion"
    assert answer["choices"] == [
        {"index": 0, "text": " you", "logprobs": None, "finish_reason": "length", "stop_reason": None}
    ]
    assert list(engine.submits[0].token_ids) == tokenizer.encode("Hello")
    assert engine.submits[0].sampling.max_tokens == 16


async def test_batches_of_each_kind_are_numbered_by_prompt_and_choice(client, tokenizer: Tokenizer) -> None:
    texts = ["Hello", "quick brown", "fox"]
    ids = [tokenizer.encode(text) for text in texts]
    async with client(ScriptedEngine(echoing)) as http:
        for prompt in (texts, ids):
            body = {"prompt": prompt, "n": 2, "return_token_ids": True}
            answer = (await http.post("/v1/completions", json=body)).json()
            assert [c["index"] for c in answer["choices"]] == list(range(6))
            for number, choice in enumerate(answer["choices"]):
                assert choice["prompt_token_ids"] == ids[number // 2]
                assert choice["token_ids"] == [*reversed(ids[number // 2]), 20 + number % 2]
            # A prompt counts once, however many choices it has.
            assert answer["usage"]["prompt_tokens"] == sum(map(len, ids))
            assert answer["usage"]["completion_tokens"] == 2 * sum(len(i) + 1 for i in ids)


async def test_one_prompt_of_token_ids(client) -> None:
    engine = ScriptedEngine(always([5]))
    async with client(engine) as http:
        assert (await http.post("/v1/completions", json={"prompt": [7, 8, 9]})).status_code == 200
    assert list(engine.submits[0].token_ids) == [7, 8, 9]


async def test_a_batch_streams_all_its_choices(client, tokenizer: Tokenizer) -> None:
    ids = [tokenizer.encode(text) for text in ["Hello", "quick brown", "fox"]]
    body = {"prompt": ids, "n": 2, "stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
    async with client(ScriptedEngine(echoing)) as http:
        *chunks, last = chunks_of((await http.post("/v1/completions", json=body)).text)
    tokens: dict[int, list[int]] = {}
    for chunk in chunks:
        (choice,) = chunk["choices"]
        tokens.setdefault(choice["index"], []).extend(choice["token_ids"])
    assert tokens == {2 * p + c: [*reversed(ids[p]), 20 + c] for p in range(3) for c in range(2)}
    assert last["usage"]["completion_tokens"] == sum(map(len, tokens.values()))


async def test_transfers_of_a_batch_add_up(client) -> None:
    engine = ScriptedEngine(lambda s: emit(s, [5], info=prompt_info(s, cached_tokens=1, transfer=TRANSFER)))
    async with client(engine) as http:
        usage = (await http.post("/v1/completions", json={"prompt": [[5, 6], [7, 8], [9, 10]]})).json()["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 3}
    assert (usage["crosskv"]["payload_bytes"], usage["crosskv"]["unshared_bytes"]) == (3000, 6000)
    assert usage["crosskv"]["transfer_ms"] == 1.5
    assert usage["crosskv"]["prefill_replica"] == "prefill-0"


@pytest.mark.parametrize("stream", [False, True])
async def test_echo(client, tokenizer: Tokenizer, stream: bool) -> None:
    body = {"prompt": "Hé", "echo": True, "n": 2, "stream": stream}
    async with client(ScriptedEngine(always(tokenizer.encode(" you"), per_message=1))) as http:
        answer = await http.post("/v1/completions", json=body)
    texts: dict[int, str] = {}
    for chunk in chunks_of(answer.text) if stream else [answer.json()]:
        for choice in chunk["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    assert texts == {0: "Hé you", 1: "Hé you"}


async def test_echo_of_token_ids_that_end_within_a_character(client, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a😀b")
    for cut in range(1, len(ids)):
        async with client(ScriptedEngine(always(ids[cut:]))) as http:
            answer = (await http.post("/v1/completions", json={"prompt": ids[:cut], "echo": True})).json()
        assert answer["choices"][0]["text"] == "a😀b"


async def test_logprobs(client, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("é you!")
    body = {"prompt": "Hello", "logprobs": 2}
    async with client(ScriptedEngine(always(ids, per_message=2))) as http:
        whole = (await http.post("/v1/completions", json=body)).json()["choices"][0]["logprobs"]
        chunks = chunks_of((await http.post("/v1/completions", json=body | {"stream": True})).text)
    assert whole["tokens"] == [tokenizer.token_text(i) for i in ids]
    assert whole["token_logprobs"] == [-0.5 - i / 1024 for i in ids]
    for token_id, top in zip(ids, whole["top_logprobs"], strict=True):
        # The two most likely tokens, and the sampled one.
        assert top == {
            "<|endoftext|>": -0.25,
            "<|im_start|>": -1.25,
            tokenizer.token_text(token_id): -0.5 - token_id / 1024,
        }
    assert whole["text_offset"][0] == 0
    assert [whole["tokens"][i] for i, o in enumerate(whole["text_offset"]) if o == 1] == [" you"]
    for name, values in whole.items():
        assert [v for c in chunks if c["choices"][0]["logprobs"] for v in c["choices"][0]["logprobs"][name]] == values


async def test_echo_with_logprobs_describes_the_prompt(client, tokenizer: Tokenizer) -> None:
    """What lm-eval's local-completions does to score a continuation."""
    text = "Hello you, brown fox"
    ids = tokenizer.encode(text)
    for extra in (0, 1):
        engine = ScriptedEngine(always(tokenizer.encode("!") * extra))
        body = {"prompt": [ids], "temperature": 0, "max_tokens": extra, "logprobs": 1, "seed": 1234, "echo": True}
        async with client(engine) as http:
            answer = (await http.post("/v1/completions", json=body)).json()
        assert engine.submits[0].sampling.max_tokens == extra
        assert engine.submits[0].sampling.prompt_logprobs == 1
        (choice,) = answer["choices"]
        logprobs = choice["logprobs"]
        assert choice["text"].startswith(text)
        assert logprobs["token_logprobs"][: len(ids)] == [None, *(-0.5 - i / 1024 for i in ids[1:])]
        assert logprobs["top_logprobs"][0] is None
        assert all(len(values) == len(ids) + extra for values in logprobs.values())
        assert "".join(logprobs["tokens"][: len(ids)]) == text
        for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
            assert choice["text"][offset:].startswith(token)
        assert answer["usage"]["completion_tokens"] == extra
        assert choice["finish_reason"] == "length"


async def test_logprobs_end_with_the_token_that_completed_a_stop_string(client, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("one two STOP three")
    until = len(tokenizer.encode("one two STOP"))
    body = {"prompt": "a", "stop": "STOP", "logprobs": 0, "return_token_ids": True}
    for per_message in (1, 3, 100):
        async with client(ScriptedEngine(always(ids, per_message=per_message))) as http:
            (choice,) = (await http.post("/v1/completions", json=body)).json()["choices"]
        assert choice["text"] == "one two "
        assert choice["token_ids"] == ids[:until]
        assert choice["logprobs"]["tokens"] == [tokenizer.token_text(i) for i in ids[:until]]
        assert choice["logprobs"]["token_logprobs"] == [-0.5 - i / 1024 for i in ids[:until]]


@pytest.mark.parametrize("stream", [False, True])
async def test_no_tokens_wanted_needs_no_engine(client, stream: bool) -> None:
    engine = ScriptedEngine(always([5]))
    body = {"prompt": ["Hello", "fox"], "max_tokens": 0, "echo": True, "stream": stream}
    async with client(engine) as http:
        answer = await http.post("/v1/completions", json=body)
    choices = [c for chunk in (chunks_of(answer.text) if stream else [answer.json()]) for c in chunk["choices"]]
    assert [(c["text"], c["finish_reason"]) for c in choices] == [("Hello", "length"), ("fox", "length")]
    assert engine.submits == []


async def test_prompt_logprobs_of_each_prompt(client, tokenizer: Tokenizer) -> None:
    body = {"prompt": [[5, 6, 7], [8, 9]], "prompt_logprobs": 0, "max_tokens": 1}
    async with client(ScriptedEngine(always([5]))) as http:
        first, second = (await http.post("/v1/completions", json=body)).json()["choices"]
    assert first["prompt_logprobs"][0] is None
    assert [list(entry) for entry in first["prompt_logprobs"][1:]] == [["6"], ["7"]]
    assert [list(entry) for entry in second["prompt_logprobs"][1:]] == [["9"]]


async def test_what_fits_is_decided_per_prompt(client) -> None:
    engine = ScriptedEngine(always([5]))
    async with client(engine) as http:
        answer = await http.post("/v1/completions", json={"prompt": [[5] * 60, [5] * 10]})
        assert answer.status_code == 200
    assert [s.sampling.max_tokens for s in engine.submits] == [4, 16]
