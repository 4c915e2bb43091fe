"""The HTTP server of one front end: uvicorn around an application, as crosskv runs it."""

import functools
import math
import resource
import ssl
from collections.abc import Callable
from dataclasses import replace

import uvicorn
from starlette.types import ASGIApp

from cluster.http_connection import BoundedConnection, ConnectionLimits
from cluster.openai.errors import ApiError

_OTHER_DESCRIPTORS = 256
"""What a front end opens besides: sessions, Ray, files."""


def http_server(
    app: ASGIApp,
    tls: ssl.SSLContext | None,
    stop_seconds: float,
    limits: ConnectionLimits | None = None,
    refused: Callable[[ApiError], None] = lambda _: None,
) -> uvicorn.Server:
    """Return a server that answers over TLS if ``tls`` says how, and in the clear if not. It is not started yet.

    ``refused`` is told what clients were told before the application knew of them.
    """
    limits = _within_descriptors(limits or ConnectionLimits())
    return uvicorn.Server(
        uvicorn.Config(
            app,
            http=functools.partial(BoundedConnection, limits=limits, refused=refused),  # type: ignore[arg-type] # it is only called
            ws="none",
            ssl_context_factory=None if tls is None else lambda *_: tls,
            # Its default would take the log handlers of everything else in this process down, Serve's included.
            log_config=None,
            access_log=False,
            server_header=False,
            lifespan="on",
            timeout_graceful_shutdown=max(1, math.ceil(stop_seconds)),
        )
    )


def _within_descriptors(limits: ConnectionLimits) -> ConnectionLimits:
    """No more connections than this process may open: accepting one too many would fail for everybody."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return limits
    return replace(limits, connections=min(limits.connections, max(1, soft - _OTHER_DESCRIPTORS)))
