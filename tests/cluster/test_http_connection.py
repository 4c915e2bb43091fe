"""Clients that connect and then do not behave, beside one that does."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse

from cluster.http_connection import ConnectionLimits
from cluster.http_server import http_server
from tests.cluster.http_endpoint import Endpoint, listening, small_app

LIMITS = ConnectionLimits(
    connections=8, header_bytes=4096, header_seconds=0.5, request_seconds=1.0, stalled_seconds=1.0
)
PATIENCE = 20.0


def make_app() -> FastAPI:
    app = small_app()

    @app.post("/length")
    async def length(request: Request) -> dict:
        return {"length": len(await request.body())}

    @app.get("/endless")
    def endless() -> StreamingResponse:
        def content() -> Iterator[bytes]:
            while True:
                yield b"x" * (1 << 16)

        return StreamingResponse(content())

    @app.get("/slow")
    def slow() -> StreamingResponse:
        def content() -> Iterator[bytes]:
            for _ in range(8):
                time.sleep(0.25)
                yield b"x"

        return StreamingResponse(content())

    return app


@pytest.fixture
def told() -> list[str]:
    """Codes that clients were told."""
    return []


@pytest.fixture
def endpoint(told: list[str]) -> Iterator[Endpoint]:
    with listening(http_server(make_app(), None, 1.0, LIMITS, lambda error: told.append(error.code.text))) as endpoint:
        yield endpoint


def code_in(answer: bytes) -> str:
    """The code in the body of a connection's only answer."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert f"content-length: {len(body)}".encode() in head
    assert head.count(b"connection: close") == 1
    return json.loads(body)["error"]["code"]


def everything(connection: socket.socket) -> bytes:
    """What comes until the server hangs up."""
    connection.settimeout(PATIENCE)
    received = b""
    try:
        while part := connection.recv(1 << 16):
            received += part
    except ConnectionResetError:
        pass
    return received


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"GET /v1/mod",
        b"GET /v1/models HTTP/1.1\r\nHost: a\r\nX-Slow: ",
        b"POST /length HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\nabc",
        b"POST /length HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab",
        b"GET /v1/models HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n",
    ],
)
def test_a_client_that_does_not_finish_its_request_is_disconnected(endpoint: Endpoint, said: bytes) -> None:
    with endpoint.connect() as connection:
        connection.sendall(said)
        answer = everything(connection)
    assert b"408 Request Timeout" in answer or (b"200 OK" in answer and said.startswith(b"GET /v1/models HTTP"))
    assert b"200 OK" in answer or code_in(answer) == "request_timeout"


def send_until_refused(connection: socket.socket, part: bytes, pause: float) -> None:
    deadline = time.monotonic() + PATIENCE
    try:
        while True:
            assert time.monotonic() < deadline, "the server takes everything"
            connection.sendall(part)
            time.sleep(pause)
    except (BrokenPipeError, ConnectionResetError):
        pass


def test_one_byte_at_a_time_does_not_help(endpoint: Endpoint) -> None:
    with endpoint.connect() as connection:
        connection.sendall(b"GET /")
        send_until_refused(connection, b"x", 0.02)


def test_headers_without_end_are_refused(endpoint: Endpoint) -> None:
    with endpoint.connect() as connection:
        connection.sendall(b"GET /v1/models HTTP/1.1\r\nHost: a\r\nX-Long: ")
        send_until_refused(connection, b"x" * 4096, 0.001)
    with endpoint.connect() as connection:
        connection.sendall(b"GET /v1/models HTTP/1.1\r\nHost: a\r\nX-Long: " + b"x" * LIMITS.header_bytes)
        time.sleep(0.05)
        connection.sendall(b"x" * LIMITS.header_bytes)
        answer = everything(connection)
    assert b"431 " in answer
    assert code_in(answer) == "headers_too_large"


def test_one_that_takes_nothing_is_disconnected(endpoint: Endpoint) -> None:
    with endpoint.connect() as connection:
        connection.sendall(b"GET /endless HTTP/1.1\r\nHost: a\r\n\r\n")
        time.sleep(3 * LIMITS.stalled_seconds)
        # What was sent before is still to be read; then there is no more.
        everything(connection)


def test_connections_beyond_the_limit_are_refused_and_room_comes_back(endpoint: Endpoint, told: list[str]) -> None:
    with ExitStack() as stack:
        for _ in range(LIMITS.connections):
            stack.enter_context(endpoint.connect())
        answer = everything(stack.enter_context(endpoint.connect()))
        assert b"503 " in answer
        assert b"retry-after: 1" in answer
        assert code_in(answer) == "too_many_connections"
    assert "too_many_connections" in told
    deadline = time.monotonic() + PATIENCE
    while httpx.get(endpoint.url() + "/v1/models").status_code != 200:
        assert time.monotonic() < deadline


def test_a_slow_answer_and_a_late_second_request_are_nobodys_fault(endpoint: Endpoint) -> None:
    with httpx.Client(base_url=endpoint.url(), timeout=PATIENCE) as client:
        assert client.get("/slow").content == b"x" * 8
        time.sleep(2 * LIMITS.header_seconds)
        assert client.get("/v1/models").status_code == 200
        assert client.post("/length", content=b"y" * 100_000).json() == {"length": 100_000}


def test_nobody_notices_the_others(endpoint: Endpoint) -> None:
    stop = threading.Event()

    def misbehave() -> None:
        while not stop.is_set():
            try:
                with endpoint.connect() as connection:
                    connection.sendall(b"\x16\x03\x01\x00\xff" * 50)
                    everything(connection)
            except OSError:
                pass

    threads = [threading.Thread(target=misbehave) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        with httpx.Client(base_url=endpoint.url(), timeout=PATIENCE) as client:
            for _ in range(50):
                assert client.get("/v1/models").status_code == 200
    finally:
        stop.set()
        for thread in threads:
            thread.join()
