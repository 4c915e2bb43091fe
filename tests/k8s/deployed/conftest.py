"""A Ray cluster that is nobody's in particular: as in a pod, `ray start` made it, and applications come to it."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest

from cluster.ports import free_port
from tests.tiny_checkpoints import write_tiny

BIN = Path(sys.executable).parent


@dataclass(frozen=True)
class RayHead:
    """``dashboard`` is the address for jobs and Serve."""

    dashboard: str
    environment: dict[str, str]
    process: psutil.Process

    def run(self, *command: str, cwd: Path | None = None) -> str:
        """Run one of Ray's commands as a user of this cluster."""
        finished = subprocess.run(
            [str(BIN / command[0]), *command[1:]],
            env=self.environment | {"RAY_API_SERVER_ADDRESS": self.dashboard, "RAY_DASHBOARD_ADDRESS": self.dashboard},
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert finished.returncode == 0, finished.stdout + finished.stderr
        return finished.stdout + finished.stderr

    def actors(self) -> set[str]:
        """Classes of the actors that live."""
        query = {"filter_keys": "state", "filter_predicates": "=", "filter_values": "ALIVE"}
        reply = httpx.get(f"{self.dashboard}/api/v0/actors", params=query, timeout=20).json()
        return {actor["class_name"] for actor in reply["data"]["result"]["result"]}


@pytest.fixture(scope="session")
def ray_head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayHead]:
    dashboard = free_port()
    environment = os.environ | {"RAY_AUTH_MODE": "disabled", "PATH": f"{BIN}:{os.environ['PATH']}"}
    resources = '{"crosskv-front-end": 1, "crosskv-prefill": 1, "crosskv-decode": 1}'
    # Paths of Unix sockets must be short.
    directory = tempfile.mkdtemp(prefix="ck-", dir="/tmp")
    command = [
        str(BIN / "ray"), "start", "--head", "--block", "--node-ip-address=127.0.0.1", f"--temp-dir={directory}",
        f"--port={free_port()}", f"--dashboard-port={dashboard}", f"--dashboard-agent-listen-port={free_port()}",
        f"--metrics-export-port={free_port()}", "--num-cpus=4", f"--resources={resources}",
        "--object-store-memory=100000000",
    ]  # fmt: skip
    log_file = tmp_path_factory.mktemp("ray-head") / "head.log"
    with (
        log_file.open("w") as log,
        subprocess.Popen(command, env=environment, stdout=log, stderr=log) as head,
    ):
        process = psutil.Process(head.pid)
        url = f"http://127.0.0.1:{dashboard}"
        try:
            until(120, "the dashboard", lambda: answers(f"{url}/api/version"))
            yield RayHead(url, environment, process)
        finally:
            family = [process, *process.children(recursive=True)]
            head.terminate()
            _, alive = psutil.wait_procs(family, timeout=20)
            for left in alive:
                left.kill()
            print(log_file.read_text())
            shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny("llama", tmp_path_factory.mktemp("tiny-llama"))


def until(seconds: float, what: str, holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"{what} not within {seconds} s"
        time.sleep(0.2)


def answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=2).status_code == 200
    except httpx.TransportError:
        return False


def complete(url: str) -> dict:
    """Ask for five tokens; returns the usage."""
    body = {"model": "tiny", "prompt": list(range(4, 40)), "max_tokens": 5, "temperature": 0, "ignore_eos": True}
    usage = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()["usage"]
    assert usage["completion_tokens"] == 5
    assert usage["crosskv"]["payload_bytes"] == usage["crosskv"]["lower_bound_bytes"] > 0
    return usage
