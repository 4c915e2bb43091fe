"""What one front end measures of its requests: counted along with each, read at ``/metrics``."""

import time
from dataclasses import dataclass
from typing import Self

from prometheus_client import CollectorRegistry

from cluster.monitoring import definitions
from cluster.openai.errors import ApiError
from worker.wire.engine_pb2 import PromptInfo


@dataclass(frozen=True, slots=True)
class RequestPhases:
    """How long a prompt spent where, in seconds; without a prefill replica not in its queue and not on the way."""

    queue: float
    prefill: float
    prefill_queue: float | None
    transfer: float | None

    @classmethod
    def of(cls, info: PromptInfo) -> Self:
        """Return what a replica says of one prompt."""
        phases, moved = info.phases, info.phases.transfer_ms > 0.0
        return cls(
            queue=phases.queue_ms / 1e3,
            prefill=phases.prefill_ms / 1e3,
            prefill_queue=phases.prefill_queue_ms / 1e3 if moved else None,
            transfer=phases.transfer_ms / 1e3 if moved else None,
        )


class FrontEndMetrics:
    """This front end's own numbers; made once, in the registry that ``/metrics`` shows."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.time_to_first_token = definitions.TIME_TO_FIRST_TOKEN.histogram(registry)
        self.inter_token_latency = definitions.INTER_TOKEN_LATENCY.histogram(registry)
        self.duration = definitions.REQUEST_LATENCY.histogram(registry)
        self.decode = definitions.DECODE_TIME.histogram(registry)
        self.queue = definitions.QUEUE_TIME.histogram(registry)
        self.prefill_queue = definitions.PREFILL_QUEUE_TIME.histogram(registry)
        self.prefill = definitions.PREFILL_TIME.histogram(registry)
        self.transfer = definitions.TRANSFER_TIME.histogram(registry)
        self.requests = definitions.REQUESTS.counter(registry)
        self.failures = definitions.FAILURES.counter(registry)
        self.resumptions = definitions.RESUMPTIONS.counter(registry)
        self.running = definitions.IN_FLIGHT.gauge(registry)
        self.ready = definitions.READY.gauge(registry)
        self.prompt_tokens = definitions.PROMPT_TOKENS.counter(registry)
        self.generation_tokens = definitions.GENERATION_TOKENS.counter(registry)

    def observe(self, phases: RequestPhases) -> None:
        """Note how long a prompt spent where."""
        self.queue.observe(phases.queue)
        self.prefill.observe(phases.prefill)
        if phases.prefill_queue is not None:
            self.prefill_queue.observe(phases.prefill_queue)
        if phases.transfer is not None:
            self.transfer.observe(phases.transfer)

    def failed(self, error: ApiError) -> None:
        """Note what a client is told."""
        self.failures.labels(error.code.text).inc()


class TokenClock:
    """Times one request's tokens. The request arrived when ``time.monotonic`` was ``began``."""

    def __init__(self, metrics: FrontEndMetrics, choices: int, began: float) -> None:
        self._metrics = metrics
        self._began = began
        self._first: float | None = None
        self._last: list[float] = [0.0] * choices

    def tick(self, choice: int, tokens: int) -> None:
        """Note that ``tokens`` tokens of a choice have arrived together."""
        now = time.monotonic()
        if self._first is None:
            self._first = now
            self._metrics.time_to_first_token.observe(now - self._began)
        last, self._last[choice] = self._last[choice], now
        if last:
            interval = (now - last) / tokens
            for _ in range(tokens):
                self._metrics.inter_token_latency.observe(interval)
        self._metrics.generation_tokens.inc(tokens)

    def finish(self) -> None:
        """Note that the last token has arrived."""
        self._metrics.duration.observe(time.monotonic() - self._began)
        if self._first is not None:
            self._metrics.decode.observe(max(self._last) - self._first)
