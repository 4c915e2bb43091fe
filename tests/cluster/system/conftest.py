"""One Ray cluster for the whole session, with two prefill and two decode replicas of a tiny model."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from cluster.application import RunningCluster, running_cluster
from cluster.config import ClusterConfig
from cluster.ports import free_port
from tests.engine_process import TOKEN
from tests.tiny_checkpoints import write_tiny

# So small that concurrent requests preempt each other.
KV_CACHE_MEMORY = "768KiB"
STATES = ("running", "waiting", "receiving")


@dataclass(frozen=True)
class Serving:
    """A running cluster, how it was configured at first, and what tests ask of it."""

    cluster: RunningCluster
    config: ClusterConfig

    @property
    def base_url(self) -> str:
        return self.cluster.base_url

    def statuses(self) -> list[dict]:
        return httpx.get(f"{self.base_url}/cluster", timeout=10).json()

    def wait_for(self, condition, seconds: float, what: str):
        """Poll the cluster's own report until ``condition(statuses)`` holds."""
        deadline = time.monotonic() + seconds
        while True:
            statuses = self.statuses()
            if condition(statuses):
                return statuses
            assert time.monotonic() < deadline, f"{what} not within {seconds} s: {statuses}"
            time.sleep(0.05)

    def wait_until_idle(self) -> None:
        """Every request is gone and every block is free or cached, on every replica."""
        statuses = self.wait_for(
            lambda all_: all(
                s["held_blocks"] == 0 and not any(s["load"][f"{state}_requests"] for state in STATES) for s in all_
            ),
            10.0,
            "idle",
        )
        for status in statuses:
            load = status["load"]
            assert load["free_blocks"] + load["cached_blocks"] == load["total_blocks"], status


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny("llama", tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="session")
def serving(tiny_model: Path) -> Iterator[Serving]:
    config = ClusterConfig(
        model=str(tiny_model),
        served_model_name="tiny",
        port=free_port("127.0.0.1"),
        prefill_replicas=2,
        decode_replicas=2,
        dtype="float32",
        threads=1,
        kv_cache_memory=KV_CACHE_MEMORY,
        max_batched_tokens=256,
        cluster_token=TOKEN.value,
    )
    with running_cluster(config, print) as cluster:
        yield Serving(cluster, config)


@pytest.fixture(autouse=True)
def conservation(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whatever a test did, nothing may be left of it."""
    yield
    if "serving" in request.fixturenames:
        request.getfixturevalue("serving").wait_until_idle()
