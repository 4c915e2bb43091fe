"""``crosskv trace`` against front ends on real sockets."""

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict

import pytest
from fastapi import FastAPI

from cluster.http_server import http_server
from cluster.journal import Entry, Journal, new_front_end
from cluster.openai.errors import ApiError
from cluster.openai.requests import add_requests
from cluster.openai.usage import Usage
from tests.cluster.command_line import Run, refused
from worker.wire.engine_pb2 import Phases, PromptInfo, Transfer


@contextmanager
def front_ends(*journals: Journal) -> Iterator[str]:
    """A server for each, all on one port, as several front ends of a machine share it."""
    listeners = [socket.socket() for _ in journals]
    servers = []
    for journal, listener in zip(journals, listeners, strict=True):
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(("127.0.0.1", listeners[0].getsockname()[1] if servers else 0))
        listener.listen()
        app = FastAPI()

        @app.exception_handler(ApiError)
        async def api_error(_, error: ApiError):
            return error.response()

        add_requests(app, journal)
        server = http_server(app, None, 1.0)
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        servers.append((server, thread))
    yield f"http://127.0.0.1:{listeners[0].getsockname()[1]}"
    for server, thread in servers:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()


def served(journal: Journal) -> Entry:
    """A request that was transferred, lost its replica and was resumed by local computation."""
    entry = journal.begin("/v1/completions", "cmpl")
    usage = Usage(300)
    entry.generating(usage, choices=1)
    timeline = entry.new_prompt(0)
    first = PromptInfo(
        cached_tokens=16,
        phases=Phases(prefill_ms=0.001, transfer_ms=0.002, first_token_ms=0.003),
        transfer=Transfer(payload_bytes=2_000_000, unshared_bytes=4_000_000, attempts=1, prefill_replica="prefill-7"),
    )
    usage.add_prompt(first)
    usage.completion_tokens = 9
    timeline.placed("decode-1")
    timeline.reported(first)
    again = PromptInfo(phases=Phases(prefill_ms=0.001, first_token_ms=0.001))
    usage.add_resumption(again)
    timeline.placed("decode-2")
    timeline.reported(again)
    entry.ended(200)
    return entry


def test_a_request_is_drawn_for_people_and_told_to_programs(crosskv: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal("tiny", new_front_end())
    name = served(journal).request_id
    with front_ends(journal) as url:
        monkeypatch.setenv("COLUMNS", "80")
        code, out, err = crosskv("trace", name, "--base-url", url)
        told = json.loads(crosskv("trace", name, "--base-url", url, "--json")[1])
        last = served(journal).request_id
        assert json.loads(crosskv("trace", "--base-url", url, "--json")[1])["request_id"] == last
    assert (code, err) == (0, "")
    assert all(len(line) <= 80 for line in out.splitlines())
    assert name in out
    assert "300 prompt tokens, 16 cached by decode" in out
    assert "2.0 MB of KV sent, 4.0 MB without sharing" in out
    rows = [line.split() for line in out.splitlines() if " ms " in line]
    names = ["queue", "transfer", "queue", "prefill", "decode", "resumption", "queue", "prefill", "decode"]
    assert [row[0] for row in rows] == names
    assert [line.startswith("  ") for line in out.splitlines() if " ms " in line] == [n in (2, 3) for n in range(9)]
    assert rows[1][-3:] == ["prefill-7", "2.0", "MB"]
    assert rows[-1][-1] == "decode-2"
    record = journal.find(name)
    assert record is not None
    assert told == json.loads(json.dumps(asdict(record)))


def test_several_front_ends_are_asked_until_the_right_one_answers(crosskv: Run) -> None:
    journals = [Journal("tiny", new_front_end()) for _ in range(3)]
    names = [served(journal).request_id for journal in journals for _ in range(3)]
    with front_ends(*journals) as url:
        told = [json.loads(crosskv("trace", name, "--base-url", url, "--json")[1]) for name in names]
    assert [one["request_id"] for one in told] == names
    assert len({one["front_end"] for one in told}) == 3


def test_an_unknown_request_is_one_clear_error(crosskv: Run) -> None:
    journal, gone = Journal("tiny", new_front_end()), Journal("tiny", new_front_end())
    with front_ends(journal) as url:
        unknown = refused(crosskv("trace", "cmpl-x", "--base-url", url))
        elsewhere = refused(crosskv("trace", served(gone).request_id, "--base-url", url))
        nothing = refused(crosskv("trace", "--base-url", url))
    assert "no request has arrived" in nothing
    assert "the last 512 that ended" in unknown
    assert f"journal of {gone.front_end}, unless that is gone" in elsewhere
