"""The Ray Serve deployments: what Serve starts, watches, restarts and scales. Requests never pass through them.

Each deployment's replica is a supervisor: of a front end, or of an engine.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

from cluster.autoscaling import RolePolicy
from cluster.config import ClusterConfig, Placement
from cluster.engine_supervisor import STOP_SECONDS, EngineSupervisor
from cluster.front_end import FrontEndConfig
from cluster.front_end_supervisor import FrontEndSupervisor
from worker.config import Role
from worker.text_config import ReadConfig

SUPERVISOR_CPUS = 0.01
FRONT_END_CPUS = 0.1
LOAD_SECONDS = 15.0
"""Roles are scaled by the average load of so long. Replicas send theirs every 10 s."""


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
    read_config: ReadConfig | None = None,
) -> serve.Application:
    """The whole cluster as one Serve application.

    ``front_end_resources`` name the nodes that fit the front end, ``read_config`` is handed to every rank.
    """
    engines = []
    for role in config.replicas:
        engine = config.engine_config(role, config.model).with_threads(threads)
        engine = replace(engine, token=front_end.token, read_config=read_config)
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
