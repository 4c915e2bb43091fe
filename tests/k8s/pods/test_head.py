"""The head is lost and replaced while replicas answer, with Ray's control state in Redis as the component has it."""

import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from cluster.ports import free_port
from tests.k8s.pods.conftest import SIGNED, Pods, running_pods
from tests.scale_out.conftest import answers, until
from tests.scale_out.hosts import NETWORK

pytestmark = pytest.mark.timeout(900)

PASSWORD = "0123456789abcdef"


@pytest.fixture
def lasting_pods(tmp_path: Path) -> Iterator[Pods]:
    """KubeRay gives pods these variables, and the head this option, for ``gcsFaultToleranceOptions``."""
    redis = shutil.which("redis-server")
    assert redis is not None, "this test needs Redis: apt-get install redis-server"
    port = free_port()
    given = {
        "RAY_REDIS_ADDRESS": f"{NETWORK}.1:{port}",
        "RAY_external_storage_namespace": "crosskv",
        "RAY_gcs_rpc_server_reconnect_timeout_s": "600",
    }
    options = (
        "--port",
        str(port),
        "--bind",
        "0.0.0.0",
        "--requirepass",
        PASSWORD,
        "--save",
        "",
        "--dir",
        str(tmp_path),
    )
    with subprocess.Popen([redis, *options]) as server:
        try:
            with running_pods(tmp_path, f"--redis-password={PASSWORD}", **given) as running:
                yield running
        finally:
            server.terminate()


def test_replicas_outlive_the_head(lasting_pods: Pods, tmp_path: Path) -> None:
    pods, failures, ended = lasting_pods, [], threading.Event()
    answered = 0

    def ask() -> None:
        nonlocal answered
        while not ended.is_set():
            try:
                response = pods.ask(**SIGNED)
            except httpx.TransportError as error:
                failures.append(repr(error))
                continue
            if response.status_code == 200:
                answered += 1
            else:
                failures.append(response.text)

    def after(number: int) -> None:
        before = answered
        until(60, "further answers", lambda: answered >= before + number)

    with pods.served(tmp_path):
        replicas = pods.statuses()
        assert len(replicas) == 2
        client = threading.Thread(target=ask)
        client.start()
        try:
            after(5)
            head = pods.parts["head"]
            head.kill()
            after(20)
            until(300, "a new head", pods.all_alive)
            until(120, "RUNNING", lambda: status(pods) == "RUNNING")
            after(20)
        finally:
            ended.set()
            client.join(60)
        assert not failures, failures
        assert pods.statuses() == replicas
        assert answers(f"{pods.api}/health")


def status(pods: Pods) -> str:
    """What Serve says of the application."""
    reply = httpx.get(f"{pods.dashboard}/api/serve/applications/", timeout=20)
    return reply.json()["applications"].get("crosskv", {}).get("status", "") if reply.status_code == 200 else ""
