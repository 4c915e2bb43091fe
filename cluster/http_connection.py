"""One client's connection to the HTTP server: uvicorn's, with bounds on what a client may hold without using it.

uvicorn makes one per connection. A client has so long to send a request's headers, so long to send the rest, and so
long to take what it is sent; beyond that it is disconnected, and so is whoever connects when all connections are taken.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from cluster.openai.error_code import ErrorCode
from cluster.openai.errors import ApiError


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """What connections may take. Times are seconds; ``header_bytes`` may be passed by what one read brings."""

    connections: int = 2048
    header_bytes: int = 64 << 10
    header_seconds: float = 10.0
    request_seconds: float = 120.0
    stalled_seconds: float = 60.0


class BoundedConnection(HttpToolsProtocol):
    """See the module. The timer that runs is that of what the client owes next. ``refused`` is told of refusals."""

    def __init__(
        self, *arguments: Any, limits: ConnectionLimits, refused: Callable[[ApiError], None], **named: Any
    ) -> None:
        super().__init__(*arguments, **named)
        self._limits = limits
        self._refused = refused
        self._in_headers = True
        self._header_bytes = 0
        self._owed: asyncio.TimerHandle | None = None
        self._stalled: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has connected: it owes headers."""
        super().connection_made(transport)
        if len(self.connections) > self._limits.connections:
            limit = self._limits.connections
            self._refuse(ApiError(ErrorCode.TOO_MANY_CONNECTIONS, f"all {limit} connections are taken", retry_after=1))
        else:
            self._owe(self._limits.header_seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        """It is gone."""
        self._settle()
        if self._stalled is not None:
            self._stalled.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse what has come, and give up on headers that do not end."""
        began_in_headers = self._in_headers
        super().data_received(data)
        if began_in_headers and self._in_headers:
            self._header_bytes += len(data)
            if self._header_bytes > self._limits.header_bytes:
                limit = self._limits.header_bytes
                self._refuse(ApiError(ErrorCode.HEADERS_TOO_LARGE, f"the headers are larger than {limit} bytes"))

    def on_message_begin(self) -> None:
        """A request's first bytes: it owes the rest of its headers."""
        self._in_headers = True
        self._header_bytes = 0
        self._owe(self._limits.header_seconds)
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """It owes a body."""
        self._in_headers = False
        self._owe(self._limits.request_seconds)
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """It owes nothing."""
        self._settle()
        super().on_message_complete()

    def pause_writing(self) -> None:
        """It does not take what it is sent."""
        self._stalled = self.loop.call_later(self._limits.stalled_seconds, self.transport.abort)
        super().pause_writing()

    def resume_writing(self) -> None:
        """It does."""
        if self._stalled is not None:
            self._stalled.cancel()
        super().resume_writing()

    def _owe(self, seconds: float) -> None:
        self._settle()
        late = ApiError(ErrorCode.REQUEST_TIMEOUT, f"the request was not complete after {seconds:g} s")
        self._owed = self.loop.call_later(seconds, self._refuse, late)

    def _settle(self) -> None:
        if self._owed is not None:
            self._owed.cancel()
            self._owed = None

    def _refuse(self, error: ApiError) -> None:
        """Say so, unless an answer to this or an earlier request is on its way, and hang up."""
        self._settle()
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            self._refused(error)
            status, response = HTTPStatus(error.status), error.response()
            headers = [*response.raw_headers, (b"connection", b"close")]
            lines = [f"HTTP/1.1 {status} {status.phrase}".encode(), *(name + b": " + value for name, value in headers)]
            self.transport.write(b"\r\n".join(lines) + b"\r\n\r\n" + bytes(response.body))
        self.transport.close()
