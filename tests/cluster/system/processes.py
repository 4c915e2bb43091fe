"""Finding the process that carries an engine, so that a test can kill it."""

import psutil
import ray

from cluster.application import APPLICATION
from cluster.directory import directory_actor


def engine_process(incarnation: str) -> tuple[str, int]:
    """The incarnation and the process that listens on its session address."""
    records = ray.get(directory_actor(APPLICATION).live.remote()).records
    record = next(record for record in records if record.incarnation == incarnation)
    port = int(record.session_address.rsplit(":", 1)[1])
    for process in psutil.Process().children(recursive=True):
        try:
            if any(c.status == psutil.CONN_LISTEN and c.laddr.port == port for c in process.net_connections("tcp")):
                return incarnation, process.pid
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    raise AssertionError(f"no process of this session listens on {record.session_address}")
