"""The Ray Serve deployments: what Serve starts, watches, restarts and scales. Requests never pass through them.

Each deployment's replica is a supervisor. A front end serves HTTP from its own process; an engine supervisor makes the
engine's actors in its placement group and ends with them, so that Serve replaces all.
"""

import logging
import math
import os
import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import ray
from ray import serve
from ray.actor import ActorHandle
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy
from ray.util import get_current_placement_group, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.autoscaling import LOAD, RolePolicy
from cluster.config import ClusterConfig, Placement
from cluster.front_end import FrontEnd, FrontEndConfig
from cluster.rank_actor import RankActor
from cluster.replica_actor import ReplicaActor
from worker.config import EngineConfig, Role

log = logging.getLogger(__name__)

SUPERVISOR_CPUS = 0.01
FRONT_END_CPUS = 0.1
HEALTH_SECONDS = 5.0
BEAT_SECONDS = 0.5
HUNG_SECONDS = 8.0
"""By then others have long turned away from it. To kill a process that was only slow would cost more than to wait."""
STOP_SECONDS = 5.0
"""For what follows draining. Serve's own patience is a little longer."""
LISTEN_SECONDS = 60.0
LOAD_SECONDS = 15.0
"""Roles are scaled by the average load of so long. Replicas send theirs every 10 s."""


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


class FrontEndSupervisor:
    """One front end as Serve sees it. It holds the engines' handles so that they belong to one application."""

    def __init__(self, config: FrontEndConfig, *engines: object) -> None:
        self._engines = engines
        self._front_end = FrontEnd(config)
        # Serve stops the next of several front ends when this one is there.
        self._front_end.wait_until_listening(LISTEN_SECONDS)

    def check_health(self) -> None:
        """Called by Serve; a front end without replicas is alive, only not ready."""
        if not self._front_end.alive:
            raise RuntimeError("the HTTP server has stopped")

    def __del__(self) -> None:
        """Called by Serve before the process ends."""
        self._front_end.stop()


def role_resource(part: str, ranks: int = 1) -> dict[str, float]:
    """What each rank takes of its node under ``Placement.ROLE``: a replica takes 1. ``part``: a role or ``front-end``.

    Were it only one rank's, the others could be on nodes of another role.
    """
    # In Ray's own unit, and rounded down, for all of them must fit on a node that has 1.
    return {f"crosskv-{part}": math.floor(1e4 / ranks) / 1e4}


def _number(config: ClusterConfig, role: Role) -> dict[str, Any]:
    """Serve's options for how many replicas of a role there are."""
    least, most = config.replicas[role], config.most_replicas[role]
    if least == most:
        return {"num_replicas": least}
    target = config.scale_prefill_at if role is Role.PREFILL else config.scale_decode_at
    return {
        "autoscaling_config": AutoscalingConfig(
            min_replicas=least,
            max_replicas=most,
            upscale_delay_s=config.scale_up_seconds,
            downscale_delay_s=config.scale_down_seconds,
            look_back_period_s=LOAD_SECONDS,
            policy=AutoscalingPolicy(policy_function=RolePolicy, policy_kwargs={"target": target}),
        )
    }


def build_application(
    config: ClusterConfig,
    front_end: FrontEndConfig,
    threads: int,
    directory: str,
    front_end_resources: Mapping[str, float],
) -> serve.Application:
    """The whole cluster as one Serve application. ``front_end_resources`` name the nodes that fit the front end."""
    engines = []
    for role in config.replicas:
        engine = replace(config.engine_config(role, config.model).with_threads(threads), token=front_end.token)
        bundle = {"CPU": float(threads)} | ({"GPU": 1.0} if engine.device.startswith("cuda") else {})
        if config.placement is Placement.ROLE:
            bundle |= role_resource(role.value, engine.tensor_parallel_size)
        rank_bundles = [dict(bundle) for _ in range(engine.tensor_parallel_size)]
        engines.append(
            serve.deployment(EngineSupervisor)
            .options(
                name=role.value,
                **_number(config, role),
                placement_group_bundles=[{"CPU": SUPERVISOR_CPUS}, *rank_bundles],
                placement_group_strategy="PACK",
                ray_actor_options={"num_cpus": SUPERVISOR_CPUS},
                health_check_period_s=1.0,
                health_check_timeout_s=10.0,
                graceful_shutdown_wait_loop_s=0.1,
                graceful_shutdown_timeout_s=config.drain_seconds + STOP_SECONDS + 3.0,
            )
            .bind(engine, config.model, directory)
        )
    return (
        serve.deployment(FrontEndSupervisor)
        .options(
            name="front-end",
            num_replicas=config.front_ends,
            ray_actor_options={"num_cpus": FRONT_END_CPUS, "resources": dict(front_end_resources)},
            health_check_period_s=1.0,
            health_check_timeout_s=10.0,
            graceful_shutdown_wait_loop_s=0.1,
            graceful_shutdown_timeout_s=config.drain_seconds + STOP_SECONDS + 3.0,
        )
        .bind(front_end, *engines)
    )
