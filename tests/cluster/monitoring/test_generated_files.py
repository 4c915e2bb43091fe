"""What lies in k8s/components/monitoring follows from the definitions, and Prometheus takes it."""

import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from cluster.monitoring.__main__ import DIRECTORY, files
from cluster.monitoring.alerts import ALERTS
from cluster.monitoring.definitions import FRONT_END_METRICS, REPLICA_METRICS, REPLICAS
from cluster.monitoring.metric import Kind
from tests.prometheus import binary

ENDS = ("_bucket", "_sum", "_count")
METRICS = (*FRONT_END_METRICS, *REPLICA_METRICS, REPLICAS)


def names_in(expression: str) -> set[str]:
    """Metrics that an expression asks for; a histogram's by its own name."""
    found = set(re.findall(r"crosskv_\w+", expression))
    histograms = {f"{m.name}{end}": m.name for m in METRICS if m.kind is Kind.HISTOGRAM for end in ENDS}
    return {histograms.get(name, name) for name in found}


@pytest.mark.parametrize("path", files(), ids=lambda path: path.name)
def test_files_are_what_the_definitions_say(path: Path) -> None:
    assert path.read_text() == files()[path], "run make monitoring"


def test_every_metric_is_on_the_dashboard_and_nothing_else() -> None:
    panels = json.loads((DIRECTORY / "dashboard.json").read_text())["panels"]
    asked = {name for panel in panels for target in panel.get("targets", ()) for name in names_in(target["expr"])}
    assert asked == {metric.series for metric in METRICS}
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (panel["gridPos"]["x"] + x, panel["gridPos"]["y"] + y)
        for panel in panels
        for x in range(panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells)), "panels lie on each other"


def test_alerts_ask_for_metrics_that_exist() -> None:
    for alert in ALERTS:
        assert names_in(alert.expression) <= {metric.series for metric in METRICS}, alert.name
        assert names_in(alert.expression), alert.name


def test_names_are_unique() -> None:
    assert len({metric.name for metric in METRICS}) == len(METRICS)


def test_promtool_takes_the_rules() -> None:
    finished = subprocess.run(
        [binary("promtool"), "check", "rules", DIRECTORY / "alerts.yaml"], capture_output=True, text=True, check=False
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert f"{len(ALERTS)} rules found" in finished.stdout


# What an operator would see, and the alerts that must and must not fire ten minutes into it.
SITUATIONS = {
    "healthy": (
        {
            "crosskv_ready": "1x20",
            'crosskv_requests_total{status="200"}': "0+60x20",
            'crosskv_requests_total{status="500"}': "0x20",
            'crosskv_requests_total{status="429"}': "0x20",
            'crosskv_replicas_lost_total{role="decode",front_end="a"}': "1x20",
            'crosskv_kv_transfer_payload_bytes_total{role="decode",replica="d"}': "0+1000x20",
            'crosskv_kv_transfer_lower_bound_bytes_total{role="decode",replica="d"}': "0+1000x20",
            'crosskv_kv_transfers_total{role="decode",replica="d"}': "0+60x20",
            'crosskv_kv_transfers_failed_total{role="decode",replica="d",reason="broken"}': "0x20",
            'crosskv_kv_transfers_failed_total{role="decode",replica="d",reason="busy"}': "0+60x20",
            'crosskv_kv_cache_usage_ratio{role="decode",replica="d"}': "0.9x20",
            'crosskv_prefill_peer_unusable{role="decode",replica="d"}': "0x20",
        },
        set(),
    ),
    "no pair": ({"crosskv_ready": "0x20"}, {"CrosskvCannotAnswer"}),
    "nobody scraped": ({"other": "0x20"}, {"CrosskvCannotAnswer"}),
    "one of two front ends is ready": (
        {'crosskv_ready{front_end="a"}': "0x20", 'crosskv_ready{front_end="b"}': "1x20"},
        set(),
    ),
    "lost": (
        {"crosskv_ready": "1x20", 'crosskv_replicas_lost_total{role="decode",front_end="a"}': "0x8 1x12"},
        {"CrosskvReplicaLost"},
    ),
    "poison": (
        {"crosskv_ready": "1x20", 'crosskv_request_failures_total{code="poison_request"}': "0x8 1x12"},
        {"CrosskvPoisonRequest"},
    ),
    "errors": (
        {
            "crosskv_ready": "1x20",
            'crosskv_requests_total{status="200"}': "0+60x20",
            'crosskv_requests_total{status="504"}': "0+2x20",
        },
        {"CrosskvServerErrors"},
    ),
    "refusing": (
        {
            "crosskv_ready": "1x20",
            'crosskv_requests_total{status="200"}': "0+60x20",
            'crosskv_requests_total{status="429"}': "0+6x20",
        },
        {"CrosskvRefusing"},
    ),
    "transfers fail": (
        {
            "crosskv_ready": "1x20",
            'crosskv_kv_transfers_total{replica="d"}': "0+60x20",
            'crosskv_kv_transfers_failed_total{replica="d",reason="broken"}': "0+6x20",
        },
        {"CrosskvTransfersFail"},
    ),
    "one byte too much": (
        {
            "crosskv_ready": "1x20",
            'crosskv_kv_transfer_payload_bytes_total{role="decode",replica="d"}': "1001+1000x20",
            'crosskv_kv_transfer_lower_bound_bytes_total{role="decode",replica="d"}': "1000+1000x20",
        },
        {"CrosskvPayloadAboveLowerBound"},
    ),
    "unusable": (
        {"crosskv_ready": "1x20", 'crosskv_prefill_peer_unusable{replica="d"}': "1x20"},
        {"CrosskvPrefillReplicaUnusable"},
    ),
    "full": (
        {"crosskv_ready": "1x20", 'crosskv_kv_cache_usage_ratio{role="decode",replica="d"}': "0.99x20"},
        {"CrosskvKvCacheFull"},
    ),
    "slow": (
        {
            "crosskv_ready": "1x20",
            'crosskv_inter_token_latency_seconds_bucket{le="0.5"}': "0x20",
            'crosskv_inter_token_latency_seconds_bucket{le="1.0"}': "0+60x20",
            'crosskv_inter_token_latency_seconds_bucket{le="+Inf"}': "0+60x20",
            'crosskv_time_to_first_token_seconds_bucket{le="10.0"}': "0x20",
            'crosskv_time_to_first_token_seconds_bucket{le="20.0"}': "0+60x20",
            'crosskv_time_to_first_token_seconds_bucket{le="+Inf"}': "0+60x20",
        },
        {"CrosskvSlowTokens", "CrosskvSlowFirstToken"},
    ),
    "silent": (
        {"crosskv_ready": "1x20", "crosskv_replica_reports_missing_total": "0+1x20"},
        {"CrosskvReportsMissing"},
    ),
}


def test_alerts_fire_when_they_should(tmp_path: Path) -> None:
    """promtool counts minutes; no time passes."""
    assert {name for _, names in SITUATIONS.values() for name in names} == {alert.name for alert in ALERTS}
    paths = []
    for number, (series, firing) in enumerate(SITUATIONS.values()):
        expected = [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in sorted(firing)]
        content = {
            "rule_files": [str(DIRECTORY / "alerts.yaml")],
            "evaluation_interval": "1m",
            "tests": [
                {
                    "interval": "1m",
                    "input_series": [{"series": name, "values": values} for name, values in series.items()],
                    "promql_expr_test": [
                        {
                            "expr": 'count by (alertname) (ALERTS{alertstate="firing"})',
                            "eval_time": "16m",
                            "exp_samples": expected,
                        }
                    ],
                }
            ],
        }
        paths.append(tmp_path / f"{number}.yaml")
        paths[-1].write_text(yaml.safe_dump(content))
    command = [binary("promtool"), "test", "rules", *paths]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stdout + finished.stderr
