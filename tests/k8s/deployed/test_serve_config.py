"""The Serve config that each RayService embeds, deployed on a running Ray cluster as KubeRay does it."""

from pathlib import Path

import pytest

from cluster.config import ClusterConfig
from tests.k8s.deployed.conftest import RayHead, at_work, complete, deployed, until

pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize("overlay", ["cpu-demo", "gpu-1p1d", "gpu-2p4d-tp"])
def test_an_embedded_config(overlay: str, ray_head: RayHead, tiny_model: Path, tmp_path: Path) -> None:
    """A tiny model on CPUs in place of its own, and one replica of each role; ranks and transport are the config's."""
    one = {"prefill_replicas": 1, "decode_replicas": 1}
    with deployed(ray_head, overlay, tiny_model, tmp_path / "serve-config.yaml", **one) as deployment:
        complete(deployment.base_url)
        until(60, "RUNNING", lambda: deployment.status() == "RUNNING")
        config = ClusterConfig(**deployment.config["applications"][0]["args"])
        running = at_work(ray_head.processes())
        assert sum(line.startswith("ray::ReplicaActor") for line in running) == 2
        further = sum(config.ranks_of(role) - 1 for role in config.replicas)
        assert sum(line.startswith("ray::RankActor") for line in running) == further
