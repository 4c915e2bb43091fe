"""Traces, as a collector on a real socket receives them."""

import time
from collections.abc import Iterator

import pytest

from cluster.engine_client import EngineUnavailable
from cluster.journal import Journal, TraceContext, new_front_end
from cluster.spans import CLOSE_SECONDS, SpanExport
from tests.cluster.openai.test_requests import CHAT, TEXT, sent
from tests.cluster.otlp_receiver import Collector, collecting
from tests.cluster.scripted_engine import ScriptedEngine, always, emit, prompt_info
from worker.wire.engine_pb2 import FINISH_REASON_LENGTH, FINISH_REASON_UNSPECIFIED, Phases, Submit

pytestmark = pytest.mark.anyio

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"
ENDS = ((40, FINISH_REASON_UNSPECIFIED), (41, FINISH_REASON_LENGTH))
SAMPLED = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=value"}


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


@pytest.mark.parametrize(("path", "body"), [CHAT, TEXT], ids=["chat", "text"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_is_one_trace_over_all_processes(
    client, collector: Collector, path: str, body: dict, stream: bool
) -> None:
    spans = SpanExport(collector.url)
    async with client(ScriptedEngine(sent), ended=spans.export) as http:
        answer = await http.post(path, json=body | {"stream": stream, "n": 2}, headers=SAMPLED)
        record = (await http.get("/requests")).json()[0]
    spans.close()
    trace = collector.trace(TRACE)
    assert len(trace) == len(collector.spans)
    (request,) = (one for one in trace if one.span.parent_span_id.hex() == PARENT)
    assert request.span.trace_state == "vendor=value"
    assert (request.service, request.instance) == ("crosskv-front-end", record["front_end"])
    assert request.name == f"{'chat' if path == CHAT[0] else 'text_completion'} org/tiny"
    expected = {
        "http.route": path,
        "http.response.status_code": 200,
        "gen_ai.response.id": answer.headers["x-request-id"],
        "gen_ai.request.model": "org/tiny",
        "gen_ai.request.choice.count": 2,
        "gen_ai.usage.input_tokens": record["prompt_tokens"],
        "gen_ai.usage.output_tokens": 4,
        "gen_ai.usage.cache_read.input_tokens": 1,
        "crosskv.payload_bytes": 1000,
        "crosskv.unshared_bytes": 2000,
    }
    assert {name: request.attributes[name] for name in expected} == expected
    phases = {(one.name, one.service, one.instance): one for one in trace if one is not request}
    decode, prefill = ("crosskv-decode", "decode-0"), ("crosskv-prefill", "prefill-0")
    transfer = phases["transfer", *decode]
    parents = {
        ("queue", *decode): request,
        ("transfer", *decode): request,
        ("decode", *decode): request,
        ("queue", *prefill): transfer,
        ("prefill", *prefill): transfer,
    }
    assert phases.keys() == parents.keys()
    for name, parent in parents.items():
        assert phases[name].span.parent_span_id == parent.span.span_id
        assert phases[name].lies_in(parent)
    assert transfer.attributes["crosskv.payload_bytes"] == 1000
    assert transfer.attributes["crosskv.source"] == "prefill-0"
    assert abs(request.span.start_time_unix_nano / 1e9 - time.time()) < 60


async def test_who_decides_what_is_traced(client, collector: Collector) -> None:
    spans = SpanExport(collector.url)
    contexts = [
        {"traceparent": f"00-{TRACE}-{PARENT}-00"},
        {"traceparent": "00-nonsense"},
        {"traceparent": f"00-{'0' * 32}-{PARENT}-01"},
        {},
    ]
    async with client(ScriptedEngine(sent), ended=spans.export) as http:
        for headers in contexts:
            assert (await http.post(TEXT[0], json=TEXT[1], headers=headers)).status_code == 200
    spans.close()
    # The first client said that it is not sampled; the others begin traces of their own.
    roots = [one for one in collector.spans if not one.span.parent_span_id]
    assert len(roots) == 3
    assert not collector.trace(TRACE)
    assert len({one.span.trace_id for one in roots}) == 3


async def test_failures_resumptions_and_refusals(client, collector: Collector) -> None:
    phases = Phases(prefill_ms=0.001, first_token_ms=0.002)

    def script(submit: Submit):
        if list(submit.token_ids) == [5]:
            return [EngineUnavailable("gone")]
        info = prompt_info(submit, phases=phases)
        first, second = (emit(submit, [token], info=info, finish=finish)[0] for token, finish in ENDS)
        return [first, "decode-1", second]

    spans = SpanExport(collector.url)
    async with client(ScriptedEngine(script), ended=spans.export) as http:
        assert (await http.post(TEXT[0], json={"prompt": [5]})).status_code == 503
        assert (await http.post(TEXT[0], json={"prompt": "x", "n": 0})).status_code == 400
        assert (await http.post(TEXT[0], json=TEXT[1])).status_code == 200
        record = (await http.get("/requests")).json()[0]
    spans.close()
    roots = {one.attributes["http.response.status_code"]: one for one in collector.spans if not one.span.parent_span_id}
    assert {status: one.failed for status, one in roots.items()} == {503: True, 400: False, 200: False}
    assert roots[503].attributes["error.type"] == "503"
    assert roots[200].attributes["crosskv.resumptions"] == 1
    trace = collector.trace(roots[200].span.trace_id.hex())
    names = [(one.name, one.instance) for one in trace if one.span.parent_span_id]
    lost, other = "decode-0", "decode-1"
    assert sorted(names) == sorted(
        [(name, lost) for name in ("queue", "prefill", "decode")]
        + [(name, other) for name in ("resumption", "queue", "prefill", "decode")]
    )
    assert record["decode_replica"] == f"{lost},{other}"
    assert len(collector.trace(roots[400].span.trace_id.hex())) == 1


async def test_no_text_is_traced(client, collector: Collector) -> None:
    spans = SpanExport(collector.url)
    async with client(ScriptedEngine(always([40, 41, 42])), ended=spans.export) as http:
        text = (await http.post(TEXT[0], json={"prompt": "three little words"})).json()["choices"][0]["text"]
        await http.post(TEXT[0], json={"prompt": "x", "temperature": "abracadabra"})
    spans.close()
    sent_bytes = b"".join(collector.bodies)
    assert b"text_completion org/tiny" in sent_bytes
    for word in ("three", "little", "words", "abracadabra", text.strip()):
        assert word.encode() not in sent_bytes


@pytest.mark.parametrize("fault", ["fails", "hangs", "is gone"])
async def test_a_collector_that_does_not_take_spans_harms_nobody(
    client, collector: Collector, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "20")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "10")
    url = collector.url
    match fault:
        case "fails":
            collector.answer = 503
        case "hangs":
            collector.hold.set()
        case "is gone":
            url = "http://127.0.0.1:9/v1/traces"
    spans = SpanExport(url)
    async with client(ScriptedEngine(sent), ended=spans.export) as http:
        began = time.monotonic()
        for _ in range(50):
            assert (await http.post(TEXT[0], json=TEXT[1])).status_code == 200
        # One export alone would take ten seconds.
        assert time.monotonic() - began < 8
    assert len(spans._batches._batch_processor._queue) <= 20
    began = time.monotonic()
    spans.close()
    assert time.monotonic() - began < CLOSE_SECONDS + 3


def test_many_replicas_come_and_go(collector: Collector) -> None:
    spans = SpanExport(collector.url)
    journal = Journal("m", new_front_end(), ended=spans.export)
    for number in range(1100):
        entry = journal.begin(TEXT[0], "cmpl", TraceContext())
        timeline = entry.new_prompt(0)
        timeline.placed(f"decode-{number}")
        entry.ended(200)
    assert len(spans._tracers) <= 1024
    spans.close()
    assert len(collector.spans) > 1000
