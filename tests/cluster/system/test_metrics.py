"""A real Prometheus scrapes the cluster, and what it shows is what answers said."""

import json
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from cluster.monitoring.__main__ import DIRECTORY
from cluster.monitoring.dashboard import WINDOW
from tests.cluster.system.conftest import Serving
from tests.cluster.system.test_serving import body, complete, prompts
from tests.prometheus import Prometheus, scraping
from worker.config import Role

TOKENS = 8
SHOWN = "5m"
"""Longer than the test, so that whatever happened in it is data."""


def totals(serving: Serving) -> Counter[tuple[str, ...]]:
    """Every sample's sum over replicas and front ends, by name and the other labels' values."""
    found: Counter[tuple[str, ...]] = Counter()
    text = httpx.get(f"{serving.base_url}/metrics", timeout=10).text
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            others = {name: value for name, value in sample.labels.items() if name not in ("replica", "front_end")}
            found[sample.name, *(value for _, value in sorted(others.items()))] += sample.value
    return found


def test_figures_are_those_of_the_answers(serving: Serving) -> None:
    before = totals(serving)
    asked = prompts(10, 200, seed=71)
    asked += [asked[0]] * 2  # one of two decode replicas is asked twice
    usages = [complete(serving, prompt, max_tokens=TOKENS)["usage"] for prompt in asked]
    assert httpx.post(f"{serving.base_url}/v1/completions", json=body([5], n=0)).status_code == 400
    serving.wait_until_idle()
    after = totals(serving)

    def grew(name: str, *labels: str) -> float:
        return after[name, *labels] - before[name, *labels]

    def used(field: str) -> float:
        return sum(usage["crosskv"][field] for usage in usages)

    tokens = sum(usage["prompt_tokens"] for usage in usages)
    transfers = sum(usage["crosskv"]["attempts"] > 0 for usage in usages)
    assert transfers >= 9
    assert grew("crosskv_requests_total", "200") == len(asked)
    assert grew("crosskv_requests_total", "400") == grew("crosskv_request_failures_total", "invalid_request") == 1
    assert grew("crosskv_prompt_tokens_total") == tokens
    assert grew("crosskv_replica_prompt_tokens_total", "decode") == tokens
    assert grew("crosskv_generation_tokens_total") == TOKENS * len(asked)
    assert grew("crosskv_replica_generation_tokens_total", "decode") == TOKENS * len(asked)
    assert grew("crosskv_replica_requests_finished_total", "decode") == len(asked)
    assert grew("crosskv_replica_requests_finished_total", "prefill") == transfers
    assert grew("crosskv_prefix_cache_hits_total", "prefill") == used("prefill_cached_tokens")
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    assert grew("crosskv_prefix_cache_hits_total", "decode") == cached
    assert cached + used("prefill_cached_tokens") > 0
    assert grew("crosskv_kv_transfers_total", "decode") == transfers
    payload = used("payload_bytes")
    for name in ("payload", "lower_bound", "received"):
        assert grew(f"crosskv_kv_transfer_{name}_bytes_total", "decode") == payload > 0
    assert grew("crosskv_kv_transfer_sent_bytes_total", "prefill") == payload
    assert grew("crosskv_kv_transfer_wire_bytes_total", "prefill") > payload
    assert grew("crosskv_kv_transfer_saved_bytes_total", "decode") == used("unshared_bytes") - payload
    milliseconds = used("transfer_ms")
    assert grew("crosskv_kv_transfer_seconds_total", "decode") == pytest.approx(milliseconds / 1e3)
    assert grew("crosskv_request_transfer_seconds_count") == transfers
    assert grew("crosskv_request_transfer_seconds_sum") == pytest.approx(milliseconds / 1e3)
    for name in ("time_to_first_token", "e2e_request_latency", "request_queue", "request_prefill", "request_decode"):
        assert grew(f"crosskv_{name}_seconds_count") == len(asked), name
    assert grew("crosskv_inter_token_latency_seconds_count") == (TOKENS - 1) * len(asked)
    # A first token and the time to the last are a request's time, up to what the answer's end takes.
    parts = grew("crosskv_time_to_first_token_seconds_sum") + grew("crosskv_request_decode_seconds_sum")
    assert parts <= grew("crosskv_e2e_request_latency_seconds_sum")
    assert grew("crosskv_request_decode_seconds_sum") == pytest.approx(
        grew("crosskv_inter_token_latency_seconds_sum"), rel=0.01
    )
    # Steps were computed, in a part of the time.
    for role in ("prefill", "decode"):
        assert grew("crosskv_engine_steps_total", role) > 0
        assert grew("crosskv_engine_busy_seconds_total", role) > 0
    roles = Counter(status["role"] for status in serving.statuses())
    assert {role: after["crosskv_replicas", role] for role in Role} == {role: roles[role] for role in Role}


@pytest.fixture
def prometheus(serving: Serving, tmp_path: Path) -> Iterator[Prometheus]:
    with scraping([urlsplit(serving.base_url).netloc], tmp_path, DIRECTORY / "alerts.yaml") as running:
        yield running


def test_every_panel_has_data_and_every_alert_can_be_evaluated(serving: Serving, prometheus: Prometheus) -> None:
    prometheus.wait_for("up")
    assert prometheus.wait_for("crosskv_ready") == 1
    for prompt in prompts(4, 200, seed=72):
        complete(serving, prompt, max_tokens=TOKENS)
    prometheus.wait_for(f"sum(rate(crosskv_request_transfer_seconds_count[{SHOWN}]))")
    lines = [
        (panel["title"], target["expr"].replace(WINDOW, SHOWN))
        for panel in json.loads((DIRECTORY / "dashboard.json").read_text())["panels"]
        for target in panel.get("targets", ())
    ]
    for title, expression in lines:
        values = [value for _, value in prometheus.query(expression)]
        assert any(not math.isnan(value) for value in values), (title, expression, values)
    (group,) = httpx.get(f"{prometheus.url}/api/v1/rules").json()["data"]["groups"]
    assert {(rule["name"], rule["health"]) for rule in group["rules"] if rule["health"] != "ok"} == set()
    names = httpx.get(f"{prometheus.url}/api/v1/label/__name__/values").json()["data"]
    assert not [name for name in names if name.startswith("crosskv_") and name.endswith("_created")]
