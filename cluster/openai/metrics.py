"""Prometheus metrics: what this front end measures, and what the replicas report when it is asked."""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from worker.wire.engine_pb2 import StatusReply

_TTFT_BUCKETS = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_ITL_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0)
_DURATION_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0)

DISCONNECTED: Final = 499
"""The status under which a request is counted whose client left before its end."""


class FrontEndMetrics:
    """This front end's own numbers; made once, with the registry that ``/metrics`` shows."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.time_to_first_token = Histogram(
            "crosskv_time_to_first_token_seconds",
            "From receiving a request to its first token.",
            buckets=_TTFT_BUCKETS,
            registry=registry,
        )
        self.inter_token_latency = Histogram(
            "crosskv_inter_token_latency_seconds",
            "Between two tokens of one choice.",
            buckets=_ITL_BUCKETS,
            registry=registry,
        )
        self.duration = Histogram(
            "crosskv_e2e_request_latency_seconds",
            "From receiving a request to its last token.",
            buckets=_DURATION_BUCKETS,
            registry=registry,
        )
        self.requests = Counter(
            "crosskv_requests",
            f"Generation requests by how they ended; {DISCONNECTED} is a client that left.",
            ["status"],
            registry=registry,
        )
        self.resumptions = Counter(
            "crosskv_resumptions",
            "Answers, of several choices each by itself, that another replica went on with.",
            registry=registry,
        )
        self.running = Gauge(
            "crosskv_front_end_requests_in_flight", "Generation requests that have no end yet.", registry=registry
        )
        self.prompt_tokens = Counter("crosskv_prompt_tokens", "Prompt tokens of served requests.", registry=registry)
        self.generation_tokens = Counter("crosskv_generation_tokens", "Tokens sent to clients.", registry=registry)

    def text(self, statuses: Sequence[StatusReply]) -> bytes:
        """Return the exposition of this front end and of the replicas' reports, in Prometheus' text format."""
        replicas = CollectorRegistry(auto_describe=False)
        replicas.register(_ReplicaCollector(statuses))
        return generate_latest(self.registry) + generate_latest(replicas)


class TokenClock:
    """Times one request's tokens; begins with the request."""

    def __init__(self, metrics: FrontEndMetrics, choices: int) -> None:
        self._metrics = metrics
        self._began = time.perf_counter()
        self._last: list[float] = [0.0] * choices
        self._first = True

    def tick(self, choice: int, tokens: int) -> None:
        """Note that ``tokens`` tokens of a choice have arrived together."""
        now = time.perf_counter()
        if self._first:
            self._first = False
            self._metrics.time_to_first_token.observe(now - self._began)
        last, self._last[choice] = self._last[choice], now
        if last:
            interval = (now - last) / tokens
            for _ in range(tokens):
                self._metrics.inter_token_latency.observe(interval)
        self._metrics.generation_tokens.inc(tokens)

    def finish(self) -> None:
        """Note that the last token has arrived."""
        self._metrics.duration.observe(time.perf_counter() - self._began)


class _ReplicaCollector(Collector):
    """Shows numbers that the replicas count themselves, so that nothing is counted twice."""

    def __init__(self, statuses: Sequence[StatusReply]) -> None:
        self._statuses = statuses

    def collect(self) -> Iterable[Metric]:
        """Yield one family per gauge and counter, with a sample per replica."""
        for name, documentation, value in _GAUGES:
            yield self._with_samples(GaugeMetricFamily(name, documentation, labels=_LABELS), value)
        for name, documentation, value in _COUNTERS:
            yield self._with_samples(CounterMetricFamily(name, documentation, labels=_LABELS), value)
        blocks = GaugeMetricFamily("crosskv_kv_cache_blocks", "KV blocks by state.", labels=(*_LABELS, "state"))
        for status in self._statuses:
            states = (("free", status.load.free_blocks), ("cached", status.load.cached_blocks))
            for state, count in (*states, ("held", status.held_blocks)):
                blocks.add_metric([status.role, status.replica_id, state], count)
        yield blocks

    def _with_samples(
        self, family: GaugeMetricFamily | CounterMetricFamily, value: Callable[[StatusReply], float]
    ) -> Metric:
        for status in self._statuses:
            family.add_metric([status.role, status.replica_id], value(status))
        return family


_LABELS = ("role", "replica")

_GAUGES: tuple[tuple[str, str, Callable[[StatusReply], float]], ...] = (
    ("crosskv_num_requests_running", "Requests that generate.", lambda s: s.load.running_requests),
    ("crosskv_num_requests_waiting", "Requests in the queue.", lambda s: s.load.waiting_requests),
    ("crosskv_num_requests_receiving", "Requests whose KV is on its way.", lambda s: s.load.receiving_requests),
    ("crosskv_outstanding_prompt_tokens", "Prompt tokens to compute.", lambda s: s.load.outstanding_prompt_tokens),
    (
        "crosskv_kv_cache_usage_perc",
        "Part of the KV blocks that requests hold, from 0 to 1.",
        lambda s: s.held_blocks / s.load.total_blocks if s.load.total_blocks else 0.0,
    ),
    ("crosskv_owner_layers", "Layers that own KV.", lambda s: s.owner_layers),
    ("crosskv_total_layers", "Layers of the model.", lambda s: s.total_layers),
)

_COUNTERS: tuple[tuple[str, str, Callable[[StatusReply], float]], ...] = (
    ("crosskv_replica_requests_finished", "Requests that ended.", lambda s: s.counters.requests_finished),
    ("crosskv_replica_requests_aborted", "Requests that were aborted.", lambda s: s.counters.requests_aborted),
    ("crosskv_replica_requests_failed", "Requests that failed.", lambda s: s.counters.requests_failed),
    (
        "crosskv_replica_requests_refused",
        "Requests that found a full queue or would have waited too long.",
        lambda s: s.counters.requests_refused,
    ),
    ("crosskv_replica_prompt_tokens", "Prompt tokens taken.", lambda s: s.counters.prompt_tokens),
    ("crosskv_replica_generation_tokens", "Tokens sampled.", lambda s: s.counters.generated_tokens),
    (
        "crosskv_prefix_cache_queries",
        "Prompt tokens looked up in the prefix cache.",
        lambda s: s.counters.prefix_queries,
    ),
    ("crosskv_prefix_cache_hits", "Prompt tokens found in the prefix cache.", lambda s: s.counters.prefix_hits),
    ("crosskv_num_preemptions", "Requests that lost their blocks.", lambda s: s.counters.preemptions),
    ("crosskv_local_prefills", "Prompts that a decode replica computed.", lambda s: s.counters.local_prefills),
    ("crosskv_engine_steps", "Forward passes.", lambda s: s.counters.steps),
    ("crosskv_engine_busy_seconds", "Time in forward passes.", lambda s: s.counters.busy_seconds),
    ("crosskv_kv_transfers", "KV transfers that completed.", lambda s: s.counters.transfers),
    ("crosskv_kv_transfers_failed", "KV transfers that failed.", lambda s: s.counters.transfers_failed),
    ("crosskv_kv_transfer_seconds", "Time of KV transfers, summed.", lambda s: s.counters.transfer_seconds),
    ("crosskv_kv_transfer_payload_bytes", "KV bytes that moved.", lambda s: s.counters.payload_bytes),
    ("crosskv_kv_transfer_lower_bound_bytes", "KV bytes that had to move.", lambda s: s.counters.lower_bound_bytes),
    (
        "crosskv_kv_transfer_unshared_bytes",
        "KV bytes that would have moved if every layer owned KV.",
        lambda s: s.counters.unshared_bytes,
    ),
    (
        "crosskv_kv_transfer_saved_bytes",
        "KV bytes that sharing saved.",
        lambda s: max(s.counters.unshared_bytes - s.counters.payload_bytes, 0),
    ),
    ("crosskv_kv_transfer_retransmitted_bytes", "KV bytes sent again.", lambda s: s.counters.retransmitted_bytes),
    ("crosskv_kv_transfer_wire_bytes", "Bytes on the KV connections.", lambda s: s.counters.wire_bytes),
    ("crosskv_kv_transfer_stale_pieces", "Pieces that no live manifest covered.", lambda s: s.counters.stale_pieces),
)
