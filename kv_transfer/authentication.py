"""gRPC with the cluster token: channels that send it with each call, servers that look for it before anything else."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import grpc

from kv_transfer.channel_options import client_options
from kv_transfer.cluster_token import ClusterToken
from kv_transfer.strangers import Strangers


def open_channel(address: str, token: ClusterToken | None, max_receive: int) -> grpc.Channel:
    """Return a channel for KV or commands: calls carry the token, what comes back has up to ``max_receive`` bytes."""
    channel = grpc.insecure_channel(address, options=client_options(max_receive))
    return channel if token is None else grpc.intercept_channel(channel, _AddToken(token))


def token_checks(token: ClusterToken | None, strangers: Strangers) -> list[grpc.ServerInterceptor]:
    """Return a server's interceptors: with a token, nothing else of a call is looked at unless it fits."""
    return [] if token is None else [_CheckToken(token, strangers)]


def aio_token_checks(token: ClusterToken | None, strangers: Strangers) -> list[grpc.aio.ServerInterceptor]:
    """The same for a server on an event loop."""
    return [] if token is None else [_AioCheckToken(token, strangers)]


@dataclass(frozen=True, slots=True)
class _CallDetails(grpc.ClientCallDetails):
    method: str
    timeout: float | None
    metadata: tuple[tuple[str, str | bytes], ...] | None
    credentials: grpc.CallCredentials | None
    wait_for_ready: bool | None
    compression: grpc.Compression | None


class _AddToken(
    grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor, grpc.StreamStreamClientInterceptor
):
    """gRPC calls it once a call, not once a message."""

    def __init__(self, token: ClusterToken) -> None:
        self._token = token

    def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return continuation(self._with_token(client_call_details), request)

    def intercept_unary_stream(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return continuation(self._with_token(client_call_details), request)

    def intercept_stream_stream(self, continuation: Any, client_call_details: Any, request_iterator: Any) -> Any:
        return continuation(self._with_token(client_call_details), request_iterator)

    def _with_token(self, details: Any) -> _CallDetails:
        return _CallDetails(
            details.method,
            details.timeout,
            (*(details.metadata or ()), *self._token.metadata),
            details.credentials,
            details.wait_for_ready,
            details.compression,
        )


class _CheckToken(grpc.ServerInterceptor):
    def __init__(self, token: ClusterToken, strangers: Strangers) -> None:
        self._token = token
        self._strangers = strangers

    def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        problem = self._token.problem(handler_call_details.invocation_metadata)
        return continuation(handler_call_details) if problem is None else _refusing(problem, self._strangers)


class _AioCheckToken(grpc.aio.ServerInterceptor):
    def __init__(self, token: ClusterToken, strangers: Strangers) -> None:
        self._token = token
        self._strangers = strangers

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], handler_call_details: Any
    ) -> Any:
        problem = self._token.problem(handler_call_details.invocation_metadata)
        if problem is None:
            return await continuation(handler_call_details)
        return _refusing_on_loop(problem, self._strangers)


def _refusing(problem: str, strangers: Strangers) -> Any:
    """A handler that takes no message: of a stranger's call nothing is read."""

    def refuse(_: Any, context: grpc.ServicerContext) -> NoReturn:
        strangers.refused(context.peer(), problem)
        context.abort(grpc.StatusCode.UNAUTHENTICATED, problem)

    return grpc.stream_stream_rpc_method_handler(refuse)


def _refusing_on_loop(problem: str, strangers: Strangers) -> Any:
    async def refuse(_: Any, context: Any) -> None:
        strangers.refused(context.peer(), problem)
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, problem)

    return grpc.stream_stream_rpc_method_handler(refuse)
