"""What clients write and models answer is in no log, whatever goes wrong."""

import json
import logging
import socket

import httpx
import pytest

from cluster.http_server import http_server
from cluster.openai.api_keys import ApiKey, ApiKeys
from tests.cluster.http_endpoint import Endpoint, listening
from tests.cluster.scripted_engine import ScriptedEngine, emit
from worker.wire.engine_pb2 import Submit

CANARY = "canary-4e1f243a"
KEY = f"key-{CANARY}"
MESSAGES = [{"role": "user", "content": CANARY}]
BODIES = (
    ("/v1/completions", {"prompt": CANARY}),
    ("/v1/completions", {"prompt": [CANARY, CANARY], "stream": True}),
    ("/v1/completions", {"prompt": CANARY, "temperature": CANARY}),
    ("/v1/completions", {"prompt": [CANARY, 7]}),
    ("/v1/completions", {"prompt": CANARY, "stop": [CANARY, ""]}),
    ("/v1/completions", {"prompt": CANARY, "model": CANARY}),
    ("/v1/completions", {"prompt": CANARY, "logit_bias": {CANARY: 1}}),
    ("/v1/completions", {"prompt": CANARY, "cache_salt": CANARY}),
    ("/v1/completions", {CANARY: CANARY}),
    ("/v1/chat/completions", {"messages": MESSAGES}),
    ("/v1/chat/completions", {"messages": MESSAGES, "stream": True}),
    ("/v1/chat/completions", {"messages": [{"role": CANARY, "content": CANARY}]}),
    ("/v1/chat/completions", {"messages": MESSAGES, "chat_template_kwargs": {CANARY: [CANARY]}}),
    ("/tokenize", {"prompt": CANARY, "return_token_strs": True}),
    ("/tokenize", {"messages": MESSAGES}),
    ("/tokenize", {"prompt": CANARY, "messages": CANARY}),
    ("/detokenize", {"tokens": [CANARY]}),
    (f"/{CANARY}", {}),
)


def ask_everything(endpoint: Endpoint) -> set[int]:
    statuses = set()
    with httpx.Client(base_url=endpoint.url(), headers={"Authorization": f"Bearer {KEY}"}, timeout=20) as client:
        for path, body in BODIES:
            statuses.add(client.post(path, json=body).status_code)
            statuses.add(client.post(path, content=json.dumps(body)[:-1]).status_code)
            statuses.add(client.post(path, json=body, headers={"Authorization": f"Bearer {CANARY}"}).status_code)
            statuses.add(client.get(f"{path}?{CANARY}={CANARY}").status_code)
    for said in (CANARY.encode(), f"GET /{CANARY} HTTP/1.1\r\n{CANARY}\r\n\r\n".encode()):
        with socket.create_connection((endpoint.host, endpoint.port), timeout=20) as connection:
            connection.sendall(said)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(4096):
                pass
    return statuses


@pytest.mark.parametrize("failing_at", [None, "once", "midway"])
def test_no_log_line_holds_what_a_client_wrote(
    make_app,
    failing_at: str | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    def script(submit: Submit) -> list:
        failure = ValueError(f"{CANARY} of {submit!r}")
        failure.__cause__ = KeyError(CANARY)
        match failing_at:
            case "once":
                return [failure]
            case "midway":
                return [emit(submit, [5, 6])[0], failure]
        return emit(submit, [5, 6])

    if failing_at == "once":

        def fail(tokenizer: object, *arguments: object, **named: object) -> None:
            raise ValueError(f"{CANARY} in {tokenizer} {arguments} {named}")

        monkeypatch.setattr("cluster.text.tokenizer.Tokenizer.token_text", fail)
    caplog.set_level(logging.DEBUG)
    # Clients log what they ask for.
    for client in ("httpx", "httpcore", "httpx2"):
        caplog.set_level(logging.WARNING, client)
    app = make_app(ScriptedEngine(script), api_keys=ApiKeys([ApiKey.of(KEY)]), max_model_len=512)
    with listening(http_server(app, None, 1.0)) as endpoint:
        statuses = ask_everything(endpoint)
    assert {200, 400, 401, 404, 405} <= statuses
    assert (500 in statuses) == (failing_at is not None)
    out, err = capfd.readouterr()
    for text in (caplog.text, out, err):
        assert CANARY not in text
    assert ("failed unexpectedly" in caplog.text) == (failing_at is not None)
    assert ("builtins.ValueError" in caplog.text) == (failing_at is not None)
