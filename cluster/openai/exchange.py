"""One HTTP request that generates: read within limits, answered whole or as a stream, and counted once it ends."""

from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import TypeVar

from fastapi import Request, Response
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect

from cluster.openai.errors import ApiError, from_validation, invalid
from cluster.openai.event_stream import EventStream, as_api_error, while_connected
from cluster.openai.metrics import DISCONNECTED, FrontEndMetrics

B = TypeVar("B", bound=BaseModel)

Answer = bytes | AsyncGenerator[bytes, None]


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Return the request's body; refuse one that is too large before the rest of it has arrived."""
    declared = request.headers.get("content-length", "")
    if declared.isascii() and declared.isdecimal() and (len(declared) > 18 or int(declared) > max_bytes):
        raise _too_large(max_bytes)
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > max_bytes:
            raise _too_large(max_bytes)
    return bytes(body)


def parse(kind: type[B], body: bytes) -> B:
    """Return the body as its model; raise ``ApiError`` naming the field that is wrong."""
    if not body:
        raise invalid("the request has no body; it needs a JSON object")
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise from_validation(error) from None


async def generate(
    request: Request, max_bytes: int, metrics: FrontEndMetrics, handler: Callable[[bytes], Awaitable[Answer]]
) -> Response:
    """Answer with what ``handler`` makes of the body: JSON, or the events of a stream."""
    metrics.running.inc()

    def ended(status: int) -> None:
        metrics.running.dec()
        metrics.requests.labels(str(status)).inc()

    async def answer(body: bytes) -> Answer:
        return await handler(body)

    try:
        body = await read_body(request, max_bytes)
        result = await while_connected(request.receive, answer(body))
    except ClientDisconnect:
        ended(DISCONNECTED)
        return Response(status_code=DISCONNECTED)  # nobody hears it
    except Exception as error:
        failure = as_api_error(error)
        ended(failure.status)
        return failure.response()
    except BaseException:
        ended(DISCONNECTED)
        raise
    if isinstance(result, bytes):
        ended(200)
        return Response(result, media_type="application/json")
    return EventStream(result, ended)


def _too_large(max_bytes: int) -> ApiError:
    # The rest of the body is not read, so the connection cannot carry another request.
    return ApiError(413, f"the request body is larger than {max_bytes} bytes", headers={"Connection": "close"})
