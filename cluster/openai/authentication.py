"""The application's outermost layer: no request without a known API key reaches what is inside.

It looks at the header alone, before any of the body is read. What is inside finds the caller in the request's state,
with ``caller_of``.
"""

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from cluster.openai.api_keys import ANYBODY, ApiKeys, Caller
from cluster.openai.errors import ApiError

OPEN_PATHS = frozenset({"/health", "/ping", "/metrics"})
"""What probes and monitoring ask without a key. None says anything about a request's content."""


class Authentication:
    """ASGI middleware around one application."""

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run a request, as ASGI has it."""
        if scope["type"] != "lifespan":
            headers = [value for name, value in scope["headers"] if name == b"authorization"]
            # Two headers are an attempt to have two readers see different ones.
            caller = self._keys.caller(headers[0] if len(headers) == 1 else b"")
            if caller is None and scope["path"] not in OPEN_PATHS:
                await _refusal(given=bool(headers)).response()(scope, receive, send)
                return
            scope.setdefault("state", {})["caller"] = caller or ANYBODY
        await self._app(scope, receive, send)


def caller_of(request: Request) -> Caller:
    """Return who sent a request."""
    caller: Caller = request.state.caller
    return caller


def _refusal(*, given: bool) -> ApiError:
    return ApiError(
        401,
        "this API key is not known here"
        if given
        else "an API key is needed: send it in the header Authorization: Bearer KEY",
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )
