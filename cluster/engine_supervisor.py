"""One engine replica as Serve sees it: makes the engine's actors in its placement group and ends with them.

Serve starts, watches and replaces it. Requests never pass through it, and it imports nothing that only they need.
"""

import logging
import os
import threading
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.util import get_current_placement_group, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.autoscaling import LOAD
from cluster.rank_actor import RankActor
from cluster.replica_actor import ReplicaActor
from worker.config import EngineConfig

log = logging.getLogger(__name__)

HEALTH_SECONDS = 5.0
BEAT_SECONDS = 0.5
HUNG_SECONDS = 8.0
"""By then others have long turned away from it. To kill a process that was only slow would cost more than to wait."""
STOP_SECONDS = 5.0
"""For what follows draining. Serve's own patience is a little longer."""


class EngineSupervisor:
    """One engine replica as Serve sees it: an actor per rank, each in a bundle of its own."""

    def __init__(self, config: EngineConfig, model: str, directory: str) -> None:
        self._drain_seconds = config.drain_seconds
        _warn_if_apart(config.tensor_parallel_size)
        self._engine = _in_bundle(ReplicaActor, 1, config).remote(config, model, directory)
        self._lives: list[ray.ObjectRef[None]] = []
        self._followers: list[ActorHandle] = []
        if config.tensor_parallel_size > 1:
            incarnation, leader = ray.get(self._engine.lead.remote())
            for rank in range(1, config.tensor_parallel_size):
                follower = _in_bundle(RankActor, 1 + rank, config).remote(config, model, rank, incarnation, leader)
                self._followers.append(follower)
                self._lives.append(follower.run.remote())
        self._wait_for_start()
        self._lives.append(self._engine.run.remote())
        self._stopping = False
        threading.Thread(target=self._live, name="engine-life", daemon=True).start()

    def check_health(self) -> None:
        """Called by Serve; raises when the engine needs a new process."""
        ray.get(self._engine.require_health.remote(), timeout=HEALTH_SECONDS)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Called by Serve where the role is scaled."""
        return {LOAD: await self._engine.demand.remote()}

    def __del__(self) -> None:
        """Called by Serve before the process ends: the engine finishes what it has, then ends."""
        self._stopping = True
        ray.get(self._engine.stop.remote(), timeout=self._drain_seconds + STOP_SECONDS)

    def _wait_for_start(self) -> None:
        """Return when the replica serves. Raises what kept it, or any of its ranks, from that."""
        started = self._engine.start.remote()
        ended, _ = ray.wait([started, *self._lives], num_returns=1)
        ray.get(ended)

    def _live(self) -> None:
        """End this process when a rank ends, at once, or hangs, and with it the others: Serve then starts new ones.

        The leading rank looks after the others, and ends when one of them hangs.
        """
        try:
            while True:
                beat = self._engine.beat.remote()
                ended, _ = ray.wait([beat, *self._lives], num_returns=1, timeout=HUNG_SECONDS)
                if not ended:
                    raise TimeoutError(f"the engine's process has not answered for {HUNG_SECONDS} s")
                ray.get(ended)
                ended, _ = ray.wait(self._lives, num_returns=1, timeout=BEAT_SECONDS)
                ray.get(ended)
                if ended:
                    break
        except Exception:
            log.exception("a rank is gone")
        if not self._stopping:
            for actor in (self._engine, *self._followers):
                ray.kill(actor)
            os._exit(1)


def _warn_if_apart(ranks: int) -> None:
    """Tell when ranks of this supervisor's replica are on several nodes: it works, at the speed of their network."""
    placed = placement_group_table(get_current_placement_group())["bundles_to_node_id"]
    nodes = {placed[1 + rank] for rank in range(ranks)}
    if len(nodes) > 1:
        log.warning("the %d ranks of this replica are on %d nodes; every step waits for the network", ranks, len(nodes))


def _in_bundle(actor: type, bundle: int, config: EngineConfig) -> Any:
    """A rank's actor class in one of this supervisor's bundles."""
    return ray.remote(actor).options(
        num_cpus=config.threads or 1,
        num_gpus=1 if config.device.startswith("cuda") else 0,
        max_concurrency=8,
        scheduling_strategy=PlacementGroupSchedulingStrategy(
            placement_group=get_current_placement_group(), placement_group_bundle_index=bundle
        ),
    )
