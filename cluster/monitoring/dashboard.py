"""A Grafana dashboard over defined metrics: rows of panels, each of which asks what definitions name."""

from dataclasses import dataclass
from typing import Any

from cluster.monitoring import definitions as d
from cluster.monitoring.metric import Metric
from cluster.monitoring.promql import current, highest, mean, quantile, rate

WINDOW = "$__rate_interval"
"""Grafana's: at least four scrapes."""
_BYTES_PER_SECOND = "Bps"
_PER_SECOND = "short"
_WIDTH, _HEIGHT, _COLUMNS = 8, 8, 24


@dataclass(frozen=True, slots=True)
class Line:
    """One query and what its lines are called."""

    expression: str
    legend: str


@dataclass(frozen=True, slots=True)
class Panel:
    """A chart. ``unit`` is Grafana's name of one."""

    title: str
    unit: str
    lines: tuple[Line, ...]
    stacked: bool = False


def _latency(title: str, metric: Metric) -> Panel:
    shares = (0.5, 0.95, 0.99)
    return Panel(title, "s", tuple(Line(quantile(metric, share, WINDOW), f"p{share * 100:g}") for share in shares))


_PHASES = (
    (d.QUEUE_TIME, "queue"),
    (d.PREFILL_QUEUE_TIME, "prefill queue"),
    (d.PREFILL_TIME, "prefill"),
    (d.TRANSFER_TIME, "transfer"),
    (d.DECODE_TIME, "decode"),
)

ROWS: tuple[tuple[str, tuple[Panel, ...]], ...] = (
    (
        "Requests",
        (
            Panel("Requests per second", _PER_SECOND, (Line(rate(d.REQUESTS, WINDOW, "status"), "{{status}}"),), True),
            Panel(
                "In flight",
                "short",
                (Line(current(d.IN_FLIGHT), "requests"), Line(highest(d.READY), "can be answered")),
            ),
            Panel("Errors per second", _PER_SECOND, (Line(rate(d.FAILURES, WINDOW, "code"), "{{code}}"),), True),
            Panel(
                "Tokens per second",
                _PER_SECOND,
                (Line(rate(d.PROMPT_TOKENS, WINDOW), "prompt"), Line(rate(d.GENERATION_TOKENS, WINDOW), "generated")),
            ),
            Panel(
                "Given to another replica, per second",
                _PER_SECOND,
                (
                    Line(rate(d.RETRIES, WINDOW, "reason"), "{{reason}}"),
                    Line(rate(d.RESUMPTIONS, WINDOW), "answers that went on"),
                ),
            ),
            Panel(
                "Ended early on replicas, per second",
                _PER_SECOND,
                (
                    Line(rate(d.REFUSED, WINDOW, "role, reason"), "{{role}} refused: {{reason}}"),
                    Line(rate(d.FAILED, WINDOW, "role, reason"), "{{role}} failed: {{reason}}"),
                    Line(rate(d.ABORTED, WINDOW, "role"), "{{role}} aborted"),
                ),
            ),
        ),
    ),
    (
        "Latency",
        (
            _latency("Time to first token", d.TIME_TO_FIRST_TOKEN),
            _latency("Time between tokens", d.INTER_TOKEN_LATENCY),
            _latency("Whole request", d.REQUEST_LATENCY),
            Panel("Where the time goes, mean", "s", tuple(Line(mean(m, WINDOW), name) for m, name in _PHASES)),
            Panel("Where the time goes, p95", "s", tuple(Line(quantile(m, 0.95, WINDOW), name) for m, name in _PHASES)),
        ),
    ),
    (
        "Replicas",
        (
            Panel(
                "Replicas",
                "short",
                (
                    Line(current(d.REPLICAS, "role"), "{{role}}"),
                    Line(f"max by (role) ({d.REPLICAS_LOST.series})", "{{role}} lost"),
                    Line(rate(d.REPORTS_MISSING, WINDOW), "missing reports per second"),
                    Line(rate(d.CALLS_REFUSED, WINDOW), "calls without the token per second"),
                ),
            ),
            Panel(
                "Requests by state",
                "short",
                (
                    Line(current(d.RUNNING, "role"), "{{role}} running"),
                    Line(current(d.WAITING, "role"), "{{role}} waiting"),
                    Line(current(d.RECEIVING, "role"), "{{role}} receiving"),
                ),
            ),
            Panel(
                "Prompt tokens to compute", "short", (Line(current(d.OUTSTANDING_PROMPT_TOKENS, "role"), "{{role}}"),)
            ),
            Panel("Busy", "percentunit", (Line(rate(d.BUSY, WINDOW, "role, replica"), "{{replica}}"),)),
            Panel(
                "Steps and requests per second",
                _PER_SECOND,
                (
                    Line(rate(d.STEPS, WINDOW, "role"), "{{role}} steps"),
                    Line(rate(d.FINISHED, WINDOW, "role"), "{{role}} finished"),
                ),
            ),
            Panel(
                "Tokens per second, by role",
                _PER_SECOND,
                (
                    Line(rate(d.REPLICA_PROMPT_TOKENS, WINDOW, "role"), "{{role}} prompt"),
                    Line(rate(d.REPLICA_GENERATION_TOKENS, WINDOW, "role"), "{{role}} generated"),
                ),
            ),
            Panel(
                "Prefill replicas that decode replicas see",
                "short",
                (
                    Line(current(d.PREFILL_PEERS, "replica"), "{{replica}}"),
                    Line(current(d.PREFILL_REFUSED, "replica"), "{{replica}} cannot use one"),
                ),
            ),
        ),
    ),
    (
        "KV cache",
        (
            Panel("Blocks", "short", (Line(current(d.BLOCKS, "role, state"), "{{role}} {{state}}"),), True),
            Panel("Held by requests", "percentunit", (Line(highest(d.CACHE_USAGE, "role, replica"), "{{replica}}"),)),
            Panel(
                "Prompt tokens found in the prefix cache",
                "percentunit",
                (
                    Line(
                        f"{rate(d.PREFIX_HITS, WINDOW, 'role')} / {rate(d.PREFIX_QUERIES, WINDOW, 'role')}", "{{role}}"
                    ),
                ),
            ),
            Panel("Preemptions per second", _PER_SECOND, (Line(rate(d.PREEMPTIONS, WINDOW, "role"), "{{role}}"),)),
            Panel(
                "Layers",
                "short",
                (Line(highest(d.OWNER_LAYERS), "own KV"), Line(highest(d.TOTAL_LAYERS), "attend")),
            ),
        ),
    ),
    (
        "KV transfer",
        (
            Panel(
                "KV per second",
                _BYTES_PER_SECOND,
                (
                    Line(rate(d.PAYLOAD, WINDOW), "payload"),
                    Line(rate(d.LOWER_BOUND, WINDOW), "lower bound"),
                    Line(rate(d.SAVED, WINDOW), "saved by sharing"),
                ),
            ),
            Panel(
                "Bytes per second",
                _BYTES_PER_SECOND,
                (
                    Line(rate(d.SENT, WINDOW), "sent"),
                    Line(rate(d.WIRE, WINDOW), "on the wire"),
                    Line(rate(d.RECEIVED, WINDOW), "received"),
                    Line(rate(d.RETRANSMITTED, WINDOW), "sent again"),
                ),
            ),
            Panel(
                "Speed of one transfer",
                _BYTES_PER_SECOND,
                (Line(f"{rate(d.PAYLOAD, WINDOW)} / {rate(d.TRANSFER_SECONDS, WINDOW)}", "payload"),),
            ),
            Panel(
                "Transfers per second",
                _PER_SECOND,
                (
                    Line(rate(d.TRANSFERS, WINDOW), "complete"),
                    Line(rate(d.TRANSFERS_FAILED, WINDOW, "reason"), "{{reason}}"),
                    Line(rate(d.LOCAL_PREFILLS, WINDOW), "computed by decode replicas"),
                    Line(rate(d.STALE_PIECES, WINDOW), "stale pieces"),
                ),
            ),
        ),
    ),
)


def dashboard() -> dict[str, Any]:
    """Return the dashboard as Grafana imports it."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS:
        place = {"h": 1, "w": _COLUMNS, "x": 0, "y": y}
        panels.append({"type": "row", "title": title, "collapsed": False, "gridPos": place, "panels": []})
        y += 1
        for number, panel in enumerate(row):
            line, column = divmod(number, _COLUMNS // _WIDTH)
            place = {"h": _HEIGHT, "w": _WIDTH, "x": column * _WIDTH, "y": y + line * _HEIGHT}
            panels.append(_chart(panel, place))
        y += -(-len(row) * _WIDTH // _COLUMNS) * _HEIGHT
    return {
        "title": "crosskv",
        "uid": "crosskv",
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": [{"name": "datasource", "type": "datasource", "query": "prometheus"}]},
        "panels": [panel | {"id": number} for number, panel in enumerate(panels, start=1)],
    }


def _chart(panel: Panel, place: dict[str, int]) -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "${datasource}"}
    custom = {"stacking": {"mode": "normal"}, "fillOpacity": 30} if panel.stacked else {"fillOpacity": 0}
    return {
        "type": "timeseries",
        "title": panel.title,
        "gridPos": place,
        "datasource": source,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0, "custom": custom}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {
                "refId": chr(ord("A") + number),
                "expr": line.expression,
                "legendFormat": line.legend,
                "datasource": source,
            }
            for number, line in enumerate(panel.lines)
        ],
    }
