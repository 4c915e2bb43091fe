"""A cluster for as long as a command holds it open: Ray if need be, the application on it, and the end of both.

What deploys and checks takes seconds to import, PyTorch and transformers above all. It is imported while Ray starts.
"""

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING

import ray

from cluster.config import ClusterConfig
from cluster.garbage import made_to_stay
from cluster.ray_cluster import APPLICATION, Progress, bounded, connect, ray_lives, while_ray_lives

if TYPE_CHECKING:
    from cluster.application import RunningCluster

STOP_SECONDS = 30.0
GONE_SECONDS = 3.0


@contextmanager
def running_cluster(
    config: ClusterConfig, progress: Progress, later: Sequence[ClusterConfig] = ()
) -> Iterator["RunningCluster"]:
    """Start (or join) Ray, deploy, yield the running cluster, and stop everything that was started here.

    A Ray cluster that is started here has room for every configuration of ``later`` instead of the first. Raises what
    ``require_deployable`` does of any of them before the first replica starts.
    """
    lifeline = None
    try:
        with _meanwhile(lambda: _require_deployable((config, *later))) as require_success:
            threads = max(each.ranks * each.rank_threads for each in (config, *later))
            connect(config, threads, progress, require_success)
            require_success()
            if config.ray_address is None:
                _start_serve(progress)
        from cluster.application import RunningCluster  # noqa: PLC0415 - see the module
        from cluster.lifeline import Lifeline, stop_application  # noqa: PLC0415

        # On a cluster that others use nothing is started before the checks are done.
        if config.ray_address is not None:
            lifeline = Lifeline(APPLICATION)
            _start_serve(progress)
        cluster = RunningCluster(progress)
        try:
            cluster.deploy(config)
            yield cluster
        finally:
            if lifeline is None:
                while_ray_lives(cluster.undeploy, config.drain_seconds + STOP_SECONDS)
            elif while_ray_lives(lambda: stop_application(APPLICATION), config.drain_seconds + STOP_SECONDS):
                lifeline.let_go()
    finally:
        # Asked whether it lives, a Ray that was not reached would start.
        if ray.is_initialized() and not bounded(ray.shutdown, STOP_SECONDS if ray_lives() else GONE_SECONDS):
            # Ray's processes are gone and it waits for them. Our own end takes along what is left of a local cluster.
            os._exit(1)


def _require_deployable(configs: Sequence[ClusterConfig]) -> None:
    with made_to_stay():
        from cluster.application import require_deployable  # noqa: PLC0415 - see the module

        for config in configs:
            require_deployable(config)


def _start_serve(progress: Progress) -> None:
    from ray import serve  # noqa: PLC0415 - see the module

    # It reports each of its own steps on the driver; ours say the same.
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    progress("starting Serve")
    serve.start(proxy_location="Disabled")


@contextmanager
def _meanwhile(action: Callable[[], None]) -> Iterator[Callable[[], None]]:
    """Run ``action`` beside the block, and raise what it has raised when both have ended.

    The block is given what raises it at once if it has failed by then.
    """

    def require_success() -> None:
        if ended.done():
            ended.result()

    with ThreadPoolExecutor(max_workers=1) as beside:
        ended = beside.submit(action)
        yield require_success
    ended.result()
