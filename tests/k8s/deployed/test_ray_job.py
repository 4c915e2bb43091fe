"""crosskv as a job of a Ray cluster: the code travels with it, and nothing is left when it ends."""

import json
import signal
from pathlib import Path

import pytest

from cluster.ports import free_port
from tests.k8s.deployed.conftest import RayHead, answers, complete, until
from tests.k8s.kubectl import REPOSITORY

pytestmark = pytest.mark.timeout(900)

OWN = {"ReplicaActor", "Watcher", "Holder", "Directory", "ServeController"}
SETTINGS = ("--ray-address", "auto", "--placement", "role", "--dtype", "float32", "--threads", "1")


def serve_as_job(ray_head: RayHead, model: Path, name: str) -> str:
    """Submit, wait for an answer; returns the address."""
    port = free_port()
    ray_head.run(
        *("ray", "job", "submit", "--no-wait", "--submission-id", name, "--working-dir", "."),
        *("--runtime-env-json", json.dumps({"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "60"}}), "--"),
        *("python", "-m", "cluster.cli", "serve", str(model), "--served-model-name", "tiny", "--port", str(port)),
        *("--kv-cache-memory", "8MiB", *SETTINGS),
        cwd=REPOSITORY,
    )
    url = f"http://127.0.0.1:{port}"
    until(240, "/health", lambda: answers(f"{url}/health"))
    complete(url)
    assert {"ReplicaActor", "Watcher", "Directory"} <= ray_head.actors()
    return url


def test_stopped(ray_head: RayHead, tiny_model: Path) -> None:
    url = serve_as_job(ray_head, tiny_model, "stopped")
    ray_head.run("ray", "job", "stop", "stopped")
    assert not answers(f"{url}/health")
    until(60, "the end of every actor", lambda: not ray_head.actors() & OWN)


def test_killed(ray_head: RayHead, tiny_model: Path) -> None:
    """The command cannot stop anything any more; the watcher does."""
    url = serve_as_job(ray_head, tiny_model, "killed")
    commands = [p for p in ray_head.process.children(recursive=True) if "cluster.cli" in p.cmdline()]
    assert commands
    for process in commands:
        process.send_signal(signal.SIGKILL)
    until(90, "the end of every actor", lambda: not ray_head.actors() & OWN)
    assert not answers(f"{url}/health")


def test_bench_transfer(ray_head: RayHead, tiny_model: Path, tmp_path: Path) -> None:
    """Its log comes back, its report is where it was told to be."""
    out = ray_head.run(
        *("ray", "job", "submit", "--working-dir", ".", "--", "python", "-m", "cluster.cli", "bench", "transfer"),
        *("--model", str(tiny_model), "--sharing", "none,every:2", "--prompt-tokens", "64", "--requests", "4"),
        *("--kv-cache-memory", "8MiB", "--output", str(tmp_path), *SETTINGS),
        cwd=REPOSITORY,
    )
    assert "every:2" in out
    none, shared = json.loads((tmp_path / "report.json").read_text())["runs"]
    assert none["payload_bytes"] == none["lower_bound_bytes"] == 2 * shared["payload_bytes"] > 0
    until(60, "the end of every actor", lambda: not ray_head.actors() & OWN)
