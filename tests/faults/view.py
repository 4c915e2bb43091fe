"""A running cluster as a fault finds it: replicas, what each is doing at this moment, and the processes they run in."""

from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import psutil

from tests.engine_process import TOKEN
from tests.replica_listing import listed_replicas
from worker.config import Role
from worker.replica_record import ReplicaRecord
from worker.wire import engine_pb2 as wire
from worker.wire import engine_pb2_grpc

STATUS_SECONDS = 1.0


class Replica:
    """One live replica; ``status`` asks it itself, which takes a millisecond."""

    def __init__(self, record: ReplicaRecord) -> None:
        self.record = record
        self._channel = grpc.insecure_channel(record.session_address)
        self._stub = engine_pb2_grpc.EngineStub(self._channel)

    @property
    def role(self) -> Role:
        return self.record.role

    def status(self) -> wire.StatusReply:
        """Raises ``grpc.RpcError`` when it does not answer."""
        return self._stub.Status(wire.StatusRequest(), timeout=STATUS_SECONDS, metadata=TOKEN.metadata)

    def close(self) -> None:
        self._channel.close()

    def process(self) -> psutil.Process:
        """Its leading rank's."""
        return listening_process(int(self.record.session_address.rsplit(":", 1)[1]))

    def follower(self) -> psutil.Process:
        """The process of its second rank: connected to a port of the leading rank's."""
        leader = self.process()
        ports = {c.laddr.port for c in leader.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
        for process in _processes():
            if "RankActor" in _command(process) and any(
                c.raddr and c.raddr.port in ports for c in process.net_connections("tcp")
            ):
                return process
        raise AssertionError(f"no rank follows {self.record.incarnation}")


@contextmanager
def replicas() -> Iterator[list[Replica]]:
    """All that the directory lists, with a connection to each."""
    found = [Replica(record) for record in listed_replicas()]
    try:
        yield sorted(found, key=lambda replica: replica.record.incarnation)
    finally:
        for replica in found:
            replica.close()


def listening_process(port: int) -> psutil.Process:
    """The process of this session that listens on a port."""
    for process in _processes():
        try:
            if any(c.status == psutil.CONN_LISTEN and c.laddr.port == port for c in process.net_connections("tcp")):
                return process
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    raise AssertionError(f"no process of this session listens on {port}")


def _processes() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""
