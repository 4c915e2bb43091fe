"""A rank that follows, as a gRPC client that says what a test wants it to say."""

import queue
from typing import Self

import grpc

from worker.ranks.command_wire import decode_command
from worker.ranks.commands import Command
from worker.ranks.followers import JOIN_METHOD
from worker.wire import ranks_pb2 as wire

SECONDS = 20.0


class RawFollower:
    """Joins with its first report."""

    def __init__(self, leader: str) -> None:
        self._reports: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._channel = grpc.insecure_channel(leader)
        join: grpc.StreamStreamMultiCallable[bytes, bytes] = self._channel.stream_stream(JOIN_METHOD)
        self._call = join(iter(self._reports.get, None), timeout=SECONDS)

    @classmethod
    def joined(
        cls,
        leader: str,
        rank: int,
        ranks: int,
        *,
        num_blocks: int = 100,
        kv_address: str = "",
        incarnation: str = "decode-1",
    ) -> Self:
        """One that has begun as a rank does."""
        follower = cls(leader)
        hello = wire.Hello(
            rank=rank, ranks=ranks, num_blocks=num_blocks, kv_address=kv_address, incarnation=incarnation
        )
        follower.report(wire.Report(hello=hello))
        return follower

    def report(self, report: wire.Report) -> None:
        self.say(report.SerializeToString())

    def say(self, message: bytes) -> None:
        self._reports.put(message)

    def command(self) -> Command:
        """The next one. Raises ``StopIteration`` when the leader has ended, ``grpc.RpcError`` when it refuses."""
        return decode_command(next(self._call))

    def finish(self) -> None:
        """Say that nothing more will come."""
        self._reports.put(None)

    def leave(self) -> None:
        """Break off, as a process that is killed does."""
        self._reports.put(None)
        self._channel.close()
