import pytest

from cluster.text.tokenizer import Tokenizer
from tests.cluster.scripted_engine import ScriptedEngine, always

pytestmark = pytest.mark.anyio

TEXT = "Hello, wörld 😀!<|im_end|>"


async def test_round_trip(client, tokenizer: Tokenizer) -> None:
    async with client(ScriptedEngine(always([5]))) as http:
        answer = (await http.post("/tokenize", json={"prompt": TEXT, "return_token_strs": True})).json()
        text = (await http.post("/detokenize", json={"tokens": answer["tokens"]})).json()
    assert answer["tokens"] == tokenizer.encode(TEXT)
    assert answer["count"] == len(answer["tokens"])
    assert answer["max_model_len"] == 64
    assert answer["token_strs"][0] == "Hello"
    assert text == {"prompt": TEXT}


async def test_messages_are_what_a_chat_would_send(client) -> None:
    engine = ScriptedEngine(always([5]))
    messages = [{"role": "user", "content": "hi"}]
    async with client(engine) as http:
        for extra in ({}, {"add_generation_prompt": False}, {"add_special_tokens": True}):
            answer = (await http.post("/tokenize", json={"messages": messages} | extra)).json()
            await http.post("/v1/chat/completions", json={"messages": messages} | extra)
            assert answer["tokens"] == list(engine.submits[-1].token_ids)


async def test_what_a_client_needs_to_write_prompts_itself(client, tokenizer: Tokenizer) -> None:
    async with client(ScriptedEngine(always([5]))) as http:
        info = (await http.get("/tokenizer_info")).json()
    assert info == {
        "bos_token": "<|endoftext|>",
        "eos_token": "<|im_end|>",
        "model_max_length": 64,
        "chat_template": tokenizer.config.chat_template,
    }


async def test_a_text_longer_than_the_context_can_be_counted(client) -> None:
    async with client(ScriptedEngine(always([5]))) as http:
        answer = (await http.post("/tokenize", json={"prompt": "fox " * 400})).json()
        assert answer["count"] > 400
        assert (await http.post("/tokenize", json={"prompt": ""})).json()["count"] == 0
        assert (await http.post("/detokenize", json={"tokens": []})).json() == {"prompt": ""}
