"""What a client is told when the cluster fails, before the answer begins and in its middle."""

import pytest

from cluster.engine_client import EngineError, EngineOverloaded, EngineTimeout, EngineUnavailable, PoisonRequest
from tests.cluster.openai.events import events_of
from tests.cluster.scripted_engine import TRANSFER, ScriptedEngine, always, emit, prompt_info
from worker.wire import engine_pb2
from worker.wire.engine_pb2 import FINISH_REASON_ABORT, FINISH_REASON_ERROR, Error, Output, PromptInfo, Submit

pytestmark = pytest.mark.anyio

REQUESTS = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
    ("/v1/completions", {"prompt": "a"}),
    ("/v1/completions", {"prompt": ["a", "b"]}),
]


def failed(kind: engine_pb2.ErrorKind, message: str = "why", retry_after_ms: int = 0) -> list[Output]:
    error = Error(kind=kind, message=message, retry_after_ms=retry_after_ms)
    return [Output(finish_reason=FINISH_REASON_ERROR, error=error)]


FAILURES = {
    "invalid": (failed(engine_pb2.ERROR_KIND_INVALID), 400, "invalid_request", None),
    "overloaded": (failed(engine_pb2.ERROR_KIND_OVERLOADED, retry_after_ms=2500), 429, "overloaded", "3"),
    "timeout": (failed(engine_pb2.ERROR_KIND_TIMEOUT), 504, "timeout", None),
    "internal": (failed(engine_pb2.ERROR_KIND_INTERNAL), 500, "replica_failed", None),
    "unavailable": (failed(engine_pb2.ERROR_KIND_UNAVAILABLE), 503, "unavailable", "1"),
    "unspecified": (failed(engine_pb2.ERROR_KIND_UNSPECIFIED), 500, "replica_failed", None),
    "no replica": (EngineUnavailable("why"), 503, "unavailable", "1"),
    "all full": (EngineOverloaded("why", 7.2), 429, "overloaded", "8"),
    "deadline": (EngineTimeout("why"), 504, "timeout", None),
    "poison": (PoisonRequest("why"), 500, "poison_request", None),
    "other": (EngineError("why"), 500, "replica_failed", None),
}


@pytest.mark.parametrize("name", FAILURES)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), REQUESTS, ids=["chat", "text", "batch"])
async def test_before_the_answer_begins(client, name: str, stream: bool, path: str, body: dict) -> None:
    step, status, code, retry_after = FAILURES[name]
    async with client(ScriptedEngine(lambda _: [step])) as http:
        response = await http.post(path, json=body | {"stream": stream})
    assert response.status_code == status
    assert response.json()["error"]["message"] == "why"
    assert response.json()["error"]["code"] == code
    assert response.headers.get("retry-after") == retry_after


@pytest.mark.parametrize("name", FAILURES)
@pytest.mark.parametrize(("path", "body"), REQUESTS, ids=["chat", "text", "batch"])
async def test_in_the_middle(client, name: str, path: str, body: dict) -> None:
    step, status, code, _ = FAILURES[name]

    def script(submit: Submit):
        yield from emit(submit, [40, 41, 42])[:2]
        yield step

    async with client(ScriptedEngine(script)) as http:
        whole = await http.post(path, json=body)
        stream = await http.post(path, json=body | {"stream": True})
        metrics = (await http.get("/metrics")).text
    # Never half an answer that looks whole.
    assert whole.status_code == status
    *chunks, last = events_of(stream.text)
    assert stream.status_code == 200
    assert chunks
    assert all(choice["finish_reason"] is None for chunk in chunks for choice in chunk["choices"])
    assert last["error"]["message"] == "why"
    assert f'crosskv_requests_total{{status="{status}"}} 2.0' in metrics
    assert f'crosskv_request_failures_total{{code="{code}"}} 2.0' in metrics


@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_that_stops_early_or_aborts_is_an_error(client, stream: bool) -> None:
    scripts = {
        "silence": (lambda _: [], 500),
        "early end": (lambda s: emit(s, [40, 41])[:1], 500),
        "abort": (lambda s: emit(s, [40], finish=FINISH_REASON_ABORT), 503),
        "one of two": (lambda s: emit(s, [40], choice=1), 500),
        "unknown choice": (lambda s: emit(s, [40], choice=5), 500),
    }
    for name, (script, status) in scripts.items():
        async with client(ScriptedEngine(script)) as http:
            response = await http.post("/v1/completions", json={"prompt": "a", "n": 2, "stream": stream})
        if response.status_code == 200:
            assert stream, name
            assert "error" in events_of(response.text)[-1], name
        else:
            assert response.status_code == status, name


@pytest.mark.parametrize("stream", [False, True])
async def test_a_defect_is_a_500_that_shows_nothing_of_the_inside(
    client, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def script(submit: Submit):
        raise KeyError("secret")

    for body in ({"prompt": "a"}, {"prompt": ["a", "b"]}):
        async with client(ScriptedEngine(script)) as http:
            response = await http.post("/v1/completions", json=body | {"stream": stream})
        assert response.status_code == 500
        assert response.json()["error"]["type"] == "server_error"
        assert response.json()["error"]["code"] == "internal_error"
        assert f"{response.headers['x-request-id']} failed unexpectedly" in caplog.text
        assert "secret" not in response.text


async def test_missing_prompt_logprobs_are_an_error(client) -> None:
    def script(submit: Submit):
        (message,) = emit(submit, [40])
        del message[0].prompt_info.prompt_logprobs[:]
        yield message

    async with client(ScriptedEngine(script)) as http:
        response = await http.post("/v1/completions", json={"prompt": [5, 6], "prompt_logprobs": 1})
    assert response.status_code == 500
    assert "0 prompt logprobs where 1" in response.json()["error"]["message"]


async def test_one_prompt_of_a_batch_that_fails_aborts_the_others(client) -> None:
    def script(submit: Submit):
        if list(submit.token_ids) == [6]:
            yield from emit(submit, [40, 41])[:1]
            yield EngineUnavailable("gone")
        while True:
            yield from emit(submit, [40, 41])[:1]

    engine = ScriptedEngine(script)
    async with client(engine) as http:
        response = await http.post("/v1/completions", json={"prompt": [[5], [6], [7]]})
    assert response.status_code == 503
    assert len(engine.aborted) == 2


async def test_other_requests_do_not_notice(client) -> None:
    def script(submit: Submit):
        return [EngineUnavailable("gone")] if list(submit.token_ids) == [6] else always([40])(submit)

    async with client(ScriptedEngine(script)) as http:
        assert (await http.post("/v1/completions", json={"prompt": [6]})).status_code == 503
        assert (await http.post("/v1/completions", json={"prompt": [5]})).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_an_overloaded_cluster_refuses_before_it_looks_at_a_request(client, stream: bool, path: str) -> None:
    engine = ScriptedEngine(always([40]))
    engine.overload = EngineOverloaded("full", 2.2)
    async with client(engine) as http:
        refused = await http.post(path, json={"no": "prompt", "stream": stream})
        metrics = (await http.get("/metrics")).text
        engine.overload = None
        assert (await http.post(path, json={"no": "prompt"})).status_code == 400
    assert refused.status_code == 429
    assert refused.headers["retry-after"] == "3"
    assert refused.json()["error"]["code"] == "overloaded"
    assert 'crosskv_requests_total{status="429"} 1.0' in metrics
    assert not engine.submits


async def test_priority_and_caller_reach_the_replica(client) -> None:
    engine = ScriptedEngine(always([40]))
    async with client(engine) as http:
        for priority in (-1000, 7, None):
            await http.post("/v1/completions", json={"prompt": "a", "priority": priority})
        for wrong in (-1001, 1001, 0.5, "high"):
            response = await http.post("/v1/completions", json={"prompt": "a", "priority": wrong})
            assert response.status_code == 400
            assert response.json()["error"]["param"] == "priority"
    assert [submit.priority for submit in engine.submits] == [-1000, 7, 0]
    assert {submit.caller for submit in engine.submits} == {""}


async def test_a_poison_request_has_an_error_code_of_its_own(client) -> None:
    async with client(ScriptedEngine(lambda _: [PoisonRequest("why")])) as http:
        response = await http.post("/v1/completions", json={"prompt": "a"})
    assert response.json()["error"]["code"] == "poison_request"


async def test_what_another_replica_goes_on_with_is_one_answer(client) -> None:
    """A replica that goes on reports its own transfer, but no prompt tokens and no log-probabilities of the prompt."""

    def script(submit: Submit):
        first = emit(submit, [40, 41, 42, 43], info=prompt_info(submit, transfer=TRANSFER))
        again = emit(submit, [42, 43], info=PromptInfo(transfer=TRANSFER))
        return first[:2] + again

    body = {"prompt": [5, 6, 7], "echo": True, "logprobs": 1, "max_tokens": 4}
    async with client(ScriptedEngine(script)) as http:
        resumed = (await http.post("/v1/completions", json=body)).json()
        metrics = (await http.get("/metrics")).text
    async with client(ScriptedEngine(always([40, 41, 42, 43], info=None))) as http:
        undisturbed = (await http.post("/v1/completions", json=body)).json()
    assert resumed["choices"] == undisturbed["choices"]
    assert resumed["usage"]["total_tokens"] == undisturbed["usage"]["total_tokens"] == 7
    usage = resumed["usage"]["crosskv"]
    assert (usage["resumptions"], usage["attempts"]) == (1, 2)
    assert (usage["payload_bytes"], usage["retransmitted_bytes"]) == (1000, 1000)
    assert "crosskv_resumptions_total 1.0" in metrics
    assert "crosskv_prompt_tokens_total 3.0" in metrics
