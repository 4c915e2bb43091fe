"""A collector: takes OTLP over HTTP on a real socket, and keeps every span with its resource."""

import gzip
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status


@dataclass(frozen=True)
class Received:
    """One span. ``service`` and ``instance`` are its resource's."""

    span: Span
    service: str
    instance: str

    @property
    def name(self) -> str:
        return self.span.name

    @property
    def attributes(self) -> dict[str, Any]:
        return _values(self.span.attributes)

    @property
    def failed(self) -> bool:
        return self.span.status.code == Status.STATUS_CODE_ERROR

    def lies_in(self, other: "Received") -> bool:
        inside = other.span.start_time_unix_nano <= self.span.start_time_unix_nano <= self.span.end_time_unix_nano
        return inside and self.span.end_time_unix_nano <= other.span.end_time_unix_nano


@dataclass
class Collector:
    """``answer`` is the status of its answers; while ``hold`` is set there are none."""

    url: str
    answer: int = 200
    hold: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)
    spans: list[Received] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)

    def trace(self, trace_id: str) -> list[Received]:
        return [one for one in list(self.spans) if one.span.trace_id.hex() == trace_id]

    def wait_for(self, trace_id: str, names: set[str], seconds: float = 20.0) -> list[Received]:
        """The spans of a trace once all of these are there."""
        deadline = time.monotonic() + seconds
        while missing := names - {one.name for one in self.trace(trace_id)}:
            assert time.monotonic() < deadline, f"after {seconds} s there is no {missing}"
            time.sleep(0.02)
        return self.trace(trace_id)

    def take(self, body: bytes) -> None:
        request = ExportTraceServiceRequest.FromString(body)
        self.bodies.append(body)
        for of_resource in request.resource_spans:
            resource = _values(of_resource.resource.attributes)
            self.spans += [
                Received(span, resource["service.name"], resource["service.instance.id"])
                for scope in of_resource.scope_spans
                for span in scope.spans
            ]


@contextmanager
def collecting() -> Iterator[Collector]:
    collector = Collector("")

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            if collector.hold.is_set():
                collector.released.wait(60)
            if collector.answer == 200:
                assert self.path == "/v1/traces"
                assert self.headers["Content-Type"] == "application/x-protobuf"
                collector.take(body)
            self.send_response(collector.answer)
            self.end_headers()
            self.wfile.write(ExportTraceServiceResponse().SerializeToString())

        def log_message(self, *_: object) -> None:
            """Tests show nothing of it."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    collector.url = f"http://127.0.0.1:{server.server_port}/v1/traces"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield collector
    finally:
        collector.released.set()
        server.shutdown()
        server.server_close()
        thread.join()


def _values(attributes: "Iterator[KeyValue] | Any") -> dict[str, Any]:
    read: dict[str, Callable[[Any], Any]] = {"string_value": str, "int_value": int, "double_value": float}
    return {
        one.key: read[kind](getattr(one.value, kind))
        for one in attributes
        if (kind := one.value.WhichOneof("value")) in read
    }
