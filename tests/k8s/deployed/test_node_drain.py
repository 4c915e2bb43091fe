"""The preStop hook of a decode pod, run for a Ray node on which a decode replica answers."""

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from cluster.ports import free_port
from tests.cluster.system.test_rolling_restart import Load
from tests.cluster.system.test_serving import complete, prompts
from tests.k8s.deployed.conftest import Deployment, RayHead, deployed, ray_node, until
from tests.k8s.kubectl import K8S, render

pytestmark = pytest.mark.timeout(900)

SECOND, THIRD = "127.0.0.2", "127.0.0.3"


def hook(group: str) -> list[str]:
    """As in the overlay's pods."""
    (service,) = (document for document in render(K8S / "overlays" / "cpu-demo") if document["kind"] == "RayService")
    groups = {each["groupName"]: each for each in service["spec"]["rayClusterConfig"]["workerGroupSpecs"]}
    (container,) = groups[group]["template"]["spec"]["containers"]
    return container["lifecycle"]["preStop"]["exec"]["command"]


def run_hook(head: RayHead, pod_ip: str) -> "subprocess.CompletedProcess[str]":
    """In the environment that KubeRay gives a pod."""
    environment = head.environment | {"POD_IP": pod_ip, "RAY_ADDRESS": head.address}
    return subprocess.run(
        hook("decode"), env=environment, cwd="/", capture_output=True, text=True, timeout=150, check=False
    )


@pytest.fixture
def add_node(ray_head: RayHead, tmp_path: Path) -> Iterator:
    """Adds a Ray node with room for one decode replica, at an address of its own."""
    with ExitStack() as nodes:

        def add(address: str) -> None:
            options = (
                *(f"--address={ray_head.address}", f"--node-ip-address={address}", "--num-cpus=4"),
                *('--resources={"crosskv-decode": 1}', f"--dashboard-agent-listen-port={free_port()}"),
                f"--metrics-export-port={free_port()}",
            )
            nodes.enter_context(ray_node(ray_head.python, ray_head.environment, tmp_path / address, *options))
            until(60, "the node", lambda: address in ray_head.nodes())

        yield add


def replicas(deployment: Deployment) -> set[str]:
    return {status["replica_id"] for status in deployment.statuses() if status["role"] == "decode"}


def test_the_hook_waits_until_a_replica_has_finished(
    ray_head: RayHead, tiny_model: Path, tmp_path: Path, add_node
) -> None:
    """Streams that it answers end as they would have; a successor is on the node that had room."""
    (head_address,) = ray_head.nodes()
    add_node(SECOND)
    file = tmp_path / "serve-config.yaml"
    with deployed(ray_head, "cpu-demo", tiny_model, file, decode_replicas=2) as deployment:
        until(60, "two decode replicas", lambda: len(replicas(deployment)) == 2)
        before = replicas(deployment)
        questions = prompts(6, 120, seed=31)
        expected = {
            index: complete(deployment, question, max_tokens=60)["choices"][0]["text"]
            for index, question in enumerate(questions)
        }
        add_node(THIRD)
        with Load(deployment, expected, questions) as load:
            until(60, "work", lambda: load.answered > 4)
            finished = run_hook(ray_head, SECOND)
            assert finished.returncode == 0, finished.stdout + finished.stderr
            assert SECOND not in {actor["node"] for actor in placed(ray_head)}
            until(120, "a successor", lambda: len(replicas(deployment)) == 2)
            answered = load.answered
            until(60, "more work", lambda: load.answered > answered + 4)
        assert not load.failures, load.failures
        assert len(before & replicas(deployment)) == 1
        addresses = {actor["node"] for actor in placed(ray_head) if actor["class"] == "ReplicaActor"}
        assert addresses == {head_address, THIRD}


def test_a_pod_that_ray_does_not_know_ends_at_once(ray_head: RayHead) -> None:
    finished = run_hook(ray_head, "127.0.0.9")
    assert finished.returncode == 2
    assert "--node-ip-address 127.0.0.9 is the address of 0 nodes" in finished.stderr


def placed(head: RayHead) -> Iterator[dict[str, str]]:
    """Live actors' classes and the addresses of their nodes."""
    listed = {
        kind: httpx.get(f"{head.dashboard}/api/v0/{kind}", params={"detail": "true"}, timeout=20).json()
        for kind in ("nodes", "actors")
    }
    nodes, actors = (listed[kind]["data"]["result"]["result"] for kind in ("nodes", "actors"))
    addresses = {node["node_id"]: node["node_ip"] for node in nodes}
    for actor in actors:
        if actor["state"] == "ALIVE":
            yield {"class": actor["class_name"], "node": addresses[actor["node_id"]]}
