"""A Serve config file deployed on a running Ray cluster, as a RayService does it with the one that it embeds."""

from pathlib import Path

import httpx
import pytest
import yaml

from cluster.ports import free_port
from tests.k8s.deployed.conftest import RayHead, answers, complete, until
from tests.k8s.kubectl import K8S

pytestmark = pytest.mark.timeout(600)


def test_serve_deploy(ray_head: RayHead, tiny_model: Path, tmp_path: Path) -> None:
    """The base's file, with a tiny model and a free port in place of its own."""
    config = yaml.safe_load((K8S / "base" / "serve-config.yaml").read_text())
    port = free_port()
    config["applications"][0]["args"] |= {
        "model": str(tiny_model),
        "served_model_name": "tiny",
        "port": port,
        "host": "127.0.0.1",
        "kv_cache_memory": "8MiB",
    }
    file = tmp_path / "serve-config.yaml"
    file.write_text(yaml.safe_dump(config))
    ray_head.run("serve", "deploy", str(file))
    url = f"http://127.0.0.1:{port}"
    until(240, "/health", lambda: answers(f"{url}/health"))
    complete(url)
    status = httpx.get(f"{ray_head.dashboard}/api/serve/applications/", timeout=10).json()
    assert status["applications"]["crosskv"]["status"] == "RUNNING"
    ray_head.run("serve", "shutdown", "-y")
    until(60, "the end of every replica", lambda: not ray_head.actors() - {"Directory", "JobSupervisor"})
