"""The pods of an overlay as far as Linux alone makes them: a network each, with the manifest's ports and environment,
and Ray started by the command that KubeRay writes from it. Kubernetes' own part is not here.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
import pytest
import yaml

from tests.k8s.kubectl import K8S, REPOSITORY, render
from tests.scale_out.conftest import answers, until
from tests.scale_out.hosts import Host, hosts
from tests.tiny_checkpoints import write_tiny

BIN = Path(sys.executable).parent
KEY = "a-key-of-a-test"
LABEL = "app.kubernetes.io/component"


@dataclass(slots=True)
class Pod:
    """``labels`` are its template's, ``script`` is what its container runs, with output in ``log``."""

    labels: dict[str, str]
    host: Host
    environment: dict[str, str]
    script: str
    log: Path
    main: "subprocess.Popen[bytes] | None" = field(default=None)

    @property
    def component(self) -> str:
        return self.labels[LABEL]

    @property
    def address(self) -> str:
        return self.host.address

    def start(self) -> None:
        with self.log.open("a") as output:
            command = self.host.command("/bin/bash", "-c", self.script, directory=REPOSITORY)
            self.main = subprocess.Popen(
                command, env=self.environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )

    def kill(self) -> None:
        """As its node's loss would: nothing of the container is left, and nobody is told."""
        assert self.main is not None
        for process in psutil.Process(self.main.pid).children(recursive=True):
            process.kill()
        self.main.wait(20)

    def run(self, *command: str) -> str:
        done = subprocess.run(
            self.host.command(*command, directory=REPOSITORY),
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@dataclass(frozen=True, slots=True)
class Pods:
    """One of every group. ``documents`` is the whole overlay."""

    documents: list[dict]
    parts: dict[str, Pod]
    model: Path

    @property
    def dashboard(self) -> str:
        return f"http://{self.parts['head'].address}:8265"

    @property
    def api(self) -> str:
        return f"http://{self.parts['front-end'].address}:8000"

    def all_alive(self) -> bool:
        """Whether Ray knows every pod. A container that has ended is started again, as Kubernetes does it.

        On a busy machine Ray gives up its start after half a minute, and workers do so that wait for the head.
        """
        for pod in self.parts.values():
            if pod.main is None or pod.main.poll() is not None:
                pod.start()
        if not answers(f"{self.dashboard}/api/version"):
            return False
        reply = httpx.get(f"{self.dashboard}/api/v0/nodes", timeout=20).json()
        alive = {node["node_ip"] for node in reply["data"]["result"]["result"] if node["state"] == "ALIVE"}
        return alive == {pod.address for pod in self.parts.values()}

    def ask(self, **headers: str) -> httpx.Response:
        body = {"model": "tiny", "prompt": list(range(4, 40)), "max_tokens": 5, "temperature": 0, "ignore_eos": True}
        return httpx.post(f"{self.api}/v1/completions", json=body, headers=headers, timeout=60)

    def statuses(self) -> set[str]:
        """The names of the replicas, which are others after a restart."""
        reply = httpx.get(f"{self.api}/cluster", headers=SIGNED, timeout=20)
        return {status["replica_id"] for status in reply.json()}

    @contextmanager
    def served(self, directory: Path) -> Iterator[None]:
        """The embedded Serve config, deployed as KubeRay does it, with a tiny model."""
        (service,) = (document for document in self.documents if document["kind"] == "RayService")
        config = yaml.safe_load(service["spec"]["serveConfigV2"])
        config["applications"][0]["args"] |= {"model": str(self.model), "served_model_name": "tiny"}
        file = directory / "serve-config.yaml"
        file.write_text(yaml.safe_dump(config))
        head = self.parts["head"]
        head.run("serve", "deploy", "--address", self.dashboard, str(file))
        try:
            until(300, "/health", lambda: answers(f"{self.api}/health"))
            yield
        finally:
            head.run("serve", "shutdown", "-y", "--address", self.dashboard)


SIGNED = {"Authorization": f"Bearer {KEY}"}


def start_command(group: dict, head: str | None) -> str:
    """What KubeRay has a container run: `ray start` with the group's parameters, as words of a shell's line."""
    where = "--head" if head is None else f"--address={head}:6379"
    given = " ".join(f"--{name}={value}" for name, value in group["rayStartParams"].items())
    return f"ulimit -n 65536; ray start {where} --block {given}"


@contextmanager
def running_pods(work: Path, head_options: str = "", **variables: str) -> Iterator[Pods]:
    """Those of cpu-demo, ``variables`` beside their own, ``head_options`` at the end of the head's command."""
    documents = render(K8S / "overlays" / "cpu-demo")
    (service,) = (document for document in documents if document["kind"] == "RayService")
    cluster = service["spec"]["rayClusterConfig"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    log = work / "ray.log"
    model = write_tiny("llama", work / "model")
    (work / "token").write_text("0123456789abcdef0123456789abcdef")
    (work / "keys").write_text(f"me:{KEY}\n")
    with ExitStack() as stack:
        parts: dict[str, Pod] = {}
        for group, host in zip(groups, stack.enter_context(hosts(len(groups))), strict=True):
            directory = Path(tempfile.mkdtemp(prefix="ck-", dir="/tmp"))
            stack.callback(shutil.rmtree, directory, ignore_errors=True)
            first = parts["head"].address if parts else None
            # There is no route out, by which Ray would find its address.
            script = f"{start_command(group, first)} --node-ip-address={host.address}"
            script += "" if parts else f" {head_options}"
            labels = group["template"]["metadata"]["labels"]
            pod = Pod(labels, host, environment(group, work, directory, host) | variables, script, log)
            parts[pod.component] = pod
            (sysctl,) = group["template"]["spec"]["securityContext"]["sysctls"]
            pod.run("sysctl", "-q", "-w", f"{sysctl['name']}={sysctl['value']}")
            pod.start()
        running = Pods(documents, parts, model)
        try:
            until(400, "every node", running.all_alive)
            yield running
        finally:
            print(log.read_text())


def environment(group: dict, work: Path, directory: Path, host: Host) -> dict[str, str]:
    """The container's own, with this machine's paths in place of a pod's."""
    (container,) = group["template"]["spec"]["containers"]
    variables = {each["name"]: each["value"] for each in container["env"] if "value" in each}
    variables |= {
        "POD_IP": host.address,
        "CROSSKV_CACHE": str(work / "cache"),
        "HF_HOME": str(work / "huggingface"),
        "CROSSKV_CLUSTER_TOKEN_FILE": str(work / "token"),
        "CROSSKV_API_KEY_FILE": str(work / "keys"),
        # All pods have one disk here.
        "RAY_TMPDIR": str(directory),
        "PATH": f"{BIN}:{os.environ['PATH']}",
    }
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "CROSSKV_"))}
    return kept | variables


@pytest.fixture(scope="module")
def pods(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pods]:
    with running_pods(tmp_path_factory.mktemp("pods")) as running:
        yield running
