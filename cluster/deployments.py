"""The Ray Serve deployments: what Serve starts, watches, restarts and scales. Requests never pass through them.

Each deployment's replica is a supervisor. A front end serves HTTP from its own process; an engine supervisor makes the
engine's actor in its placement group and ends with it, so that Serve replaces both.
"""

import logging
import os
import threading
from collections.abc import Mapping

import ray
from ray import serve
from ray.util import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.config import ClusterConfig, Placement
from cluster.front_end import FrontEnd, FrontEndConfig
from cluster.replica_actor import ReplicaActor
from worker.config import EngineConfig, Role

log = logging.getLogger(__name__)

SUPERVISOR_CPUS = 0.01
FRONT_END_CPUS = 0.1
HEALTH_SECONDS = 5.0
STOP_SECONDS = 5.0


class EngineSupervisor:
    """One engine replica as Serve sees it."""

    def __init__(self, config: EngineConfig, model: str, directory: str) -> None:
        threads = config.threads or 1
        self._engine = (
            ray.remote(ReplicaActor)
            .options(
                num_cpus=threads,
                num_gpus=1 if config.device.startswith("cuda") else 0,
                max_concurrency=8,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placement_group=get_current_placement_group(), placement_group_bundle_index=1
                ),
            )
            .remote(config, model, directory)
        )
        ray.get(self._engine.record.remote())
        self._stopping = False
        threading.Thread(target=self._live, name="engine-life", daemon=True).start()

    def check_health(self) -> None:
        """Called by Serve; raises when the engine needs a new process."""
        ray.get(self._engine.require_health.remote(), timeout=HEALTH_SECONDS)

    def __del__(self) -> None:
        """Called by Serve before the process ends."""
        self._stopping = True
        ray.get(self._engine.stop.remote(), timeout=STOP_SECONDS)

    def _live(self) -> None:
        """End this process when the engine ends, at once: Serve then starts a new replica."""
        try:
            ray.get(self._engine.run.remote())
        except Exception:
            log.exception("the engine is gone")
        if not self._stopping:
            os._exit(1)


class FrontEndSupervisor:
    """One front end as Serve sees it. It holds the engines' handles so that they belong to one application."""

    def __init__(self, config: FrontEndConfig, *engines: object) -> None:
        self._engines = engines
        self._front_end = FrontEnd(config)

    def check_health(self) -> None:
        """Called by Serve; a front end without replicas is alive, only not ready."""
        if not self._front_end.alive:
            raise RuntimeError("the HTTP server has stopped")

    def __del__(self) -> None:
        """Called by Serve before the process ends."""
        self._front_end.stop()


def role_resource(part: str) -> dict[str, float]:
    """What a replica takes of its node under ``Placement.ROLE``. ``part`` is a role or ``front-end``."""
    return {f"crosskv-{part}": 1.0}


def build_application(
    config: ClusterConfig,
    front_end: FrontEndConfig,
    threads: int,
    directory: str,
    front_end_resources: Mapping[str, float],
) -> serve.Application:
    """The whole cluster as one Serve application. ``front_end_resources`` name the nodes that fit the front end."""
    if config.mode == "colocated":
        roles = {Role.COLOCATED: config.decode_replicas}
    else:
        roles = {Role.PREFILL: config.prefill_replicas, Role.DECODE: config.decode_replicas}
    engines = []
    for role, replicas in roles.items():
        engine = config.engine_config(role, config.model).with_threads(threads)
        bundle = {"CPU": float(threads)} | ({"GPU": 1.0} if engine.device.startswith("cuda") else {})
        if config.placement is Placement.ROLE:
            bundle |= role_resource(role.value)
        engines.append(
            serve.deployment(EngineSupervisor)
            .options(
                name=role.value,
                num_replicas=replicas,
                placement_group_bundles=[{"CPU": SUPERVISOR_CPUS}, bundle],
                placement_group_strategy="PACK",
                ray_actor_options={"num_cpus": SUPERVISOR_CPUS},
                health_check_period_s=1.0,
                health_check_timeout_s=10.0,
                graceful_shutdown_wait_loop_s=0.1,
                graceful_shutdown_timeout_s=8.0,
            )
            .bind(engine, config.model, directory)
        )
    return (
        serve.deployment(FrontEndSupervisor)
        .options(
            name="front-end",
            num_replicas=1,
            ray_actor_options={"num_cpus": FRONT_END_CPUS, "resources": dict(front_end_resources)},
            health_check_period_s=1.0,
            health_check_timeout_s=10.0,
            graceful_shutdown_wait_loop_s=0.1,
            graceful_shutdown_timeout_s=8.0,
        )
        .bind(front_end, *engines)
    )
