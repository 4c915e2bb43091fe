"""One HTTP request that generates: read within limits, answered whole or as a stream, and counted once it ends."""

import asyncio
import math
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, TypeVar

from fastapi import Request, Response
from pydantic import BaseModel, ValidationError
from pydantic_core import to_json
from starlette.requests import ClientDisconnect

from cluster.journal import Entry
from cluster.openai.api_keys import Caller
from cluster.openai.authentication import caller_of
from cluster.openai.error_code import DISCONNECTED, ErrorCode
from cluster.openai.errors import ApiError, from_validation, invalid
from cluster.openai.event_stream import EventStream, as_api_error, while_connected
from cluster.openai.json_bounds import require_few_containers
from cluster.openai.limits import ApiLimits
from cluster.openai.metrics import FrontEndMetrics

B = TypeVar("B", bound=BaseModel)

TIMEOUT_HEADER = "X-Request-Timeout"
"""Seconds that a request may take, like ``timeout`` in its body."""

REQUEST_ID_HEADER = "X-Request-Id"
"""What the request is called, here and in its answer's body."""

_FORGOTTEN_BODIES = 4
_FORGETTING_SECONDS = 2.0

Answer = bytes | AsyncGenerator[bytes, None]


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Return the request's body; refuse one that is too large, or too slow to parse, as soon as that is known."""
    body = bytearray()
    parts = request.stream()
    declared = request.headers.get("content-length", "")
    too_large = declared.isascii() and declared.isdecimal() and (len(declared) > 18 or int(declared) > max_bytes)
    while not too_large and (part := await anext(parts, None)) is not None:
        body += part
        too_large = len(body) > max_bytes
    if too_large:
        body.clear()
        if "expect" not in request.headers:
            await _forget(parts, _FORGOTTEN_BODIES * max_bytes)
        # What is still on its way makes the connection useless for another request.
        raise ApiError(
            ErrorCode.BODY_TOO_LARGE,
            f"the request body is larger than {max_bytes} bytes (--max-body-size)",
            headers={"Connection": "close"},
        )
    complete = bytes(body)
    await require_few_containers(complete)
    return complete


async def _forget(parts: AsyncGenerator[bytes, None], max_bytes: int) -> None:
    """Read on for a while: most clients listen only after they have sent, and would see nothing but a reset."""
    try:
        async with asyncio.timeout(_FORGETTING_SECONDS):
            async for part in parts:
                max_bytes -= len(part)
                if max_bytes < 0:
                    return
    except TimeoutError:
        pass


def timeout_of(request: Request, limits: ApiLimits) -> float | None:
    """Return the seconds that the header allows, if it is there; raise ``ApiError`` for what is no such time."""
    given = request.headers.get(TIMEOUT_HEADER)
    if given is None:
        return None
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= limits.max_timeout:
        raise invalid(
            f"{TIMEOUT_HEADER} is {given!r:.100}, which is no number of seconds up to {limits.max_timeout}",
            TIMEOUT_HEADER,
        )
    return seconds


def parse(kind: type[B], body: bytes) -> B:
    """Return the body as its model; raise ``ApiError`` naming the field that is wrong."""
    if not body:
        raise invalid("the request has no body; it needs a JSON object")
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise from_validation(error) from None


async def answered(
    request: Request, max_bytes: int, metrics: FrontEndMetrics, handler: Callable[[bytes], Awaitable[Any]]
) -> Response:
    """Answer with what ``handler`` makes of the body, as JSON."""
    try:
        return Response(to_json(await handler(await read_body(request, max_bytes))), media_type="application/json")
    except ClientDisconnect:
        return Response(status_code=DISCONNECTED)  # nobody hears it
    except Exception as error:
        failure = as_api_error(error)
        metrics.failed(failure)
        return failure.response()


async def generate(
    request: Request,
    limits: ApiLimits,
    metrics: FrontEndMetrics,
    entry: Entry,
    handler: Callable[[bytes, Caller, float | None, Entry], Awaitable[Answer]],
) -> Response:
    """Answer with what ``handler`` makes of the caller's body and timeout: JSON, or the events of a stream."""
    metrics.running.inc()
    headers = {REQUEST_ID_HEADER: entry.request_id}

    def ended(status: int, failure: ApiError | None = None) -> None:
        entry.ended(status)
        metrics.running.dec()
        metrics.requests.labels(str(status)).inc()
        if failure is not None:
            metrics.failed(failure)

    async def answer(body: bytes, seconds: float | None) -> Answer:
        return await handler(body, caller_of(request), seconds, entry)

    try:
        seconds = timeout_of(request, limits)
        body = await read_body(request, limits.max_body_bytes)
        result = await while_connected(request.receive, answer(body, seconds))
    except ClientDisconnect:
        ended(DISCONNECTED)
        return Response(status_code=DISCONNECTED)  # nobody hears it
    except Exception as error:
        failure = as_api_error(error, entry.request_id)
        failure.headers |= headers
        ended(failure.status, failure)
        return failure.response()
    except BaseException:
        ended(DISCONNECTED)
        raise
    if isinstance(result, bytes):
        ended(200)
        return Response(result, headers=headers, media_type="application/json")
    return EventStream(result, ended, headers, entry.request_id)
