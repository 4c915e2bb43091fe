"""What the two transports have in common on the prefill side, and the one that needs nothing but the stream.

A sender is made with its server and lives as long. It is called on the threads of calls.
"""

from collections.abc import Iterator, Mapping
from typing import Protocol

import grpc

from kv_transfer.outgoing_stream import OutgoingStream
from kv_transfer.socket_bytes import SocketBytes
from kv_transfer.wire import kv_transfer_pb2 as wire


class PieceSender(Protocol):
    """Turns a stream's frames into the messages of its call."""

    name: str
    """What the handshake compares."""

    threads: int
    """How many of the server's threads its own methods may hold."""

    def handlers(self, socket_bytes: SocketBytes) -> "Mapping[str, grpc.RpcMethodHandler[bytes, bytes]]":
        """Its own methods, by full name. ``socket_bytes`` counts what crosses sockets that it opens."""
        ...

    def messages(
        self, request: wire.PrefillRequest, stream: OutgoingStream, context: grpc.ServicerContext
    ) -> Iterator[bytes]:
        """Everything that a Prefill call sends. Raises ``StreamFailure``."""
        ...


class StreamSender:
    """Payloads go into the frames themselves. A ``PieceSender``."""

    name = "grpc"
    threads = 0

    def handlers(self, socket_bytes: SocketBytes) -> "Mapping[str, grpc.RpcMethodHandler[bytes, bytes]]":
        """None: the stream is the connection."""
        del socket_bytes
        return {}

    def messages(
        self, request: wire.PrefillRequest, stream: OutgoingStream, context: grpc.ServicerContext
    ) -> Iterator[bytes]:
        """The stream's frames."""
        del request, context
        return stream.messages()
