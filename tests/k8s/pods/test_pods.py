"""What runs in the pods of an overlay, and whom it talks to."""

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml

from tests.k8s.kubectl import K8S, render
from tests.k8s.pods.conftest import SIGNED, Pod, Pods

pytestmark = pytest.mark.timeout(900)


def test_an_answer_through_nothing_but_what_the_policies_allow(pods: Pods, tmp_path: Path) -> None:
    with pods.served(tmp_path):
        assert pods.ask().status_code == 401
        usage = pods.ask(**SIGNED).json()["usage"]
        assert usage["crosskv"]["payload_bytes"] == usage["crosskv"]["lower_bound_bytes"] > 0
        used = connections(pods)
        assert {(source, target) for source, target, _ in used} >= {
            ("front-end", "decode"),
            ("decode", "prefill"),
            ("prefill", "head"),
        }
        assert [each for each in used if not allowed(pods, *each)] == []
        # The policies are not simply open.
        assert not allowed(pods, "head", "decode", 53000)
        assert not allowed(pods, "front-end", "decode", 8000)


def connections(pods: Pods) -> set[tuple[str, str, int]]:
    """From which component to which port of which other one there are connections."""
    names = {pod.address: pod.component for pod in pods.parts.values()}
    found = set()
    for pod in pods.parts.values():
        listening = {port for _, port, _ in sockets(pod, "--listening")}
        found |= {
            (names[peer], pod.component, port)
            for _, port, peer in sockets(pod, "state", "established")
            if port in listening and peer in names and peer != pod.address
        }
    return found


def sockets(pod: Pod, *which: str) -> Iterator[tuple[str, int, str]]:
    """Local address and port, and the peer's address."""
    for line in pod.run("ss", "--no-header", "--numeric", "--tcp", *which).splitlines():
        local, peer = re.findall(r"(\S+):(\d+|\*)", line)[:2]
        yield local[0], int(local[1]), peer[0].removeprefix("[::ffff:").removesuffix("]")


def allowed(pods: Pods, source: str, target: str, port: int) -> bool:
    """Whether any policy that selects the target's pod has a rule for the source's."""
    origin, labels = pods.parts[source].labels, pods.parts[target].labels
    for policy in (document["spec"] for document in pods.documents if document["kind"] == "NetworkPolicy"):
        if not selects(policy["podSelector"], labels):
            continue
        for rule in policy["ingress"]:
            peers = [each["podSelector"] for each in rule.get("from", []) if "namespaceSelector" not in each]
            if "from" in rule and not any(selects(selector, origin) for selector in peers):
                continue
            if any(each["port"] <= port <= each.get("endPort", each["port"]) for each in rule["ports"]):
                return True
    return False


def selects(selector: dict, labels: dict[str, str]) -> bool:
    for each in selector.get("matchExpressions", []):
        assert each["operator"] == "In"
        if labels.get(each["key"]) not in each["values"]:
            return False
    return selector.get("matchLabels", {}).items() <= labels.items()


def test_the_load_test_as_a_job_on_several_nodes(pods: Pods, tmp_path: Path) -> None:
    """The RayJob's command runs beside the front end, its engines are in other pods; table and report come back."""
    (job,) = (document["spec"] for document in render(K8S / "load-test") if document["kind"] == "RayJob")
    words = shlex.split(job["entrypoint"])
    places = {"--model": str(pods.model), "--output": str(tmp_path), "--prompt-tokens": "64", "--requests": "4"}
    for option, value in places.items():
        words[words.index(option) + 1] = value
    out = pods.parts["head"].run(
        *("ray", "job", "submit", "--address", pods.dashboard, "--working-dir", "."),
        *("--entrypoint-resources", job["entrypointResources"], "--runtime-env-json"),
        *(json.dumps(yaml.safe_load(job["runtimeEnvYAML"])), "--", *words),
    )
    assert "every:2" in out
    none, shared = json.loads((tmp_path / "report.json").read_text())["runs"]
    assert none["payload_bytes"] == none["lower_bound_bytes"] == 2 * shared["payload_bytes"] > 0
    actors = httpx.get(f"{pods.dashboard}/api/v0/actors", params={"detail": "true"}, timeout=20).json()
    nodes = httpx.get(f"{pods.dashboard}/api/v0/nodes", timeout=20).json()["data"]["result"]["result"]
    addresses = {node["node_id"]: node["node_ip"] for node in nodes}
    ran = {a["node_id"] for a in actors["data"]["result"]["result"] if a["class_name"] == "ReplicaActor"}
    assert {addresses[node] for node in ran} == {pods.parts["prefill"].address, pods.parts["decode"].address}
