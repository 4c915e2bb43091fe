"""What the status page is made of, and that a stranger gets no figures with it."""

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram

from cluster.openai.api_keys import ApiKey, ApiKeys
from cluster.openai.metrics import FrontEndMetrics
from cluster.openai.recent_latency import SAMPLE_SECONDS, WINDOW_SECONDS, Buckets, RecentLatency
from cluster.openai.status_page import DIRECTORY, PAGE
from tests.cluster.scripted_engine import ScriptedEngine, always
from worker.wire.engine_pb2 import PrefillTransfers, StatusReply

BOUNDS = (0.01, 0.02, 0.05, 0.1, 0.5, 1.0)


@pytest.mark.anyio
async def test_its_files_need_no_key_and_its_figures_do(client) -> None:
    async with client(ScriptedEngine(always([5])), api_keys=ApiKeys([ApiKey.of("secret")])) as http:
        for path in PAGE:
            answer = await http.get(path)
            assert answer.status_code == 200
            policy = answer.headers["content-security-policy"]
            assert policy.startswith("default-src 'none'; script-src 'self'; ")
            assert "unsafe" not in policy
            assert answer.headers["x-content-type-options"] == "nosniff"
            again = await http.get(path, headers={"If-None-Match": answer.headers["etag"]})
            assert (again.status_code, again.content) == (304, b"")
        for path in ("/cluster", "/latency", "/page/", "/page/../cluster", "/page/secret.js"):
            assert (await http.get(path)).status_code == 401


def test_its_files_name_no_other_server_and_each_other() -> None:
    texts = {path.name: path.read_text() for path in DIRECTORY.iterdir()}
    for name, text in texts.items():
        addresses = re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\s\"')]*", text)
        assert set(addresses) <= {"http://www.w3.org/2000/svg"}, name
        # Policy forbids it; here it is found without a browser.
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\bon\w+=|style=\"", text), name
    named = set(re.findall(r"page/([\w.]+)\"", texts["index.html"]))
    for name in [name for name in texts if name.endswith(".js")]:
        named |= set(re.findall(r"from \"\./([\w.]+)\"", texts[name]))
    assert named | {"index.html"} == texts.keys()
    assert {path.removeprefix("/page/") for path in PAGE} == {"/", *named}


@pytest.mark.anyio
async def test_cluster_has_what_came_from_each_prefill_replica(client) -> None:
    flow = PrefillTransfers(prefill_replica="p0", transfers=2, payload_bytes=1 << 60, unshared_bytes=3)
    statuses = [StatusReply(role="decode", prefill_transfers=[flow]), StatusReply(role="prefill")]
    async with client(ScriptedEngine(always([5]), statuses=statuses)) as http:
        decode, prefill = (await http.get("/cluster")).json()
    assert prefill["prefill_transfers"] == []
    assert decode["prefill_transfers"] == [
        {"prefill_replica": "p0", "transfers": 2, "payload_bytes": 1 << 60, "unshared_bytes": 3}
    ]


@given(st.lists(st.floats(0, 0.99), min_size=1, max_size=50), st.floats(0.01, 1.0))
def test_a_quantile_lies_in_the_bucket_of_the_value_that_it_stands_for(values: list[float], part: float) -> None:
    histogram = Histogram("h", "h", buckets=BOUNDS, registry=CollectorRegistry())
    for value in values:
        histogram.observe(value)
    exact = sorted(values)[math.ceil(part * len(values) - 1e-9) - 1]
    estimate = Buckets.of(histogram).quantile(part)
    assert estimate is not None
    upper = next(bound for bound in BOUNDS if exact <= bound)
    lower = max((bound for bound in BOUNDS if bound < exact), default=0.0)
    assert lower <= estimate <= upper


def test_latency_is_of_the_last_minutes() -> None:
    now = 0.0
    metrics = FrontEndMetrics(CollectorRegistry())
    recent = RecentLatency(metrics, clock=lambda: now)
    # Neighbours among the bounds: values in between are estimated from nothing but how many there are.
    low, high = 0.25, 0.5

    def passes(seconds: float) -> None:
        nonlocal now
        for _ in range(int(seconds / SAMPLE_SECONDS)):
            now += SAMPLE_SECONDS
            recent.sample()

    def waits() -> dict[str, float | None]:
        return recent.report()["time_to_first_token"]

    assert recent.report()["seconds"] == 0.0
    assert waits() == {"count": 0, "p50": None, "p90": None, "p99": None}
    metrics.time_to_first_token.observe(0.3)
    passes(WINDOW_SECONDS)
    estimates = {f"p{part}": low + (high - low) * part / 100 for part in (50, 90, 99)}
    assert waits() == pytest.approx({"count": 1, **estimates})
    assert recent.report()["inter_token_latency"]["count"] == 0
    passes(2 * SAMPLE_SECONDS)
    assert waits()["count"] == 0
    metrics.time_to_first_token.observe(1e6)
    # Above every bound nothing but that is known.
    assert waits()["p50"] == 80.0
    passes(WINDOW_SECONDS / 2)
    assert waits()["count"] == 1
    passes(WINDOW_SECONDS)
    assert waits()["count"] == 0
    assert WINDOW_SECONDS <= recent.report()["seconds"] <= WINDOW_SECONDS + SAMPLE_SECONDS


def test_labels_are_added_up() -> None:
    histogram = Histogram("h", "h", ["of"], buckets=BOUNDS, registry=CollectorRegistry())
    assert Buckets.of(histogram).total == 0
    for label, value in (("a", 0.3), ("b", 0.015), ("b", 0.3)):
        histogram.labels(label).observe(value)
    assert Buckets.of(histogram).total == 3
    assert Buckets.of(histogram).quantile(0.5) == pytest.approx(0.1 + 0.4 / 4)
