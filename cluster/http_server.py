"""The HTTP server of one front end: uvicorn around an application, as crosskv runs it."""

import ssl

import uvicorn
from fastapi import FastAPI


def http_server(app: FastAPI, tls: ssl.SSLContext | None, stop_seconds: float) -> uvicorn.Server:
    """Return a server that answers over TLS if ``tls`` says how, and in the clear if not. It is not started yet."""
    return uvicorn.Server(
        uvicorn.Config(
            app,
            ssl_context_factory=None if tls is None else lambda *_: tls,
            # Its default would take the log handlers of everything else in this process down, Serve's included.
            log_config=None,
            access_log=False,
            lifespan="on",
            timeout_graceful_shutdown=int(stop_seconds),
        )
    )
