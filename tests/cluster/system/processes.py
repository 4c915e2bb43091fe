"""Finding processes: the one that carries an engine, so that a test can kill it, and those that a command has left."""

import time

import psutil

from tests.replica_listing import listed_replicas

MARK = "CROSSKV_TEST_MARK"
"""A variable by which all processes that a command starts are known."""


def engine_process(incarnation: str) -> tuple[str, int]:
    """The incarnation and the process that listens on its session address."""
    records = listed_replicas(lambda records: any(record.incarnation == incarnation for record in records))
    record = next(record for record in records if record.incarnation == incarnation)
    port = int(record.session_address.rsplit(":", 1)[1])
    for process in psutil.Process().children(recursive=True):
        try:
            if any(c.status == psutil.CONN_LISTEN and c.laddr.port == port for c in process.net_connections("tcp")):
                return incarnation, process.pid
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    raise AssertionError(f"no process of this session listens on {record.session_address}")


def require_none_left(mark: str) -> None:
    """No process that was started with this mark may live, or not for long."""
    deadline = time.monotonic() + 10
    while left := _marked(mark):
        assert time.monotonic() < deadline, f"still running: {left}"
        time.sleep(0.1)


def _marked(mark: str) -> list[str]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.cmdline())[:80])
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found
