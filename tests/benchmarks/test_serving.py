import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import serving
from tests.cluster.conftest import fake_server, sse

__all__ = ["fake_server"]


async def all_at_once(server: Any, body: dict[str, Any]) -> AsyncIterator[str]:
    """Every token of an answer in one piece of the body, so that thousands take a second."""
    token = sse({"choices": [{"index": 0, "text": "t ", "finish_reason": None}]})
    prompt, output = len(body["prompt"]), body["max_tokens"]
    usage = {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
    yield token * output + sse({"choices": [], "usage": usage}) + sse("[DONE]")


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["serving", *arguments])
    serving.main()


def test_a_server_that_runs_gets_every_workload_in_every_round(
    fake_server: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_server.completion = all_at_once
    monkeypatch.chdir(tmp_path)
    run(monkeypatch, "--url", fake_server.base_url, "--rounds", "2", "--injection", "50")
    asked = [(len(body["prompt"]), body["max_tokens"]) for body in fake_server.bodies]
    for workload, requests in {(128, 128): 1, (256, 128): 32, (2000, 1): 3, (64, 256): 16}.items():
        assert asked.count(workload) == 2 * requests, workload
    written = json.loads((tmp_path / "bench-results/serving.json").read_text())
    [(name, rounds)] = written["systems"].items()
    assert name == f"fake-model at {fake_server.base_url}"
    assert len(rounds) == 2
    assert sum(one["injected"] for one in rounds) == asked.count((1500, 1)) > 0
    assert all(one["memory"] is None and one["start_s"] is None and one["w1_tokens_per_s"] > 0 for one in rounds)
    assert name in capsys.readouterr().out.splitlines()[-1]
    # Prompts differ from their first token on, so that no prefix cache can answer for a server.
    assert len({tuple(body["prompt"][:2]) for body in fake_server.bodies}) > 100


def test_nobody_at_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match=r"--url http://127\.0\.0\.1:9: .*refused"):
        run(monkeypatch, "--url", "http://127.0.0.1:9")


def test_a_system_that_is_not_there_is_named_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run(monkeypatch, "--model", "nowhere", "--systems", "vLLM colocated")
    assert "--systems vLLM colocated: there are crosskv disaggregated, crosskv colocated" in capsys.readouterr().err
