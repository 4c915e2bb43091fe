"""The command line, and a small OpenAI-compatible server on a real socket for tests of everything that is a client."""

import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from tests.cluster.command_line import Run, command_line

Body = dict[str, Any]


def sse(content: Body | str) -> str:
    return f"data: {content if isinstance(content, str) else json.dumps(content)}\n\n"


async def completion(server: "FakeServer", body: Body) -> AsyncIterator[str]:
    """One chunk per token, then the finish reason, then usage with the bytes of prompt - 1 tokens."""
    for index in range(body["max_tokens"]):
        yield sse({"choices": [{"index": 0, "text": f"t{index} ", "finish_reason": None}]})
    yield sse({"choices": [{"index": 0, "text": "", "finish_reason": "length"}]})
    payload = (len(body["prompt"]) - 1) * server.bytes_per_token
    server.payload_bytes += payload
    server.wire_bytes += payload + server.framing_bytes
    yield sse(
        {
            "choices": [],
            "usage": {
                "prompt_tokens": len(body["prompt"]),
                "completion_tokens": body["max_tokens"],
                "total_tokens": len(body["prompt"]) + body["max_tokens"],
                "crosskv": {
                    "payload_bytes": payload + server.excess_bytes,
                    "lower_bound_bytes": payload,
                    "unshared_bytes": (len(body["prompt"]) - 1) * server.unshared_bytes_per_token,
                    "retransmitted_bytes": 0,
                    "transfer_ms": 2.5,
                },
            },
        }
    )
    yield sse("[DONE]")


async def chat(server: "FakeServer", body: Body) -> AsyncIterator[str]:
    """Answer with the last message, word by word."""
    yield sse({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})
    for word in ["You", " said: ", body["messages"][-1]["content"]]:
        yield sse({"choices": [{"index": 0, "delta": {"content": word}, "finish_reason": None}]})
    yield sse({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    payload = 4 * server.bytes_per_token
    yield sse(
        {
            "choices": [],
            "usage": {
                "prompt_tokens": 5,
                "completion_tokens": 3,
                "crosskv": {
                    "payload_bytes": payload + server.excess_bytes,
                    "lower_bound_bytes": payload,
                    "unshared_bytes": 4 * server.unshared_bytes_per_token,
                    "transfer_ms": 1.0,
                },
            },
        }
    )
    yield sse("[DONE]")


@dataclass
class FakeServer:
    """What the server was asked, and knobs for what it answers."""

    base_url: str = ""
    bodies: list[Body] = field(default_factory=list)
    in_flight: int = 0
    peak_in_flight: int = 0
    bytes_per_token: int = 100
    unshared_bytes_per_token: int = 200
    framing_bytes: int = 7
    excess_bytes: int = 0
    payload_bytes: int = 0
    wire_bytes: int = 0
    refusal: tuple[int, Body | str] | None = None
    completion: Callable[["FakeServer", Body], AsyncIterator[str]] = completion
    chat: Callable[["FakeServer", Body], AsyncIterator[str]] = chat

    def app(self) -> FastAPI:
        app = FastAPI()

        async def counted(stream: AsyncIterator[str]) -> AsyncIterator[str]:
            self.in_flight += 1
            self.peak_in_flight = max(self.peak_in_flight, self.in_flight)
            async for item in stream:
                # The last item ends the request for the client, so it must no longer be counted.
                if "[DONE]" in item:
                    self.in_flight -= 1
                yield item

        async def answer(request: Request) -> Response:
            body = await request.json()
            self.bodies.append(body)
            if self.refusal is not None:
                status, content = self.refusal
                if isinstance(content, str):
                    return Response(content, status_code=status)
                return JSONResponse(content, status_code=status)
            make = self.chat if request.url.path.endswith("/chat/completions") else self.completion
            return StreamingResponse(counted(make(self, body)), media_type="text/event-stream")

        app.add_api_route("/v1/completions", answer, methods=["POST"])
        app.add_api_route("/v1/chat/completions", answer, methods=["POST"])

        @app.get("/v1/models")
        def models() -> Body:
            return {"object": "list", "data": [{"id": "fake-model", "object": "model"}]}

        @app.get("/cluster")
        def cluster() -> list[Body]:
            # 64-bit integers are strings in protobuf's JSON.
            return [
                {
                    "role": "prefill",
                    "replica_id": "p0",
                    "load": {"total_blocks": 64, "free_blocks": 64},
                    "counters": {
                        "payload_bytes": str(self.payload_bytes),
                        "lower_bound_bytes": str(self.payload_bytes),
                        "wire_bytes": str(self.wire_bytes),
                    },
                    "owner_layers": 15,
                    "total_layers": 30,
                },
                {
                    "role": "decode",
                    "replica_id": "d0",
                    "load": {"running_requests": 3, "total_blocks": 64, "free_blocks": 61, "cached_blocks": 1},
                    "held_blocks": 2,
                    "counters": {"wire_bytes": "999999999", "prefix_queries": "8", "prefix_hits": "2"},
                    "owner_layers": 15,
                    "total_layers": 30,
                },
            ]

        return app


@pytest.fixture
def fake_server() -> Iterator[FakeServer]:
    fake = FakeServer()
    ready = threading.Event()

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[Any] | None = None) -> None:
            await super().startup(sockets)
            ready.set()

    server = Server(uvicorn.Config(fake.app(), host="127.0.0.1", port=0, log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    assert ready.wait(20)
    fake.base_url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    yield fake
    server.should_exit = True
    thread.join(20)
    assert not thread.is_alive()


@pytest.fixture
def crosskv(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the command line in this process; return its exit code, output and errors."""
    return command_line(monkeypatch, capsys)
