"""OpenTelemetry: a trace of every request, made of the journal's record when the request has ended.

One per front end that is told where to send. Replicas trace nothing: what they measure comes with their tokens, and
becomes spans here, each with a resource that names its replica. So there is one exporter, and only front ends know of a
collector. No request waits for that: spans go to a bounded queue, which a thread empties and whose overflow is dropped.
"""

import os
import threading
from collections.abc import Iterator

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, SERVICE_NAME, Resource
from opentelemetry.sdk.trace import SynchronousMultiSpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from cluster.journal import TraceContext
from cluster.timeline import Phase, PhaseName, RequestRecord, RequestStatus

CLOSE_SECONDS = 2.0
"""What is queued has so long to be sent when the front end ends."""
_MAX_TRACERS = 1024
_OPERATIONS = {"/v1/chat/completions": "chat", "/v1/completions": "text_completion"}


class SpanExport:
    """See the module. ``endpoint`` is the whole URL; the SDK's own variables, such as headers, are heeded."""

    def __init__(self, endpoint: str) -> None:
        self._batches = BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint))
        self._processor = SynchronousMultiSpanProcessor()  # type: ignore[no-untyped-call]
        self._processor.add_span_processor(self._batches)
        self._service = os.environ.get("OTEL_SERVICE_NAME", "crosskv")
        self._tracers: dict[tuple[str, str], Tracer] = {}

    def export(self, record: RequestRecord, context: TraceContext) -> None:
        """Queue the spans of a request that has ended, within the client's trace if it named one."""
        tracer = self._tracer("front-end", record.front_end)
        request = tracer.start_span(
            f"{_OPERATIONS[record.route]} {record.model}",
            _parent(context),
            SpanKind.SERVER,
            _request_attributes(record),
            start_time=_unix_nanoseconds(record, 0.0),
        )
        if record.status is RequestStatus.FAILED:
            request.set_status(StatusCode.ERROR)
        if request.is_recording():
            self._add_phases(record, request)
        request.end(_unix_nanoseconds(record, record.duration_ms))

    def close(self) -> None:
        """Send what is queued, unless that takes too long."""
        closing = threading.Thread(target=self._batches.shutdown, name="spans-close", daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)

    def _add_phases(self, record: RequestRecord, request: Span) -> None:
        around: Span = request
        source = None
        for phase in record.phases:
            elsewhere = phase.replica == source and phase.name in (PhaseName.QUEUE, PhaseName.PREFILL)
            span = self._tracer_of(phase, record, elsewhere).start_span(
                phase.name,
                set_span_in_context(around if elsewhere else request),
                attributes=dict(_phase_attributes(phase)),
                start_time=_unix_nanoseconds(record, phase.begin_ms),
            )
            span.end(_unix_nanoseconds(record, phase.end_ms))
            if phase.name is PhaseName.TRANSFER:
                around, source = span, phase.source

    def _tracer_of(self, phase: Phase, record: RequestRecord, elsewhere: bool) -> Tracer:
        if not phase.replica:
            return self._tracer("front-end", record.front_end)
        return self._tracer("prefill" if elsewhere else "decode", phase.replica)

    def _tracer(self, part: str, instance: str) -> Tracer:
        """Of one process: a resource is a provider's, so each has its own."""
        tracer = self._tracers.get((part, instance))
        if tracer is None:
            if len(self._tracers) >= _MAX_TRACERS:
                self._tracers.clear()
            resource = Resource.create({SERVICE_NAME: f"{self._service}-{part}", SERVICE_INSTANCE_ID: instance})
            provider = TracerProvider(resource=resource, shutdown_on_exit=False, active_span_processor=self._processor)
            tracer = self._tracers[part, instance] = provider.get_tracer("crosskv")
        return tracer


def _parent(context: TraceContext) -> Context:
    """The client's span; a header that is none is as good as none."""
    carrier = {"traceparent": context.traceparent, "tracestate": context.tracestate}
    return TraceContextTextMapPropagator().extract(carrier, Context())


def _request_attributes(record: RequestRecord) -> dict[str, AttributeValue]:
    attributes: dict[str, AttributeValue] = {
        "http.request.method": "POST",
        "http.route": record.route,
        "http.response.status_code": record.http_status,
        "gen_ai.operation.name": _OPERATIONS[record.route],
        "gen_ai.provider.name": "crosskv",
        "gen_ai.request.model": record.model,
        "gen_ai.request.choice.count": record.choices,
        "gen_ai.response.id": record.request_id,
        "gen_ai.usage.input_tokens": record.prompt_tokens,
        "gen_ai.usage.output_tokens": record.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": record.cached_tokens,
        "crosskv.status": record.status,
        "crosskv.decode_replica": record.decode_replica,
        "crosskv.prefill_replica": record.prefill_replica,
        "crosskv.prefill_cached_tokens": record.prefill_cached_tokens,
        "crosskv.payload_bytes": record.payload_bytes,
        "crosskv.unshared_bytes": record.unshared_bytes,
        "crosskv.retransmitted_bytes": record.retransmitted_bytes,
        "crosskv.attempts": record.attempts,
        "crosskv.resumptions": record.resumptions,
    }
    if record.first_token_ms is not None:
        attributes["gen_ai.response.time_to_first_chunk"] = record.first_token_ms / 1e3
    if record.status is RequestStatus.FAILED:
        attributes["error.type"] = str(record.http_status)
    return attributes


def _phase_attributes(phase: Phase) -> Iterator[tuple[str, AttributeValue]]:
    yield "crosskv.replica", phase.replica
    yield "crosskv.prompt", phase.prompt
    if phase.name is PhaseName.TRANSFER:
        yield "crosskv.source", phase.source
        yield "crosskv.payload_bytes", phase.payload_bytes


def _unix_nanoseconds(record: RequestRecord, milliseconds: float) -> int:
    """What ``milliseconds`` after the request's arrival is in nanoseconds of Unix time."""
    return int(record.began * 1e9) + int(milliseconds * 1e6)
