"""When somebody must look: alert rules over defined metrics, as a Prometheus rule file has them."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from cluster.monitoring import definitions as d
from cluster.monitoring.promql import highest, increase, quantile, rate, seen_by_any
from worker.failure import TransferFailure

_WINDOW = "5m"
_BROKEN = "|".join(failure for failure in (TransferFailure.BROKEN, TransferFailure.OVERDUE))

INTER_TOKEN_SECONDS = 0.5
FIRST_TOKEN_SECONDS = 10.0
REFUSED_SHARE = 0.05
FAILED_SHARE = 0.01
FAILED_TRANSFER_SHARE = 0.05
FULL_SHARE = 0.95


class Severity(StrEnum):
    """Whether somebody is woken."""

    CRITICAL = "critical"
    WARNING = "warning"


@dataclass(frozen=True, slots=True)
class Alert:
    """``expression`` has a result while it holds; it must for ``lasting``. ``action`` is what to do."""

    name: str
    severity: Severity
    expression: str
    lasting: str
    summary: str
    action: str


ALERTS = (
    Alert(
        "CrosskvCannotAnswer",
        Severity.CRITICAL,
        f"{highest(d.READY)} == 0 or absent({d.READY.series})",
        "1m",
        "No prefill and decode replica can serve a request together, or no front end is there to say so.",
        "See crosskv status: which role is missing, and why a decode replica cannot use a prefill replica.",
    ),
    Alert(
        "CrosskvReplicaLost",
        Severity.WARNING,
        f"{seen_by_any(d.REPLICAS_LOST, '10m', 'role')} > 0",
        "0m",
        "A {{ $labels.role }} replica died or stopped answering.",
        "Serve starts another. Its log, by the name that front ends logged as gone, says what happened.",
    ),
    Alert(
        "CrosskvPoisonRequest",
        Severity.CRITICAL,
        f"{increase(d.FAILURES, '10m', code='poison_request')} > 0",
        "0m",
        "Two replicas died while they had the same request.",
        "Find the request by its id in the front end's log, and keep the replicas' logs: it is a defect.",
    ),
    Alert(
        "CrosskvServerErrors",
        Severity.CRITICAL,
        f"{rate(d.REQUESTS, _WINDOW, status='5..')} / {rate(d.REQUESTS, _WINDOW)} > {FAILED_SHARE:g}",
        "5m",
        "{{ $value | humanizePercentage }} of requests end with a server error.",
        "crosskv_request_failures_total says which errors, docs/errors.md what each of them means.",
    ),
    Alert(
        "CrosskvRefusing",
        Severity.WARNING,
        f"{rate(d.REQUESTS, _WINDOW, status='429')} / {rate(d.REQUESTS, _WINDOW)} > {REFUSED_SHARE:g}",
        "5m",
        "{{ $value | humanizePercentage }} of requests are refused with 429.",
        "Queues are full: add decode replicas if they are busy, prefill replicas if their queues are long.",
    ),
    Alert(
        "CrosskvTransfersFail",
        Severity.WARNING,
        f"{rate(d.TRANSFERS_FAILED, _WINDOW, reason=_BROKEN)}"
        f" / ({rate(d.TRANSFERS, _WINDOW)} + {rate(d.TRANSFERS_FAILED, _WINDOW, reason=_BROKEN)})"
        f" > {FAILED_TRANSFER_SHARE:g}",
        "5m",
        "{{ $value | humanizePercentage }} of KV transfers fail; prompts are computed twice.",
        "Decode replicas log each with the prefill replica's name. Look at the network between them.",
    ),
    Alert(
        "CrosskvPayloadAboveLowerBound",
        Severity.WARNING,
        f"{d.PAYLOAD.series} > {d.LOWER_BOUND.series}",
        "0m",
        "Replica {{ $labels.replica }} received more KV than its requests lacked.",
        "This never happens and is a defect; answers are right all the same. It holds until the replica ends.",
    ),
    Alert(
        "CrosskvPrefillReplicaUnusable",
        Severity.CRITICAL,
        f"{highest(d.PREFILL_REFUSED, 'replica')} > 0",
        "2m",
        "Decode replica {{ $labels.replica }} cannot use a prefill replica that exists.",
        "crosskv status --json has the reason as prefill_error: usually another model, dtype or layer map.",
    ),
    Alert(
        "CrosskvKvCacheFull",
        Severity.WARNING,
        f"{highest(d.CACHE_USAGE, 'role, replica')} > {FULL_SHARE:g}",
        "10m",
        "Requests hold {{ $value | humanizePercentage }} of the KV blocks of {{ $labels.replica }}.",
        "Requests wait for blocks, or lose theirs: raise --kv-cache-memory, or add replicas of the role.",
    ),
    Alert(
        "CrosskvSlowTokens",
        Severity.WARNING,
        f"{quantile(d.INTER_TOKEN_LATENCY, 0.99, _WINDOW)} > {INTER_TOKEN_SECONDS:g}",
        "10m",
        "Of 100 tokens the slowest comes {{ $value | humanizeDuration }} after the one before.",
        "Decode replicas have too much to do: lower --max-running-requests or add some.",
    ),
    Alert(
        "CrosskvSlowFirstToken",
        Severity.WARNING,
        f"{quantile(d.TIME_TO_FIRST_TOKEN, 0.99, _WINDOW)} > {FIRST_TOKEN_SECONDS:g}",
        "10m",
        "Of 100 requests the slowest waits {{ $value | humanizeDuration }} for its first token.",
        "The dashboard shows in which phase: a queue, the prompt's computation, or the transfer.",
    ),
    Alert(
        "CrosskvReportsMissing",
        Severity.WARNING,
        f"{increase(d.REPORTS_MISSING, '10m')} > 3",
        "0m",
        "Replicas do not report when they are asked for metrics, so that all of these figures are incomplete.",
        "A replica hangs, or a front end cannot reach it.",
    ),
)


def rule_groups() -> dict[str, Any]:
    """Return a Prometheus rule file's content."""
    return {"groups": [{"name": "crosskv", "rules": [_rule(alert) for alert in ALERTS]}]}


def _rule(alert: Alert) -> dict[str, Any]:
    return {
        "alert": alert.name,
        "expr": alert.expression,
        "for": alert.lasting,
        "labels": {"severity": alert.severity.value},
        "annotations": {"summary": alert.summary, "description": alert.action},
    }
