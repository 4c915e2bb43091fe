"""A client that leaves ends its request on the replica at once, whatever the request was doing."""

import asyncio
import json
from typing import Any

import pytest
from fastapi import FastAPI

from tests.cluster.scripted_engine import ScriptedEngine, emit
from worker.wire.engine_pb2 import Submit

pytestmark = pytest.mark.anyio

REQUESTS = {
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}, 1),
    "text": ("/v1/completions", {"prompt": "a"}, 1),
    "choices": ("/v1/completions", {"prompt": "a", "n": 3}, 1),
    "batch": ("/v1/completions", {"prompt": ["a", "b", "c"]}, 3),
}


class Visitor:
    """An ASGI client that sends one request and leaves when told to."""

    def __init__(self, app: FastAPI, path: str, body: dict[str, Any]) -> None:
        self._parts = [json.dumps(body).encode()]
        self._app = app
        self._scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": "1.1",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "scheme": "http",
            "query_string": b"",
            "headers": [],
            "client": ("test", 1),
            "server": ("test", 80),
        }
        self.leaves = asyncio.Event()
        self.received = asyncio.Event()
        self.messages: list[dict[str, Any]] = []

    async def visit(self) -> None:
        await self._app(self._scope, self._receive, self._send)

    async def _receive(self) -> dict[str, Any]:
        if self._parts:
            return {"type": "http.request", "body": self._parts.pop(), "more_body": False}
        await self.leaves.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        self.messages.append(message)
        self.received.set()


@pytest.mark.parametrize("name", REQUESTS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tokens_before", [0, 2])
async def test_leaving_aborts(make_app, name: str, stream: bool, tokens_before: int) -> None:
    path, body, requests = REQUESTS[name]
    waiting = asyncio.Semaphore(0)

    def script(submit: Submit):
        yield from emit(submit, [40, 41, 42])[:tokens_before]
        waiting.release()
        yield asyncio.Event()  # for ever, like a request in a queue or between two steps

    engine = ScriptedEngine(script)
    app = make_app(engine)
    visitor = Visitor(app, path, body | {"stream": stream})
    visit = asyncio.create_task(visitor.visit())
    async with asyncio.timeout(5):
        for _ in range(requests):
            await waiting.acquire()
        if stream and tokens_before:
            await visitor.received.wait()
        assert engine.aborted == []
        visitor.leaves.set()
        await visit
    assert len(engine.aborted) == requests
    # Nothing pretends that the answer was whole.
    assert not any(b"[DONE]" in message.get("body", b"") for message in visitor.messages)


async def test_leaving_is_counted_and_others_go_on(make_app, client) -> None:
    go_on = asyncio.Event()
    waiting = asyncio.Semaphore(0)

    def script(submit: Submit):
        first, second = emit(submit, [40, 41])
        yield first
        waiting.release()
        yield go_on
        yield second

    engine = ScriptedEngine(script)
    app = make_app(engine)
    leaving, staying = (Visitor(app, "/v1/completions", {"prompt": "a"}) for _ in range(2))
    visits = [asyncio.create_task(visitor.visit()) for visitor in (leaving, staying)]
    async with asyncio.timeout(5):
        await waiting.acquire()
        await waiting.acquire()
        leaving.leaves.set()
        await visits[0]
        go_on.set()
        await visits[1]
    assert len(engine.aborted) == 1
    assert staying.messages[0]["status"] == 200
    metrics = Visitor(app, "/metrics", {})
    metrics._scope["method"] = "GET"
    await metrics.visit()
    text = b"".join(message.get("body", b"") for message in metrics.messages).decode()
    assert 'crosskv_requests_total{status="499"} 1.0' in text
    assert 'crosskv_requests_total{status="200"} 1.0' in text
    assert "crosskv_front_end_requests_in_flight 0.0" in text


async def test_leaving_before_the_body_is_complete(make_app) -> None:
    engine = ScriptedEngine(lambda _: [])
    visitor = Visitor(make_app(engine), "/v1/completions", {})
    visitor._parts.clear()
    visitor.leaves.set()
    async with asyncio.timeout(5):
        await visitor.visit()
    assert engine.submits == []
