"""A Ray cluster of two nodes that share no network, and crosskv served on it."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.scale_out.hosts import Host, hosts
from tests.tiny_checkpoints import write_tiny

REPOSITORY = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
PORT = 8000
START_SECONDS = 300


@dataclass(frozen=True, slots=True)
class Node:
    """A host with Ray. ``directory`` is its own, short enough for the paths of sockets."""

    host: Host
    directory: Path

    @property
    def address(self) -> str:
        return self.host.address

    def open(self, *command: str, log: Path) -> "subprocess.Popen[str]":
        """Start a process here whose output goes to ``log``."""
        with log.open("a") as output:
            return subprocess.Popen(
                self.host.command(*command, directory=REPOSITORY),
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                text=True,
            )

    def run(self, *command: str) -> str:
        """Run a process here and return what it printed."""
        finished = subprocess.run(
            self.host.command(*command, directory=REPOSITORY),
            env=self._environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=START_SECONDS,
            check=False,
        )
        assert finished.returncode == 0, finished.stdout + finished.stderr
        return finished.stdout

    @property
    def _environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        # Where ``--ray-address auto`` looks is a file, and all hosts have the same disk.
        own = {"RAY_AUTH_MODE": "disabled", "RAY_TMPDIR": str(self.directory), "RAY_USAGE_STATS_ENABLED": "0"}
        return kept | own | {"PATH": f"{BIN}:{os.environ['PATH']}"}


@dataclass(frozen=True, slots=True)
class Nodes:
    """The node of prefill replicas, which is Ray's head too, and the node of decode replicas."""

    prefill: Node
    decode: Node

    @property
    def dashboard(self) -> str:
        return f"http://{self.prefill.address}:8265"

    def ranks(self) -> list[dict[str, Any]]:
        """Every process that computes: its node's ``address``, ``pid`` there, its replica's ``placement_group_id``."""
        actors = [actor for actor in self.actors() if actor["class_name"] in ("ReplicaActor", "RankActor")]
        listed = httpx.get(f"{self.dashboard}/api/v0/nodes", timeout=20).json()["data"]["result"]["result"]
        addresses = {node["node_id"]: node["node_ip"] for node in listed}
        return [actor | {"address": addresses[actor["node_id"]]} for actor in actors]

    def actors(self) -> list[dict[str, Any]]:
        query = {"filter_keys": "state", "filter_predicates": "=", "filter_values": "ALIVE", "detail": "true"}
        reply = httpx.get(f"{self.dashboard}/api/v0/actors", params=query, timeout=20).json()
        return reply["data"]["result"]["result"]


@dataclass(frozen=True, slots=True)
class Serving:
    """What runs on the nodes."""

    base_url: str
    nodes: Nodes

    def complete(self, prompt: list[int], **more: object) -> dict[str, Any]:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True, **more}
        response = httpx.post(f"{self.base_url}/v1/completions", json=body, timeout=120)
        assert response.status_code == 200, response.text
        return response.json()

    def statuses(self) -> list[dict[str, Any]]:
        return httpx.get(f"{self.base_url}/cluster", timeout=20).json()

    def records(self) -> list[dict[str, Any]]:
        """What the replica directory says."""
        return json.loads(self.nodes.prefill.run("python", "-m", "tests.scale_out.records"))


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    log = tmp_path_factory.mktemp("ray") / "ray.log"
    directories = [Path(tempfile.mkdtemp(prefix="ck-", dir="/tmp")) for _ in range(2)]
    try:
        with hosts(2) as made:
            head, other = (Node(host, directory) for host, directory in zip(made, directories, strict=True))
            nodes = Nodes(head, other)
            start_ray(
                head,
                log,
                "--head",
                "--port=6379",
                "--dashboard-host=0.0.0.0",
                resources={"crosskv-prefill": 1, "job-prefill": 1},
            )
            until(120, "the dashboard", lambda: answers(f"{nodes.dashboard}/api/version"))
            address = f"--address={head.address}:6379"
            start_ray(other, log, address, resources={"crosskv-decode": 1, "job-decode": 1})
            until(120, "the second node", lambda: alive_nodes(nodes) == 2)
            yield nodes
    finally:
        print(log.read_text())
        for directory in directories:
            shutil.rmtree(directory, ignore_errors=True)


def start_ray(node: Node, log: Path, *options: str, resources: dict[str, float]) -> None:
    """It ends with its host."""
    node.open(
        *("ray", "start", "--block", *options, f"--node-ip-address={node.address}", "--num-cpus=8"),
        *(f"--resources={json.dumps(resources)}", "--object-store-memory=100000000"),
        log=log,
    )


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny("llama", tmp_path_factory.mktemp("tiny-llama"))


Serve = Callable[..., AbstractContextManager[Serving]]


@pytest.fixture(scope="module")
def serve(nodes: Nodes, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Serve:
    """``crosskv serve`` with some flags, for as long as the context lasts."""

    @contextmanager
    def serving(*flags: str) -> Iterator[Serving]:
        command = (
            *("crosskv", "serve", str(model), "--served-model-name", "tiny", "--ray-address", "auto"),
            *("--host", nodes.prefill.address, "--port", str(PORT), "--dtype", "float32"),
            *("--kv-cache-memory", "4MiB", "--threads", "1", *flags),
        )
        log = tmp_path_factory.mktemp("serve") / "serve.log"
        process = nodes.prefill.open(*command, log=log)
        try:
            base_url = f"http://{nodes.prefill.address}:{PORT}"
            until(START_SECONDS, "an answer", lambda: process.poll() is not None or answers(f"{base_url}/health"))
            assert process.poll() is None
            yield Serving(base_url, nodes)
            interrupt(process)
            assert process.wait(60) == 0
        finally:
            kill(process)
            print(log.read_text())
            until(60, "the end of every actor", lambda: not nodes.ranks())

    return serving


def interrupt(process: "subprocess.Popen[str]") -> None:
    """As Ctrl-C does. What entered the host's namespaces is a child of the process that was started."""
    for child in psutil.Process(process.pid).children():
        child.send_signal(signal.SIGINT)


def kill(process: "subprocess.Popen[str]") -> None:
    """If it has not ended by itself."""
    if process.poll() is None:
        for child in psutil.Process(process.pid).children():
            child.kill()
        process.kill()
        process.wait(20)


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


def alive_nodes(nodes: Nodes) -> int:
    listed = httpx.get(f"{nodes.dashboard}/api/v0/nodes", timeout=20).json()["data"]["result"]["result"]
    return sum(node["state"] == "ALIVE" for node in listed)
