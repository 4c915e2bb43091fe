"""What a front end counts of its replicas: those that it lost, and requests that it gave to another."""

from prometheus_client import CollectorRegistry

from cluster.engine_client import Retry
from cluster.monitoring import definitions
from worker.config import Role


class PlacementMetrics:
    """Made once, in the registry that ``/metrics`` shows."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._retries = definitions.RETRIES.counter(registry)
        self._lost = definitions.REPLICAS_LOST.counter(registry)
        self._missing = definitions.REPORTS_MISSING.counter(registry)

    def retried(self, reason: Retry) -> None:
        """A request is given to one more replica."""
        self._retries.labels(reason).inc()

    def lost(self, role: Role) -> None:
        """A replica is gone that had not said so before."""
        self._lost.labels(role).inc()

    def reports_missing(self, count: int) -> None:
        """So many replicas did not report when they were asked."""
        self._missing.inc(count)
