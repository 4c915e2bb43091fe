"""The application's outermost layer: no request without a known API key reaches what is inside.

It looks at the header alone, before any of the body is read. What is inside finds the caller in the request's state,
with ``caller_of``.
"""

from collections.abc import Callable

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from cluster.openai.api_keys import ANYBODY, ApiKeys, Caller
from cluster.openai.error_code import ErrorCode
from cluster.openai.errors import ApiError
from cluster.openai.status_page import PAGE

OPEN_PATHS = frozenset({"/health", "/ping", "/metrics", *PAGE})
"""What probes and monitoring ask without a key, and the status page's files, which ask for one. None says anything
about a request's content."""


class Authentication:
    """ASGI middleware around one application. ``refused`` is told what clients were told."""

    def __init__(self, app: ASGIApp, keys: ApiKeys, refused: Callable[[ApiError], None]) -> None:
        self._app = app
        self._keys = keys
        self._refused = refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run a request, as ASGI has it."""
        if scope["type"] != "lifespan":
            headers = [value for name, value in scope["headers"] if name == b"authorization"]
            # Two headers are an attempt to have two readers see different ones.
            caller = self._keys.caller(headers[0] if len(headers) == 1 else b"")
            if caller is None and scope["path"] not in OPEN_PATHS:
                refusal = _refusal(given=bool(headers))
                self._refused(refusal)
                await refusal.response()(scope, receive, send)
                return
            scope.setdefault("state", {})["caller"] = caller or ANYBODY
        await self._app(scope, receive, send)


def caller_of(request: Request) -> Caller:
    """Return who sent a request."""
    caller: Caller = request.state.caller
    return caller


def _refusal(*, given: bool) -> ApiError:
    return ApiError(
        ErrorCode.INVALID_API_KEY,
        "this API key is not known here"
        if given
        else "an API key is needed: send it in the header Authorization: Bearer KEY",
        headers={"WWW-Authenticate": "Bearer"},
    )
