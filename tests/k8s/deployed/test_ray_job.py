"""crosskv as a job of a Ray cluster that has none of it: the code travels along, and nothing is left when it ends."""

import json
import re
import signal
from pathlib import Path

import psutil
import pytest

from cluster.ports import free_port
from tests.k8s.deployed.conftest import RayHead, answers, at_work, complete, until

pytestmark = pytest.mark.timeout(900)

SETTINGS = ("--ray-address", "auto", "--placement", "role", "--dtype", "float32", "--threads", "1")


def serve_as_job(head: RayHead, source: Path, model: Path, name: str) -> str:
    """Submit, wait for an answer; returns the address."""
    port = free_port()
    head.run(
        *("ray", "job", "submit", "--no-wait", "--submission-id", name, "--working-dir", "."),
        *("--runtime-env-json", json.dumps({"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "60"}}), "--"),
        *("python", "-m", "cluster.cli", "serve", str(model), "--served-model-name", "tiny", "--port", str(port)),
        *("--kv-cache-memory", "8MiB", *SETTINGS),
        cwd=source,
    )
    url = f"http://127.0.0.1:{port}"
    until(240, "/health", lambda: answers(f"{url}/health"))
    complete(url)
    assert {"ReplicaActor", "Watcher", "Directory"} <= head.actors()
    return url


def commands(head: RayHead) -> list[psutil.Process]:
    """Those that jobs run."""
    return [process for process in head.processes() if "cluster.cli" in process.cmdline()]


@pytest.mark.parametrize("ended_by", ["stopped", "killed"])
def test_nothing_is_left(ended_by: str, bare_ray_head: RayHead, source: Path, tiny_model: Path) -> None:
    """A killed command cannot stop anything any more; its watcher does."""
    before = bare_ray_head.processes()
    url = serve_as_job(bare_ray_head, source, tiny_model, ended_by)
    if ended_by == "stopped":
        bare_ray_head.run("ray", "job", "stop", ended_by)
        assert not answers(f"{url}/health")
        assert re.search(r"answers\s+at", bare_ray_head.run("ray", "job", "logs", ended_by))
    else:
        running = commands(bare_ray_head)
        assert running
        for process in running:
            process.send_signal(signal.SIGKILL)
    until(90, "the end of every process", lambda: not at_work(bare_ray_head.processes() - before))
    assert not answers(f"{url}/health")
    until(30, "the end of every actor", lambda: not bare_ray_head.actors())


def test_bench_transfer(bare_ray_head: RayHead, source: Path, tiny_model: Path, tmp_path: Path) -> None:
    """Its log comes back, its report is where it was told to be."""
    before = bare_ray_head.processes()
    out = bare_ray_head.run(
        *("ray", "job", "submit", "--working-dir", ".", "--", "python", "-m", "cluster.cli", "bench", "transfer"),
        *("--model", str(tiny_model), "--sharing", "none,every:2", "--prompt-tokens", "64", "--requests", "4"),
        *("--kv-cache-memory", "8MiB", "--output", str(tmp_path), *SETTINGS),
        cwd=source,
    )
    assert "every:2" in out
    none, shared = json.loads((tmp_path / "report.json").read_text())["runs"]
    assert none["payload_bytes"] == none["lower_bound_bytes"] == 2 * shared["payload_bytes"] > 0
    until(60, "the end of every process", lambda: not at_work(bare_ray_head.processes() - before))
