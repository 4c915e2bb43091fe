"""The Ray cluster under an application: one of our own, or one that runs already.

Reached once per command and left with ``ray.shutdown``, which also stops one of our own. Nothing here imports more than
Ray itself, so that it can begin to start while whatever else a command needs is imported.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import ray
from ray._private import ray_constants

from cluster.config import ClusterConfig
from cluster.errors import CrosskvError

APPLICATION = "crosskv"
"""The Serve application, and the namespace of its actors."""
LOOPBACK = "127.0.0.1"
START_ATTEMPTS = 3
ALIVE_SECONDS = 10.0

Progress = Callable[[str], None]


def connect(config: ClusterConfig, threads: int, progress: Progress, require_wanted: Callable[[], None]) -> None:
    """Reach a Ray cluster. A local one is ours alone, listens on loopback, and is stopped with us.

    ``threads`` are those of all ranks that it must have room for. Raises ``CrosskvError`` if Ray does not start, and
    what ``require_wanted`` raises where it would try once more.
    """
    progress("starting Ray" if config.ray_address is None else f"joining Ray at {config.ray_address}")
    # Without it Ray may turn on token authentication and leave a token in the home directory.
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    if config.ray_address is not None:
        ray.init(address=config.ray_address, namespace=APPLICATION, log_to_driver=False)
        return
    for attempt in range(1, START_ATTEMPTS + 1):
        if attempt > 1:
            progress(f"starting Ray, try {attempt} of {START_ATTEMPTS}")
        try:
            with _loopback_is_meant():
                ray.init(
                    address="local",
                    namespace=APPLICATION,
                    # Logical: every rank gets its share of the real cores, what supervises them takes almost nothing.
                    num_cpus=threads + 4,
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    _node_ip_address=LOOPBACK,
                    # By itself Ray gives workers way to everything else on the machine; these serve.
                    _system_config={"worker_niceness": 0},
                )
            return
        except Exception as error:
            ray.shutdown()
            require_wanted()
            if attempt == START_ATTEMPTS:
                raise CrosskvError(
                    f"Ray did not start in {attempt} tries: {error} A busy machine may be too slow for Ray's own time "
                    "limits: try again when it has less to do, or join a Ray cluster that runs, with --ray-address"
                ) from error


def bounded(action: Callable[[], None], seconds: float) -> bool:
    """Run ``action``, but wait for it no longer than ``seconds``: calls into a dead Ray may never return."""
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()


def while_ray_lives(action: Callable[[], None], seconds: float) -> bool:
    """The same, and no longer than there is a Ray: who signals a whole process group ends Ray together with us."""
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    deadline = time.monotonic() + seconds
    while thread.is_alive() and time.monotonic() < deadline and ray_lives():
        thread.join(1.0)
    return not thread.is_alive()


def ray_lives() -> bool:
    """Whether Ray answers and knows a node that is alive."""
    alive: list[bool] = []
    answered = bounded(lambda: alive.extend(node["Alive"] for node in ray.nodes()), ALIVE_SECONDS)
    return answered and any(alive)


@contextmanager
def _loopback_is_meant() -> Iterator[None]:
    """Have Ray listen on loopback alone when it is told to.

    It takes loopback for a mistake, and listens everywhere, but where clusters of several machines are switched off.
    """
    variable, enabled = ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR, ray_constants.ENABLE_RAY_CLUSTER
    before = os.environ.get(variable)
    os.environ[variable], ray_constants.ENABLE_RAY_CLUSTER = "0", False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = enabled
        if before is None:
            del os.environ[variable]
        else:
            os.environ[variable] = before
