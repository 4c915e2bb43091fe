"""docs/metrics.md: what is measured, in tables that follow from the definitions."""

from collections.abc import Iterable, Sequence

from cluster.monitoring.alerts import ALERTS
from cluster.monitoring.definitions import FRONT_END_METRICS, REPLICA_METRICS, REPLICAS, ReplicaMetric
from cluster.monitoring.metric import Metric
from worker.config import Role

_TEXT = """\
# Metrics

Made by `make monitoring` from `cluster/monitoring/`; do not edit.

`GET /metrics` of a front end has everything, in Prometheus' text format and without an API key. Names say units; a
ratio is from 0 to 1. Front ends that share an address (`--front-ends` on one machine) answer for each other, and of
front ends at several addresses one alone shows the replicas' figures. So scrape every address, once, and every sum is
right:

```yaml
scrape_configs:
  - job_name: crosskv
    static_configs: [{{targets: ["127.0.0.1:8000"]}}]
```

`k8s/components/monitoring/` has a Grafana dashboard (`dashboard.json`: import it, or let the sidecar find its
ConfigMap), the alerts below as a rule file (`alerts.yaml`), and for the Prometheus operator a PrometheusRule with the
same rules and a PodMonitor.

## Front ends

Each has the label `front_end` besides, with a name that is new with every start.

{front_ends}

## Replicas

Each has the labels `role` and `replica` besides. What two roles see of one thing has a name for each of them; what both
do, such as steps, has one name, to be summed by role.

{replicas}

One of all front ends counts the replicas themselves:

{counted}

## Alerts

{alerts}
"""


def reference() -> str:
    """Return the page."""
    return _TEXT.format(
        front_ends=_table(("name", "type", "labels", "meaning"), (_row(metric) for metric in FRONT_END_METRICS)),
        replicas=_table(
            ("name", "type", "labels", "roles", "meaning"), (_replica_row(metric) for metric in REPLICA_METRICS)
        ),
        counted=_table(("name", "type", "labels", "meaning"), [_row(REPLICAS)]),
        alerts=_table(
            ("alert", "severity", "after", "what it says", "what to do"),
            ((f"`{a.name}`", a.severity, a.lasting, _plain(a.summary), a.action) for a in ALERTS),
        ),
    )


def _row(metric: Metric) -> tuple[str, ...]:
    labels = ", ".join(f"`{label}`" for label in metric.label_names)
    return f"`{metric.series}`", metric.kind.value, labels, metric.help


def _replica_row(metric: ReplicaMetric) -> tuple[str, ...]:
    *row, meaning = _row(metric)
    roles = "all" if metric.roles == frozenset(Role) else ", ".join(role for role in Role if role in metric.roles)
    return (*row, roles, meaning)


def _plain(summary: str) -> str:
    """Without Prometheus' placeholders."""
    for name in ("role", "replica"):
        summary = summary.replace(f"{{{{ $labels.{name} }}}}", f"*{name}*")
    for format in ("humanizePercentage", "humanizeDuration"):
        summary = summary.replace(f"{{{{ $value | {format} }}}}", "*so much*")
    return summary


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |".replace("|  |", "| |") for line in lines)
