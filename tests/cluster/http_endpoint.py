"""A front end's HTTP server on a real socket, in a thread of this process."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import uvicorn
from fastapi import FastAPI


@dataclass(frozen=True)
class Endpoint:
    host: str
    port: int

    def connect(self) -> socket.socket:
        return socket.create_connection((self.host, self.port), timeout=20)

    def url(self, scheme: str = "http", host: str | None = None) -> str:
        return f"{scheme}://{host or self.host}:{self.port}"


@contextmanager
def listening(server: uvicorn.Server) -> Iterator[Endpoint]:
    """Serve until the block ends."""
    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    try:
        yield Endpoint(*listener.getsockname()[:2])
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()


def small_app() -> FastAPI:
    app = FastAPI()

    @app.get("/v1/models")
    def models() -> dict:
        return {"object": "list", "data": [{"id": "fake-model"}]}

    return app
