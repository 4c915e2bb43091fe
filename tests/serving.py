"""The one cluster of a test session: real replicas on a real Ray, reached over HTTP."""

import time
from dataclasses import dataclass, field

import httpx

from cluster.application import RunningCluster
from cluster.config import ClusterConfig

STATES = ("running", "waiting", "receiving")


@dataclass
class Serving:
    """A running cluster, how it was configured at first, and what tests ask of it."""

    cluster: RunningCluster
    config: ClusterConfig
    deployed: ClusterConfig = field(init=False)

    def __post_init__(self) -> None:
        self.deployed = self.config

    @property
    def base_url(self) -> str:
        return self.cluster.base_url

    def require(self, config: ClusterConfig) -> None:
        """Redeploy, unless this is how it is configured."""
        if config != self.deployed:
            self.cluster.redeploy(config)
            self.deployed = config

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
