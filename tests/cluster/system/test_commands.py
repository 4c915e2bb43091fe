"""Whole commands as a person runs them: each starts a cluster of its own, and leaves nothing behind."""

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import httpx
import pytest

from cluster.ports import free_port
from tests.cluster.system.processes import MARK, require_none_left

# They start clusters and compute prompts of a real model; a busy machine may take minutes.
pytestmark = pytest.mark.timeout(900)

REPOSITORY = Path(__file__).parents[3]


def run(*arguments: str) -> str:
    """Run a command of ours; afterwards no process that it started may live."""
    mark = uuid.uuid4().hex
    finished = subprocess.run(
        [sys.executable, "-m", "cluster.cli", *arguments],
        cwd=REPOSITORY,
        env=os.environ | {MARK: mark, "COLUMNS": "80"},
        capture_output=True,
        text=True,
        timeout=840,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    require_none_left(mark)
    return finished.stdout


def test_demo_on_the_real_model(tmp_path: Path) -> None:
    """SmolLM2: 30 layers × 2 × 3 KV heads × 64 elements a token, half of the layers when every second one shares."""
    out = run("demo", "--json", str(tmp_path / "demo.json"))
    whole, shared = json.loads((tmp_path / "demo.json").read_text())
    assert "Paris" in whole["answer"]
    tokens = whole["prompt_tokens"] - 1
    elements = tokens * 30 * 2 * 3 * 64
    assert whole["payload_bytes"] in (elements * 2, elements * 4)
    assert whole["payload_bytes"] == whole["lower_bound_bytes"]
    assert shared["payload_bytes"] == shared["lower_bound_bytes"] == whole["payload_bytes"] // 2
    assert shared["bytes_saved"] == shared["payload_bytes"]
    assert "was not trained to share" in " ".join(out.split())
    assert f"{whole['payload_bytes']:,}" in out


def test_bench_transfer_compares_bytes(tmp_path: Path, tiny_model: Path) -> None:
    run(
        "bench",
        "transfer",
        *("--model", str(tiny_model), "--dtype", "float32", "--sharing", "none,every:2,after:1"),
        *("--prompt-tokens", "64,512", "--requests", "6", "--concurrency", "3", "--output", str(tmp_path)),
    )
    runs = json.loads((tmp_path / "report.json").read_text())["runs"]
    sent = {(r["sharing"], r["prompt_tokens"]): r["payload_bytes"] for r in runs}
    for tokens in (64, 512):
        assert sent["none", tokens] == 6 * (tokens - 1) * 4 * 2 * 2 * 16 * 4
        assert sent["every:2", tokens] * 2 == sent["none", tokens]
        assert sent["after:1", tokens] * 2 == sent["none", tokens]
    for report in runs:
        assert report["errors"] == 0
        assert report["payload_bytes"] == report["lower_bound_bytes"] > 0
        assert report["payload_bytes"] <= report["wire_bytes"]
        if report["prompt_tokens"] == 512:
            assert report["wire_bytes"] <= 1.01 * report["payload_bytes"]
    assert list(tmp_path.glob("*.png"))
    assert (tmp_path / "report.md").read_text()


def test_who_is_ended_together_with_ray_waits_for_nobody(tiny_model: Path) -> None:
    """systemd signals every process of a service, and Ray's die of it at once: no orderly end is left to wait for."""
    mark, port = uuid.uuid4().hex, free_port("127.0.0.1")
    process = subprocess.Popen(
        [sys.executable, "-m", "cluster.cli", "serve", str(tiny_model), "--port", str(port), "--threads", "1"],
        cwd=REPOSITORY,
        env=os.environ | {MARK: mark},
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        _wait_until_healthy(port)
        os.killpg(process.pid, signal.SIGTERM)
        # It would wait for 60 s and more for answers that never come.
        process.wait(timeout=45)
    finally:
        process.kill()
    require_none_left(mark)


def _wait_until_healthy(port: int) -> None:
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        try:
            if httpx.get(f"http://127.0.0.1:{port}/health", timeout=2.0).is_success:
                return
        except httpx.TransportError:
            time.sleep(0.1)
    raise AssertionError("it never answered")
