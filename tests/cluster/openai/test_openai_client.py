"""The official client and plain HTTP against the application on a real socket."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

import httpx
import openai
import pytest
import uvicorn
from fastapi import FastAPI

from cluster.engine_client import EngineOverloaded
from cluster.openai.limits import ApiLimits
from cluster.text.tokenizer import Tokenizer
from tests.cluster.scripted_engine import ScriptedEngine, always, emit
from worker.wire import engine_pb2
from worker.wire.engine_pb2 import FINISH_REASON_ERROR, FINISH_REASON_STOP, Error, Output, Submit

pytestmark = pytest.mark.anyio

MESSAGES = [{"role": "user", "content": "hi"}]
ANSWER = "Hello, wörld 😀!"


@asynccontextmanager
async def serving(app: FastAPI) -> AsyncGenerator[str, None]:
    """Serve on a free port of this machine, in this event loop."""
    listening = asyncio.Event()

    class Server(uvicorn.Server):
        async def startup(self, sockets: list | None = None) -> None:
            await super().startup(sockets)
            listening.set()

    server = Server(uvicorn.Config(app, port=0, log_level="error"))
    task = asyncio.create_task(server.serve())
    await listening.wait()
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        await task


@pytest.fixture
def connect(make_app: Callable[..., FastAPI]):
    @asynccontextmanager
    async def connected(engine: ScriptedEngine) -> AsyncGenerator[openai.AsyncOpenAI, None]:
        async with (
            serving(make_app(engine)) as url,
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
        ):
            yield client

    return connected


async def test_chat(connect, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(ANSWER)
    async with connect(ScriptedEngine(always([*ids, 2], finish=FINISH_REASON_STOP))) as client:
        answer = await client.chat.completions.create(
            model="org/tiny", messages=MESSAGES, logprobs=True, top_logprobs=2, n=2, extra_body={"top_k": 5}
        )
        assert [choice.message.content for choice in answer.choices] == [ANSWER, ANSWER]
        assert [choice.finish_reason for choice in answer.choices] == ["stop", "stop"]
        assert [len(entry.top_logprobs) for entry in answer.choices[0].logprobs.content] == [2] * (len(ids) + 1)
        assert answer.usage.completion_tokens == 2 * (len(ids) + 1)
        assert answer.usage.prompt_tokens_details.cached_tokens == 0
        stream = await client.chat.completions.create(
            model="org/tiny", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    assert "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices) == ANSWER
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == len(ids) + 1
    assert chunks[-1].usage.crosskv["payload_bytes"] == 0


async def test_completions_and_models(connect, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(ANSWER)
    async with connect(ScriptedEngine(always(ids))) as client:
        answer = await client.completions.create(model="org/tiny", prompt=["Hello", "you"], echo=True, logprobs=1)
        assert [choice.text for choice in answer.choices] == ["Hello" + ANSWER, "you" + ANSWER]
        assert answer.choices[0].logprobs.token_logprobs[0] is None
        stream = await client.completions.create(model="org/tiny", prompt=[5, 6], stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == ANSWER
        assert [model.id async for model in client.models.list()] == ["org/tiny"]
        assert (await client.models.retrieve("org/tiny")).id == "org/tiny"


async def test_errors_are_the_clients_own_classes(connect) -> None:
    async with connect(ScriptedEngine(lambda _: [EngineOverloaded("full", 2)])) as client:
        with pytest.raises(openai.RateLimitError, match="full") as limited:
            await client.chat.completions.create(model="org/tiny", messages=MESSAGES, stream=True)
        assert limited.value.response.headers["retry-after"] == "2"
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            await client.chat.completions.create(model="other", messages=MESSAGES)
        with pytest.raises(openai.BadRequestError, match="temperature") as wrong:
            await client.chat.completions.create(model="org/tiny", messages=MESSAGES, temperature=9)
        assert wrong.value.param == "temperature"


async def test_a_stream_that_breaks_off_raises(connect) -> None:
    def script(submit: Submit):
        yield from emit(submit, [40, 41])[:1]
        yield [
            Output(finish_reason=FINISH_REASON_ERROR, error=Error(kind=engine_pb2.ERROR_KIND_INTERNAL, message="lost"))
        ]

    async with connect(ScriptedEngine(script)) as client:
        stream = await client.chat.completions.create(model="org/tiny", messages=MESSAGES, stream=True)
        with pytest.raises(openai.APIError, match="lost"):
            _ = [chunk async for chunk in stream]


async def test_closing_the_connection_aborts(connect) -> None:
    def script(submit: Submit):
        yield from emit(submit, [40, 41])[:1]
        yield asyncio.Event()

    engine = ScriptedEngine(script)
    async with connect(engine) as client, asyncio.timeout(10):
        stream = await client.chat.completions.create(model="org/tiny", messages=MESSAGES, stream=True)
        await anext(aiter(stream))
        await stream.close()
        await engine.abort_happened.wait()
        # Not streamed: nothing has been answered when the client gives up.
        engine.abort_happened.clear()
        engine.submitted.clear()
        asking = asyncio.create_task(client.chat.completions.create(model="org/tiny", messages=MESSAGES))
        await engine.submitted.wait()
        asking.cancel()
        await engine.abort_happened.wait()
    assert len(engine.aborted) == 2


async def test_many_at_once_stay_apart(connect, tokenizer: Tokenizer) -> None:
    def script(submit: Submit):
        yield from emit(submit, list(submit.token_ids) * 3)

    texts = [f"{word} {number}" for number in range(8) for word in ("Hello", "quick", "fox", "中文")]
    async with connect(ScriptedEngine(script)) as client:

        async def ask(text: str) -> str:
            stream = await client.completions.create(model="org/tiny", prompt=text, stream=True)
            return "".join([chunk.choices[0].text async for chunk in stream])

        assert await asyncio.gather(*map(ask, texts)) == [text * 3 for text in texts]


async def test_a_large_body_is_refused_on_the_wire(make_app: Callable[..., FastAPI]) -> None:
    limits = ApiLimits(max_body_bytes=100_000)
    async with (
        serving(make_app(ScriptedEngine(always([5])), limits=limits)) as url,
        httpx.AsyncClient(base_url=url) as http,
    ):
        response = await http.post("/v1/completions", json={"prompt": "a" * 200_000})
        assert response.status_code == 413
        assert "100000 bytes" in response.json()["error"]["message"]
        # One that never ends costs the server a bounded amount of reading, and others nothing.
        sent = 0

        async def endless() -> AsyncGenerator[bytes, None]:
            nonlocal sent
            while True:
                sent += 65_536
                yield b"x" * 65_536

        with contextlib.suppress(httpx.WriteError, httpx.ReadError):
            await http.post("/v1/completions", content=endless())
        assert sent < 64 << 20
        assert (await http.post("/v1/completions", json={"prompt": "a"})).status_code == 200
