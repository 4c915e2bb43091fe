"""Ray clusters that are nobody's in particular: as in a pod, `ray start` made them, and applications come to them."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
import pytest
import yaml

from cluster.ports import free_port
from tests.k8s.kubectl import K8S, REPOSITORY, render
from tests.tiny_checkpoints import write_tiny

RAY_START_ATTEMPTS = 3
OF_RAY = ("ray::IDLE", "ray::DashboardAgent", "ray::RuntimeEnvAgent", "ray-dashboard")
"""Workers that Ray keeps for later, and what every node has."""
PROGRAMS = {"ray": "ray.scripts.scripts", "serve": "ray.serve.scripts"}


@dataclass(frozen=True)
class RayHead:
    """``address`` is that of Ray's control store, ``dashboard`` that for jobs and Serve.

    ``python`` and the rest of its ``environment`` are those of every process of it.
    """

    python: Path
    address: str
    dashboard: str
    environment: dict[str, str]
    process: psutil.Process

    def run(self, *command: str, cwd: Path | None = None) -> str:
        """Run one of Ray's commands as a user of this cluster."""
        finished = subprocess.run(
            [str(self.python), "-P", "-m", PROGRAMS[command[0]], *command[1:]],
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

    @property
    def lives(self) -> bool:
        return self.process.status() != psutil.STATUS_ZOMBIE

    def started_or_ended(self) -> bool:
        try:
            return not self.lives or bool(self.nodes())
        except (httpx.TransportError, ValueError, KeyError):
            # The dashboard is about to begin, or to end.
            return False

    def nodes(self) -> set[str]:
        """Addresses of those that live."""
        reply = httpx.get(f"{self.dashboard}/api/v0/nodes", timeout=20).json()
        return {node["node_ip"] for node in reply["data"]["result"]["result"] if node["state"] == "ALIVE"}

    def processes(self) -> set[psutil.Process]:
        """Everything that has come of it."""
        return set(self.process.children(recursive=True))


def at_work(processes: set[psutil.Process]) -> list[str]:
    """Command lines of those that live and are not a node's own."""
    lines = []
    for process in processes:
        try:
            if process.status() != psutil.STATUS_ZOMBIE:
                lines.append(" ".join(process.cmdline()))
        except psutil.NoSuchProcess:
            continue
    return [line for line in lines if line and not line.startswith(OF_RAY)]


@contextmanager
def ray_node(python: Path, environment: dict[str, str], log_file: Path, *options: str) -> Iterator[psutil.Process]:
    """`ray start` with some options until the context ends; it prints what Ray printed."""
    # Paths of Unix sockets must be short.
    directory = Path(tempfile.mkdtemp(prefix="ck-", dir="/tmp"))
    command = [
        str(python),
        "-P",
        "-m",
        PROGRAMS["ray"],
        "start",
        "--block",
        "--object-store-memory=100000000",
        *options,
    ]
    if "--head" in options:
        command.append(f"--temp-dir={directory}")
    with (
        log_file.open("w") as log,
        subprocess.Popen(command, env=environment, cwd=directory, stdout=log, stderr=log) as started,
    ):
        process = psutil.Process(started.pid)
        try:
            yield process
        finally:
            family = [process, *process.children(recursive=True)]
            started.terminate()
            _, alive = psutil.wait_procs(family, timeout=20)
            for left in alive:
                left.kill()
            print(log_file.read_text())
            shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def ray_cluster(python: Path, log_file: Path, resources: str, **variables: str) -> Iterator[RayHead]:
    """A head alone. On a busy machine Ray gives up its start after half a minute; then it is started again."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "PYTHONPATH"))}
    # Ray's own draining at the end would wait for what tests leave.
    kept |= {"RAY_AUTH_MODE": "disabled", "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0"}
    environment = kept | {"PATH": f"{python.parent}:{os.environ['PATH']}", **variables}
    for _ in range(RAY_START_ATTEMPTS):
        dashboard, port = free_port(), free_port()
        options = (
            *("--head", "--node-ip-address=127.0.0.1", f"--port={port}", f"--dashboard-port={dashboard}"),
            *(f"--dashboard-agent-listen-port={free_port()}", f"--metrics-export-port={free_port()}"),
            *("--num-cpus=16", f"--resources={resources}"),
        )
        with ray_node(python, environment, log_file, *options) as process:
            head = RayHead(python, f"127.0.0.1:{port}", f"http://127.0.0.1:{dashboard}", environment, process)
            until(180, "its own node", head.started_or_ended)
            if head.lives:
                yield head
                return
    raise AssertionError(f"Ray did not start in {RAY_START_ATTEMPTS} attempts")


@pytest.fixture(scope="session")
def ray_head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayHead]:
    """crosskv is installed there, as in our image."""
    resources = '{"crosskv-front-end": 1, "crosskv-prefill": 2, "crosskv-decode": 1}'
    log = tmp_path_factory.mktemp("ray-head") / "head.log"
    # Replicas tell Serve's controller their load this often; by default every ten seconds.
    often = {"RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1"}
    with ray_cluster(Path(sys.executable), log, resources, **often) as head:
        yield head


@pytest.fixture(scope="session")
def bare_ray_head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayHead]:
    """Everything that crosskv depends on is installed there, but not crosskv."""
    directory = tmp_path_factory.mktemp("bare")
    resources = '{"crosskv-front-end": 1, "crosskv-prefill": 1, "crosskv-decode": 1}'
    with ray_cluster(bare_python(directory / "python"), directory / "head.log", resources) as head:
        yield head


def bare_python(directory: Path) -> Path:
    """A Python that sees our packages' dependencies where they are installed.

    An installation that can be edited is a .pth file beside them, and Python reads those only in its own directory.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(directory)], check=True)
    (own,) = directory.glob("lib/python*/site-packages")
    (own / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    python = directory / "bin" / "python"
    code = "import importlib.util, ray, torch; assert importlib.util.find_spec('kv_transfer') is None"
    subprocess.run([str(python), "-c", code], cwd=directory, check=True)
    return python


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What git has of the repository, without anything that was built or installed in it."""
    directory = tmp_path_factory.mktemp("source")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        target = directory / name
        if (REPOSITORY / name).is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(REPOSITORY / name, target)
    return directory


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny("llama", tmp_path_factory.mktemp("tiny-llama"))


@dataclass
class Deployment:
    """An embedded Serve config on a Ray cluster, with what a test puts in place of some settings."""

    head: RayHead
    config: dict
    base_url: str = field(init=False)

    def __post_init__(self) -> None:
        given = self.config["applications"][0]["args"]
        self.base_url = f"http://{given['host']}:{given['port']}"

    def statuses(self) -> list[dict]:
        return httpx.get(f"{self.base_url}/cluster", timeout=20).json()

    def status(self) -> str:
        """What Serve says of the application."""
        reply = httpx.get(f"{self.head.dashboard}/api/serve/applications/", timeout=20).json()
        return reply["applications"]["crosskv"]["status"]


def embedded_config(overlay: str) -> dict:
    """The Serve config in the RayService of an overlay as it would be applied."""
    (service,) = (document for document in render(K8S / "overlays" / overlay) if document["kind"] == "RayService")
    return yaml.safe_load(service["spec"]["serveConfigV2"])


@contextmanager
def deployed(head: RayHead, overlay: str, model: Path, file: Path, **settings: object) -> Iterator[Deployment]:
    """The embedded config with a tiny model, CPUs, and a port of its own; afterwards nothing of it is left."""
    config = embedded_config(overlay)
    config["applications"][0]["args"] |= {
        "model": str(model),
        "served_model_name": "tiny",
        "host": "127.0.0.1",
        "port": free_port(),
        "device": "cpu",
        "dtype": "float32",
        "threads": 1,
        "kv_cache_memory": "8MiB",
        **settings,
    }
    before = head.processes()
    file.write_text(yaml.safe_dump(config))
    try:
        head.run("serve", "deploy", str(file))
        deployment = Deployment(head, config)
        until(300, "/health", lambda: answers(f"{deployment.base_url}/health"))
        yield deployment
    finally:
        head.run("serve", "shutdown", "-y")

    def left() -> list[str]:
        # Serve knows nothing of the directory, which waits for the next replicas.
        return [line for line in at_work(head.processes() - before) if not line.startswith("ray::Directory")]

    until(60, "the end of every process", lambda: not left())


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
