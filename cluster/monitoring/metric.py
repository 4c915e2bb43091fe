"""One metric as it is defined, once: what is shown at ``/metrics``, drawn on the dashboard and asked by alerts is made
of it.
"""

from dataclasses import dataclass
from enum import Enum

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram


class Kind(Enum):
    """Prometheus' own types."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Unit(Enum):
    """What values are, as a name's end says it. ``COUNT`` is of things that the name itself names."""

    SECONDS = "seconds"
    BYTES = "bytes"
    RATIO = "ratio"
    COUNT = ""


@dataclass(frozen=True, slots=True)
class Label:
    """A label, and all of its ``values`` if they are known: then each is shown from the start, as 0."""

    name: str
    values: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Metric:
    """See the module. ``name`` lacks a counter's ``_total``; ``buckets`` are a histogram's upper bounds."""

    name: str
    kind: Kind
    help: str
    unit: Unit = Unit.COUNT
    labels: tuple[Label, ...] = ()
    buckets: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        assert self.name.startswith("crosskv_"), self.name
        assert self.name.endswith(self.unit.value), f"{self.name} does not end with its unit, {self.unit.value}"
        assert bool(self.buckets) == (self.kind is Kind.HISTOGRAM), self.name

    @property
    def series(self) -> str:
        """The name of its samples. Those of a histogram have ``_bucket``, ``_sum`` or ``_count`` behind it."""
        return f"{self.name}_total" if self.kind is Kind.COUNTER else self.name

    @property
    def label_names(self) -> tuple[str, ...]:
        """Its labels, without those that say whose it is."""
        return tuple(label.name for label in self.labels)

    def counter(self, registry: CollectorRegistry) -> Counter:
        """Make it something to count with."""
        assert self.kind is Kind.COUNTER, self.name
        made = Counter(self.name, self.help, self.label_names, registry=registry)
        if len(self.labels) == 1:
            for value in self.labels[0].values:
                made.labels(value)
        return made

    def gauge(self, registry: CollectorRegistry) -> Gauge:
        """Make it something to set."""
        assert self.kind is Kind.GAUGE, self.name
        return Gauge(self.name, self.help, self.label_names, registry=registry)

    def histogram(self, registry: CollectorRegistry) -> Histogram:
        """Make it something to observe with."""
        assert self.kind is Kind.HISTOGRAM, self.name
        return Histogram(self.name, self.help, self.label_names, buckets=self.buckets, registry=registry)
