"""A whole cluster, driven as clients drive it."""

import asyncio
import os
import random
from contextlib import suppress

import httpx
import openai
import psutil
import pytest

from cluster.rank_actor import PREFILL_NICENESS
from tests.cluster.system.conftest import Serving
from tests.cluster.system.processes import engine_process
from tests.replica_listing import listed_replicas

VOCAB = 512
FIRST_TEXT_TOKEN = 4


def prompts(count: int, longest: int, seed: int) -> list[list[int]]:
    numbers = random.Random(seed)
    return [
        [numbers.randrange(FIRST_TEXT_TOKEN, VOCAB) for _ in range(numbers.randint(1, longest))] for _ in range(count)
    ]


def body(prompt: list[int], **more: object) -> dict:
    return {"model": "tiny", "prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True, **more}


def complete(serving: Serving, prompt: list[int], **more: object) -> dict:
    response = httpx.post(f"{serving.base_url}/v1/completions", json=body(prompt, **more), timeout=60)
    assert response.status_code == 200, response.text
    return response.json()


def test_official_client(serving: Serving) -> None:
    client = openai.OpenAI(base_url=f"{serving.base_url}/v1", api_key="unused")
    assert [model.id for model in client.models.list()] == ["tiny"]
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    whole = client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=12, temperature=0, extra_body={"ignore_eos": True}
    )
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage.completion_tokens == 12
    chunks = list(
        client.chat.completions.create(
            model="tiny",
            messages=messages,
            max_tokens=12,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model="tiny", prompt="x", temperature=-1)


def test_prompts_give_way_to_tokens(serving: Serving) -> None:
    found: dict[str, set[int]] = {"prefill": set(), "decode": set()}
    for record in listed_replicas():
        _, process = engine_process(record.incarnation)
        for thread in psutil.Process(process).threads():
            with suppress(ProcessLookupError):
                found[record.role].add(os.getpriority(os.PRIO_PROCESS, thread.id))
    (usual,) = found["decode"]
    # Ray's own threads were there before.
    assert found["prefill"] == {usual, usual + PREFILL_NICENESS}


def test_bytes_are_the_lower_bound(serving: Serving) -> None:
    """4 owner layers × 2 × 2 KV heads × 16 × 4 bytes for every token but the last."""
    per_token = 4 * 2 * 2 * 16 * 4
    for prompt in prompts(4, 300, seed=11):
        sent = complete(serving, prompt)["usage"]["crosskv"]
        assert sent["payload_bytes"] == sent["lower_bound_bytes"] == (len(prompt) - 1) * per_token
        assert (sent["attempts"] > 0) == (len(prompt) > 1)


def test_many_at_once_some_cancelled(serving: Serving) -> None:
    """64 requests of mixed length, a quarter cancelled midway; the others answer as they would alone."""
    asked = prompts(64, 500, seed=12)
    cancelled = set(random.Random(13).sample(range(64), 16))
    alone = {
        index: complete(serving, prompt, cache_salt="alone")["choices"][0]["text"]
        for index, prompt in enumerate(asked)
        if index not in cancelled
    }

    async def request(client: httpx.AsyncClient, index: int) -> str | None:
        together = body(asked[index], cache_salt="together")
        if index not in cancelled:
            response = await client.post("/v1/completions", json=together)
            assert response.status_code == 200, response.text
            return response.json()["choices"][0]["text"]
        async with client.stream("POST", "/v1/completions", json=together | {"stream": True, "max_tokens": 400}) as r:
            events = index % 7
            async for line in r.aiter_lines():
                events -= line.startswith("data:")
                if events < 0:
                    break
        return None

    async def everything() -> list[str | None]:
        limits = httpx.Limits(max_connections=64)
        async with httpx.AsyncClient(base_url=serving.base_url, timeout=120, limits=limits) as client:
            return await asyncio.gather(*(request(client, index) for index in range(64)))

    together = asyncio.run(everything())
    for index, text in alone.items():
        assert together[index] == text, f"request {index} of {len(asked[index])} tokens"
    serving.wait_until_idle()
    decode = [status for status in serving.statuses() if status["role"] == "decode"]
    assert sum(status["counters"]["requests_aborted"] for status in decode) > 0


def test_choices_are_seeded(serving: Serving) -> None:
    prompt = prompts(1, 80, seed=14)[0]
    first = complete(serving, prompt, temperature=1.0, seed=7, n=4)
    again = complete(serving, prompt, temperature=1.0, seed=7, n=4)
    texts = [choice["text"] for choice in first["choices"]]
    assert texts == [choice["text"] for choice in again["choices"]]
    assert len(set(texts)) > 1


def test_refusals_leave_others_alone(serving: Serving) -> None:
    good = prompts(1, 50, seed=15)[0]
    before = complete(serving, good)["choices"][0]["text"]
    wrongs = ({"prompt": [VOCAB]}, {"prompt": [5] * 5000}, {"n": 10_000}, {"top_p": 0}, {"logit_bias": {"9999": 1}})
    for wrong in wrongs:
        response = httpx.post(f"{serving.base_url}/v1/completions", json=body(good) | wrong, timeout=30)
        assert response.status_code == 400, response.text
        assert response.json()["error"]["message"]
    assert complete(serving, good)["choices"][0]["text"] == before
