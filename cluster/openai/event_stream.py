"""Server-sent events: how a stream begins, breaks off and ends."""

import asyncio
import logging
import traceback
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from pydantic_core import to_json
from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from cluster.openai.error_code import DISCONNECTED, ErrorCode
from cluster.openai.errors import ApiError

T = TypeVar("T")
_logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"


class ChunkWriter:
    """Writes one stream's chunks. What is the same in all of them is made once."""

    def __init__(self, response_id: str, kind: str, created: int, model: str) -> None:
        head = to_json({"id": response_id, "object": kind, "created": created, "model": model})
        self._head = b"data: " + head[:-1] + b',"choices":['

    def chunk(self, choice: dict[str, Any], usage: bytes | None = None) -> bytes:
        """Return the event of one choice's news; ``usage`` is JSON."""
        return self._head + to_json(choice) + self._tail(usage)

    def usage(self, usage: bytes) -> bytes:
        """Return the event that has no choices."""
        return self._head + self._tail(usage)

    @staticmethod
    def _tail(usage: bytes | None) -> bytes:
        return b"]}\n\n" if usage is None else b'],"usage":' + usage + b"}\n\n"


class EventStream(StreamingResponse):
    """Sends events as they come.

    The response begins with the first event, so that a request that fails before has its own status. One that fails
    later ends with an error event and without ``[DONE]``. When the client leaves, the source of events is closed.
    ``on_end`` is told the status in each case, and what the client was told of a failure. ``headers`` are sent in each
    case as well. ``name`` is the request's, for the log.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        on_end: Callable[[int, ApiError | None], None],
        headers: dict[str, str],
        name: str,
    ) -> None:
        super().__init__(events, headers={"Cache-Control": "no-cache"} | headers, media_type="text/event-stream")
        self._own_headers = headers
        self._name = name
        self._events = events
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the response, as ASGI has it."""
        status, failure = DISCONNECTED, None
        try:
            failure = await while_connected(receive, self._run(scope, receive, send))
            status = 200 if failure is None else failure.status
        except ClientDisconnect:
            return
        finally:
            self._on_end(status, failure)

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> ApiError | None:
        began = False
        failure: ApiError | None = None
        try:
            async with aclosing(self._events) as events:
                async for event in events:
                    if not began:
                        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                        began = True
                    await send({"type": "http.response.body", "body": event, "more_body": True})
        except OSError as error:
            raise ClientDisconnect from error
        except Exception as error:
            failure = as_api_error(error, self._name)
            failure.headers |= self._own_headers
            if not began:
                await failure.response()(scope, receive, send)
                return failure
            await send({"type": "http.response.body", "body": b"data: " + failure.body() + b"\n\n", "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        return failure


def as_api_error(error: Exception, name: str = "a request") -> ApiError:
    """Return what the client is told; an error that nobody expected is logged and not shown."""
    if isinstance(error, ApiError):
        return error
    _logger.error("%s failed unexpectedly\n%s", name, without_content(error))
    return ApiError(ErrorCode.INTERNAL_ERROR, "internal error; the server's log has the details")


def without_content(error: BaseException) -> str:
    """Return where an error and those before it were raised, and their types: their words may be a request's own."""
    lines = [*traceback.format_tb(error.__traceback__), f"{type(error).__module__}.{type(error).__qualname__}\n"]
    for number, one in enumerate(error.exceptions if isinstance(error, BaseExceptionGroup) else ()):
        lines += [f"Its part {number}:\n", without_content(one)]
    earlier = error.__cause__ or error.__context__
    if earlier is not None and earlier is not error:
        lines = [without_content(earlier), "After that:\n", *lines]
    return "".join(lines)


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return the work's result; if the client leaves first, cancel the work and raise ``ClientDisconnect``."""
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_until_disconnected(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        gone.cancel()
        task.cancel()
        await asyncio.wait({task, gone})


async def _until_disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
