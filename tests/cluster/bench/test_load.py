import asyncio
import statistics
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.bench.load import (
    ClosedLoop,
    Distribution,
    LoadRequest,
    PoissonArrivals,
    RequestRecord,
    Target,
    run_load,
    summarize,
)


def sse(data: str) -> str:
    return f"data: {data}\n\n"


def run(server: Any, requests: list[LoadRequest], arrivals: ClosedLoop | PoissonArrivals, **parameters: object):
    target = Target(server.base_url, "fake-model", parameters=parameters)
    return asyncio.run(run_load(target, requests, arrivals))


def test_records_keep_the_requests_order_and_what_the_server_said(fake_server: Any) -> None:
    requests = [LoadRequest(tuple(range(length)), length) for length in (5, 2, 9)]
    records, duration = run(fake_server, requests, ClosedLoop(2), ignore_eos=True)
    assert [record.prompt_tokens for record in records] == [5, 2, 9]
    assert [record.output_tokens for record in records] == [5, 2, 9]
    # One gap between each pair of tokens: the chunk that only carries the finish reason is not a token.
    assert [len(record.gaps) for record in records] == [4, 1, 8]
    assert [record.transfer.payload_bytes for record in records] == [400, 100, 800]
    assert all(record.error is None and 0 < record.time_to_first_token <= record.latency for record in records)
    assert duration >= max(record.latency for record in records)
    assert {body["max_tokens"] for body in fake_server.bodies} == {5, 2, 9}
    for body in fake_server.bodies:
        assert body["ignore_eos"] is True
        assert body["stream"] is True
        assert body["stream_options"] == {"include_usage": True}
        assert len(body["prompt"]) == body["max_tokens"]


def test_text_prompts_are_sent_as_text(fake_server: Any) -> None:
    run(fake_server, [LoadRequest("once upon", 1)], ClosedLoop(1))
    assert fake_server.bodies[0]["prompt"] == "once upon"


def test_closed_loop_keeps_exactly_that_many_requests_in_flight(fake_server: Any) -> None:
    waiting: list[asyncio.Event] = []

    async def in_batches_of_three(server: Any, body: Any) -> AsyncIterator[str]:
        # Nobody is answered before three are here. With fewer in flight the load could not end.
        mine = asyncio.Event()
        waiting.append(mine)
        if len(waiting) == 3:
            for event in waiting:
                event.set()
            waiting.clear()
        await mine.wait()
        yield sse('{"choices": [{"text": "x", "finish_reason": "length"}]}')
        yield sse("[DONE]")

    fake_server.completion = in_batches_of_three
    records, _ = run(fake_server, [LoadRequest((1,), 1)] * 9, ClosedLoop(3))
    assert [record.error for record in records] == [None] * 9
    assert fake_server.peak_in_flight == 3


def test_poisson_arrivals_do_not_wait_for_answers(fake_server: Any) -> None:
    arrived: list[asyncio.Event] = []

    async def all_at_the_end(server: Any, body: Any) -> AsyncIterator[str]:
        mine = asyncio.Event()
        arrived.append(mine)
        if len(arrived) == 8:
            for event in arrived:
                event.set()
        await mine.wait()
        yield sse('{"choices": [{"text": "x", "finish_reason": null}]}')
        yield sse("[DONE]")

    fake_server.completion = all_at_the_end
    records, duration = run(fake_server, [LoadRequest((1,), 1)] * 8, PoissonArrivals(200.0, seed=3))
    assert [record.error for record in records] == [None] * 8
    assert fake_server.peak_in_flight == 8
    # The first one waited for the last one's arrival, and times count from when a request was due.
    assert records[0].time_to_first_token > records[-1].time_to_first_token
    assert duration >= records[0].latency


def test_a_slow_server_shows_in_the_times(fake_server: Any) -> None:
    async def slow(server: Any, body: Any) -> AsyncIterator[str]:
        await asyncio.sleep(0.15)
        yield sse('{"choices": [{"text": "a", "finish_reason": null}]}')
        await asyncio.sleep(0.1)
        yield sse('{"choices": [{"text": "b", "finish_reason": "length"}]}')
        yield sse("[DONE]")

    fake_server.completion = slow
    [record], duration = run(fake_server, [LoadRequest((1, 2), 2)], ClosedLoop(1))
    assert record.time_to_first_token >= 0.15
    # The server's sleep and the client's clock may differ by a scheduling quantum.
    assert sum(record.gaps) >= 0.09
    assert duration >= record.latency >= 0.25
    assert record.output_tokens == 2  # no usage: one token per chunk
    assert record.transfer is None


@pytest.mark.parametrize(
    ("status", "content", "message"),
    [
        (429, {"error": {"message": "queue full", "type": "overloaded"}}, "HTTP 429: queue full"),
        (404, {"detail": "Not Found"}, 'HTTP 404: {"detail":"Not Found"}'),
        (502, "<html>bad gateway</html>", "HTTP 502: <html>bad gateway</html>"),
    ],
)
def test_refusals_are_errors_and_not_measured(fake_server: Any, status: int, content: Any, message: str) -> None:
    fake_server.refusal = (status, content)
    records, duration = run(fake_server, [LoadRequest((1,), 1)] * 2, ClosedLoop(1))
    summary = summarize(records, duration)
    assert (summary.errors, summary.completed, summary.output_tokens) == (2, 0, 0)
    assert summary.error_messages == (f"2 × {message}",)
    assert summary.ttft_ms.p50 is None


@pytest.mark.parametrize(
    ("events", "message"),
    [
        (['{"choices": [{"text": "a", "finish_reason": null}]}'], "the stream ended before [DONE]"),
        (['{"error": {"message": "the replica died"}}', "[DONE]"], "error in the stream: the replica died"),
        (["{nonsense", "[DONE]"], "not a completion chunk: {nonsense"),
    ],
)
def test_broken_streams_are_errors(fake_server: Any, events: list[str], message: str) -> None:
    async def broken(server: Any, body: Any) -> AsyncIterator[str]:
        for event in events:
            yield sse(event)

    fake_server.completion = broken
    [record], _ = run(fake_server, [LoadRequest((1,), 1)], ClosedLoop(1))
    assert record.error == message


def test_nobody_listening_is_an_error_and_ends() -> None:
    target = Target("http://127.0.0.1:1", "m")
    [record], _ = asyncio.run(run_load(target, [LoadRequest((1,), 1)], ClosedLoop(1)))
    assert record.error is not None
    assert record.error.startswith("ConnectError")


@settings(deadline=None)
@given(st.lists(st.floats(0, 1e6), min_size=2, max_size=300))
def test_percentiles_agree_with_the_standard_library(values: list[float]) -> None:
    distribution = Distribution.of(values)
    hundredths = statistics.quantiles(values, n=100, method="inclusive")
    assert distribution.p50 == pytest.approx(hundredths[49])
    assert distribution.p90 == pytest.approx(hundredths[89])
    assert distribution.p99 == pytest.approx(hundredths[98])
    assert distribution.mean == pytest.approx(statistics.fmean(values))
    assert distribution.max == max(values)


def test_summary_counts_only_what_completed() -> None:
    good = RequestRecord(0.1, (0.02, 0.04), 0.16, 10, 3, None, None)
    single = RequestRecord(0.3, (), 0.3, 10, 1, None, None)
    failed = RequestRecord(0.001, (9.0,), 9.0, 10, 2, None, "boom")
    summary = summarize([good, failed, single], duration=2.0)
    assert (summary.requests, summary.completed, summary.errors) == (3, 2, 1)
    assert summary.error_messages == ("1 × boom",)
    assert (summary.prompt_tokens, summary.output_tokens) == (20, 4)
    assert summary.requests_per_s == 1.0
    assert summary.output_tokens_per_s == 2.0
    assert summary.ttft_ms.p50 == pytest.approx(200)
    assert summary.itl_ms.max == pytest.approx(40)
    assert summary.tpot_ms.mean == pytest.approx(30)
    assert summary.latency_ms.max == pytest.approx(300)
