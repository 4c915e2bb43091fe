"""What a whole cluster tells about one request: its usage, the journal, and the trace that a collector receives."""

import secrets
import time

import httpx
import pytest

from tests.cluster.otlp_receiver import Collector
from tests.cluster.system.test_serving import body, prompts
from tests.serving import Serving

PROMPT = prompts(1, 300, seed=77)[0] + [5] * 200


def ask(serving: Serving, trace_id: str, **more: object) -> dict:
    headers = {"traceparent": f"00-{trace_id}-00f067aa0ba902b7-01"}
    response = httpx.post(
        f"{serving.base_url}/v1/completions",
        json=body(PROMPT, cache_salt=trace_id, **more),
        headers=headers,
        timeout=60,
    )
    assert response.status_code == 200, response.text
    answer: dict = response.json()
    assert response.headers["x-request-id"] == answer["id"]
    return answer


@pytest.mark.parametrize("n", [1, 3])
def test_usage_journal_and_trace_agree(serving: Serving, collector: Collector, n: int) -> None:
    trace_id = secrets.token_hex(16)
    answer = ask(serving, trace_id, n=n, seed=1, temperature=1)
    usage = answer["usage"]["crosskv"]
    assert usage["payload_bytes"] > 0
    record = httpx.get(f"{serving.base_url}/requests/{answer['id']}", timeout=10).json()
    assert record["payload_bytes"] == usage["payload_bytes"]
    assert (record["choices"], record["completion_tokens"]) == (n, n * 24)
    queue, transfer, waiting, prefill, decode = record["phases"]
    names = ["queue", "transfer", "queue", "prefill", "decode"]
    assert [phase["name"] for phase in record["phases"]] == names
    assert transfer["end_ms"] - transfer["begin_ms"] == pytest.approx(usage["transfer_ms"])
    assert waiting["end_ms"] - waiting["begin_ms"] == pytest.approx(usage["queue_ms"])
    assert 0 <= queue["begin_ms"] <= queue["end_ms"] == transfer["begin_ms"]
    assert transfer["begin_ms"] == waiting["begin_ms"] < waiting["end_ms"] == prefill["begin_ms"] < prefill["end_ms"]
    assert prefill["end_ms"] < transfer["end_ms"] == decode["begin_ms"] < decode["end_ms"] <= record["duration_ms"]
    assert {queue["replica"], transfer["replica"], decode["replica"]} == {record["decode_replica"]}
    assert {transfer["source"], waiting["replica"], prefill["replica"]} == {record["prefill_replica"]}
    replicas = {status["replica_id"] for status in serving.statuses()}
    assert {record["decode_replica"], record["prefill_replica"]} <= replicas

    trace = collector.wait_for(trace_id, {"decode", "text_completion tiny"})
    (request,) = (one for one in trace if one.name == "text_completion tiny")
    spans = {(one.service, one.name): one for one in trace}
    assert {one.service: one.instance for one in trace} == {
        "crosskv-front-end": record["front_end"],
        "crosskv-decode": record["decode_replica"],
        "crosskv-prefill": record["prefill_replica"],
    }
    sent = spans["crosskv-decode", "transfer"]
    assert sent.attributes["crosskv.payload_bytes"] == request.attributes["crosskv.payload_bytes"]
    assert sent.attributes["crosskv.payload_bytes"] == usage["payload_bytes"]
    for name in ("queue", "transfer", "decode"):
        assert spans["crosskv-decode", name].span.parent_span_id == request.span.span_id
        assert spans["crosskv-decode", name].lies_in(request)
    for name in ("queue", "prefill"):
        assert spans["crosskv-prefill", name].span.parent_span_id == sent.span.span_id
        assert spans["crosskv-prefill", name].lies_in(sent)


def test_a_request_that_is_left_shows_as_aborted(serving: Serving) -> None:
    asked = body(PROMPT[:100], stream=True, max_tokens=300)
    with httpx.stream("POST", f"{serving.base_url}/v1/completions", json=asked, timeout=60) as response:
        assert response.status_code == 200
        name = response.headers["x-request-id"]
        next(response.iter_lines())
    deadline = time.monotonic() + 20
    while (record := httpx.get(f"{serving.base_url}/requests/{name}", timeout=10).json())["status"] == "running":
        assert time.monotonic() < deadline, record
        time.sleep(0.02)
    assert (record["status"], record["http_status"]) == ("aborted", 499)
    assert 0 < record["completion_tokens"] < 300
    assert record["phases"][-1]["name"] == "decode"
