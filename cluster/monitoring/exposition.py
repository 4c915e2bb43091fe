"""What ``/metrics`` shows: families of several front ends beside each other, and what replicas report.

Every number is shown by one front end only, so that a sum over all that is scraped is right: see ``siblings``.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from cluster.monitoring.definitions import REPLICA_METRICS, REPLICAS, ReplicaMetric
from cluster.monitoring.metric import Kind
from worker.config import Role
from worker.wire.engine_pb2 import StatusReply

_OWNER = ("role", "replica")


def front_end_text(registry: CollectorRegistry, name: str | None = None) -> str:
    """Return one front end's own metrics, each with its name, if it has one, as the label ``front_end``."""
    return _text(_labelled(registry.collect(), {} if name is None else {"front_end": name}))


def exposition(front_ends: Sequence[str], statuses: Sequence[StatusReply] | None) -> bytes:
    """Return front ends' texts as one, and with it the replicas' reports if ``statuses`` are given."""
    replicas = () if statuses is None else _replica_families(statuses)
    return _text([*_joined(front_ends), *replicas]).encode()


def _labelled(families: Iterable[Metric], labels: dict[str, str]) -> Iterable[Metric]:
    for family in families:
        labelled = Metric(family.name, family.documentation, family.type)
        for sample in family.samples:
            # The client library adds when each series began, which nobody asked for.
            if not sample.name.endswith("_created"):
                labelled.samples.append(sample._replace(labels=sample.labels | labels))
        yield labelled


def _joined(texts: Sequence[str]) -> Iterable[Metric]:
    joined: dict[str, Metric] = {}
    for text in texts:
        for family in text_string_to_metric_families(text):
            joined.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            joined[family.name].samples += family.samples
    return joined.values()


def _replica_families(statuses: Sequence[StatusReply]) -> Iterable[Metric]:
    """One family per metric, with a sample per replica of a role that has it."""
    for metric in REPLICA_METRICS:
        make = CounterMetricFamily if metric.kind is Kind.COUNTER else GaugeMetricFamily
        family = make(metric.name, metric.help, labels=(*_OWNER, *metric.label_names))
        for status in statuses:
            if Role(status.role) in metric.roles:
                _add(family, metric, status)
        yield family
    replicas = GaugeMetricFamily(REPLICAS.name, REPLICAS.help, labels=REPLICAS.label_names)
    roles = Counter(status.role for status in statuses)
    for role in Role:
        replicas.add_metric([role], roles[role])
    yield replicas


def _add(family: CounterMetricFamily | GaugeMetricFamily, metric: ReplicaMetric, status: StatusReply) -> None:
    values, owner = metric.read(status), (status.role, status.replica_id)
    for label, value in values.items() if isinstance(values, Mapping) else [(None, values)]:
        family.add_metric(owner if label is None else (*owner, label), value)


class _Families(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def _text(families: Iterable[Metric]) -> str:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families(families))
    return generate_latest(registry).decode()
