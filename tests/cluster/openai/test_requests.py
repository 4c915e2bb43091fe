"""The journal, as the front end's routes show it."""

import asyncio
import json
import time

import httpx
import pytest

from cluster.engine_client import EngineOverloaded, EngineUnavailable
from cluster.journal import Journal, new_front_end
from cluster.openai.api_keys import ApiKey, ApiKeys
from tests.cluster.openai.events import events_of
from tests.cluster.openai.test_disconnect import Visitor
from tests.cluster.scripted_engine import TRANSFER, ScriptedEngine, always, emit, prompt_info
from worker.wire.engine_pb2 import Phases, Submit

pytestmark = pytest.mark.anyio

CHAT = ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]})
TEXT = ("/v1/completions", {"prompt": [5, 6, 7]})
# Nobody waits for them, so they are short.
PHASES = Phases(prefill_ms=0.001, transfer_ms=0.0015, first_token_ms=0.002)


def sent(submit: Submit):
    """Two tokens per choice, after a transfer."""
    info = prompt_info(submit, cached_tokens=1, prefill_cached_tokens=2, transfer=TRANSFER, phases=PHASES)
    for choice in range(submit.n):
        yield from emit(submit, [40, 41], choice=choice, info=info)


@pytest.mark.parametrize(("path", "body"), [CHAT, TEXT], ids=["chat", "text"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_is_found_by_what_its_response_calls_it(client, path: str, body: dict, stream: bool) -> None:
    async with client(ScriptedEngine(sent)) as http:
        before = time.time()
        response = await http.post(path, json=body | {"stream": stream, "n": 2})
        name = response.headers["x-request-id"]
        answer = events_of(response.text)[0] if stream else response.json()
        found = await http.get(f"/requests/{name}")
        listed = await http.get("/requests")
    assert answer["id"] == name
    record = found.json()
    assert listed.json() == [record]
    assert found.headers["x-front-end"] == listed.headers["x-front-end"] == record["front_end"]
    assert before - 1 < record["began"] < time.time() + 1
    assert [phase["name"] for phase in record["phases"]] == ["queue", "transfer", "queue", "prefill", "decode"]
    assert [phase["replica"] for phase in record["phases"]] == ["decode-0"] * 2 + ["prefill-0"] * 2 + ["decode-0"]
    assert [phase["source"] for phase in record["phases"]] == ["", "prefill-0", "", "", ""]
    assert all(0 <= p["begin_ms"] <= p["end_ms"] <= record["duration_ms"] for p in record["phases"])
    expected = {
        "request_id": name,
        "route": path,
        "model": "org/tiny",
        "status": "finished",
        "http_status": 200,
        "cached_tokens": 1,
        "prefill_cached_tokens": 2,
        "completion_tokens": 4,
        "choices": 2,
        "decode_replica": "decode-0",
        "prefill_replica": "prefill-0",
        "attempts": 1,
        "resumptions": 0,
        "payload_bytes": 1000,
        "unshared_bytes": 2000,
        "retransmitted_bytes": 0,
    }
    assert {name: record[name] for name in expected} == expected
    assert record["prompt_tokens"] > 0


async def test_a_batch_has_phases_of_every_prompt(client) -> None:
    async with client(ScriptedEngine(sent)) as http:
        usage = (await http.post("/v1/completions", json={"prompt": [[5], [6, 7]]})).json()["usage"]
        (record,) = (await http.get("/requests")).json()
    assert [(p["prompt"], p["payload_bytes"]) for p in record["phases"] if p["name"] == "transfer"] == [
        (0, 1000),
        (1, 1000),
    ]
    assert record["payload_bytes"] == usage["crosskv"]["payload_bytes"] == 2000


async def test_a_running_request_is_shown_as_far_as_it_is(client) -> None:
    begun, goes_on = asyncio.Event(), asyncio.Event()

    def script(submit: Submit):
        first, second = emit(submit, [40, 41], info=prompt_info(submit, transfer=TRANSFER, phases=PHASES))
        yield first
        begun.set()
        yield goes_on
        yield second

    engine = ScriptedEngine(script)
    async with client(engine) as http:
        running = asyncio.create_task(http.post(*TEXT[:1], json=TEXT[1]))
        await begun.wait()
        (record,) = (await http.get("/requests")).json()
        goes_on.set()
        name = (await running).json()["id"]
        ended = (await http.get(f"/requests/{name}")).json()
    assert (record["request_id"], record["status"], record["http_status"]) == (name, "running", 0)
    assert (record["completion_tokens"], record["phases"][-1]["name"]) == (1, "decode")
    assert ended["status"] == "finished"
    assert ended["duration_ms"] > record["duration_ms"]


async def test_how_requests_end(client, make_app) -> None:
    def script(submit: Submit):
        yield from emit(submit, [40, 41], info=prompt_info(submit, transfer=TRANSFER, phases=PHASES))[:1]
        yield EngineUnavailable("gone")

    engine = ScriptedEngine(script)
    async with client(engine) as http:
        await http.post(TEXT[0], json=TEXT[1] | {"stream": True})
        await http.post(TEXT[0], json={"prompt": "x", "n": 0})
        engine.overload = EngineOverloaded("full", 1.0)
        refused = await http.post(TEXT[0], json=TEXT[1])
        records = (await http.get("/requests")).json()
    assert refused.headers["x-request-id"] == records[0]["request_id"]
    assert [(record["status"], record["http_status"]) for record in records] == [
        ("refused", 429),
        ("refused", 400),
        ("failed", 503),
    ]
    assert [record["phases"] for record in records[:2]] == [[], []]
    assert records[2]["phases"][-1]["name"] == "decode"
    engine = ScriptedEngine(lambda submit: [asyncio.Event()])
    app = make_app(engine)
    visitor = Visitor(app, *TEXT)
    visit = asyncio.create_task(visitor.visit())
    await engine.submitted.wait()
    visitor.leaves.set()
    await visit
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://front") as http:
        (record,) = (await http.get("/requests")).json()
    assert (record["status"], record["http_status"]) == ("aborted", 499)
    assert [phase["name"] for phase in record["phases"]] == ["queue"]


async def test_no_text_and_no_token_is_shown(client) -> None:
    secret = "three little words"
    async with client(ScriptedEngine(always([40, 41, 42]))) as http:
        body = {"prompt": secret, "user": secret, "stop": ["abracadabra"], "prompt_logprobs": 1, "cache_salt": "salty"}
        answer = (await http.post("/v1/completions", json=body)).json()
        wrong = await http.post("/v1/completions", json={"prompt": "x", "temperature": "abracadabra"})
        shown = (await http.get("/requests")).text
    assert wrong.status_code == 400
    for text in (*secret.split(), "abracadabra", "salty", answer["choices"][0]["text"].strip()):
        assert text not in shown


async def test_the_newest_first_up_to_a_limit(client) -> None:
    async with client(ScriptedEngine(always([40]))) as http:
        names = [(await http.post(TEXT[0], json=TEXT[1])).json()["id"] for _ in range(60)]
        listed = {limit: (await http.get("/requests", params={"limit": limit})).json() for limit in (1, 7, 10_000)}
        usual = (await http.get("/requests")).json()
        for limit in ("0", "-1", "x", "1.5", "", "9" * 30):
            wrong = await http.get("/requests", params={"limit": limit})
            assert wrong.status_code == 400
            assert wrong.json()["error"]["param"] == "limit"
    newest = names[::-1]
    assert {limit: [r["request_id"] for r in records] for limit, records in listed.items()} == {
        1: newest[:1],
        7: newest[:7],
        10_000: newest,
    }
    assert [record["request_id"] for record in usual] == newest[:50]


async def test_unknown_requests(client) -> None:
    async with client(ScriptedEngine(always([40]))) as http:
        known = (await http.post(TEXT[0], json=TEXT[1])).json()["id"]
        own = (await http.get("/requests")).headers["x-front-end"]
        answers = {
            name: await http.get(f"/requests/{name}") for name in (known[:-1] + "g", "cmpl-x", f"cmpl-{'0' * 32}")
        }
        nameless = await http.get("/requests/")
    assert (nameless.status_code, nameless.json()["error"]["code"]) == (404, "not_found")
    codes = {name: answer.json()["error"]["code"] for name, answer in answers.items()}
    assert all(answer.status_code == 404 for answer in answers.values())
    assert all(own in answer.json()["error"]["message"] for answer in answers.values())
    assert list(codes.values()) == ["request_not_found", "request_not_found", "other_front_end"]
    assert "the last 512" in answers["cmpl-x"].json()["error"]["message"]


async def test_the_journal_needs_a_key_where_the_api_does(client) -> None:
    async with client(ScriptedEngine(always([40])), api_keys=ApiKeys([ApiKey.of("a-key-of-a-test")])) as http:
        for path in ("/requests", "/requests/cmpl-x"):
            assert (await http.get(path)).status_code == 401
        allowed = await http.get("/requests", headers={"Authorization": "Bearer a-key-of-a-test"})
    assert json.loads(allowed.text) == []


async def test_the_journal_is_bounded_and_refusals_drive_out_nothing_else() -> None:
    journal = Journal("m", new_front_end(), kept=3, kept_refused=2)
    served = [journal.begin("/v1/completions", "cmpl") for _ in range(5)]
    running = journal.begin("/v1/completions", "cmpl")
    for entry in served:
        entry.ended(200)
    for _ in range(100):
        journal.begin("/v1/completions", "cmpl").ended(429)
    assert [record.status for record in journal.latest(100)] == [*["refused"] * 2, "running", *["finished"] * 3]
    assert journal.find(served[1].request_id) is None
    assert journal.find(served[2].request_id) is not None
    running.ended(499)
    assert [record.request_id for record in journal.latest(100)][2:] == [
        running.request_id,
        served[4].request_id,
        served[3].request_id,
    ]
