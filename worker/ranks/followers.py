"""The ranks that follow, as the leading one sees them: a server that they join, a queue of commands to each.

Made before the leading rank's model, because they meet through it; ended with the replica. Commands may be sent from
any thread. A follower that is lost ends the replica: ``lost`` says so to whoever looks after its health. One that was
told to end asks for an orderly end of the replica: ``leaving``.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

import grpc
from google.protobuf.message import DecodeError
from torch._C._distributed_c10d import HashStore

from kv_transfer.authentication import token_checks
from kv_transfer.channel_options import server_options
from kv_transfer.cluster_token import ClusterToken
from kv_transfer.frame import EndFrame
from kv_transfer.group_store import answer
from kv_transfer.heartbeat import SILENCE_SECONDS, Silence
from kv_transfer.prefill_server import TransferName
from kv_transfer.strangers import Strangers
from kv_transfer.wire import kv_transfer_pb2 as kv_wire
from worker.incoming_transfers import RankReceived
from worker.prefill_peers import PeerRefused
from worker.ranks.command_wire import encode_command, parse_name
from worker.ranks.commands import Command, ConnectPeer
from worker.ranks.process_group import RankLost
from worker.wire import ranks_pb2 as wire

JOIN_METHOD = "/crosskv.ranks.v1.Ranks/Join"
STORE_METHOD = "/crosskv.ranks.v1.Ranks/Store"
JOIN_SECONDS = 300.0
"""Loading a large model from a slow disk takes minutes."""
CONNECT_SECONDS = 30.0
_THREADS_PER_RANK = 4


@dataclass(frozen=True, slots=True)
class Totals:
    """What ranks counted so far, and the transfers that their receivers do not take fast enough."""

    sent_bytes: int = 0
    received_bytes: int = 0
    stale_pieces: int = 0
    wire_bytes: int = 0
    backlogged: frozenset[TransferName] = frozenset()


@dataclass(slots=True)
class _Follower:
    commands: "queue.SimpleQueue[bytes | None]"
    hello: wire.Hello
    totals: wire.Totals
    silence: Silence = field(default_factory=Silence)


class Followers:
    """See the module: ranks 1 to ``ranks - 1`` of the replica ``incarnation``, which must have ``token``."""

    def __init__(self, incarnation: str, ranks: int, host: str, token: ClusterToken | None = None) -> None:
        self.incarnation = incarnation
        self.strangers = Strangers()
        self._ranks = ranks
        self._changed = threading.Condition()
        self._joined: dict[int, _Follower] = {}
        # By attempt: what each rank has answered.
        self._connections: dict[int, dict[int, wire.Connected]] = {}
        self._received: Callable[[RankReceived], None] | None = None
        self._stopping = False
        self.lost: str | None = None
        self.leaving = False
        self.store = HashStore()
        self._server = grpc.server(
            ThreadPoolExecutor(_THREADS_PER_RANK * ranks, thread_name_prefix="ranks"),
            options=server_options(),
            interceptors=token_checks(token, self.strangers),
        )
        self.address = f"{host}:{self._server.add_insecure_port(f'{host}:0')}"
        handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
            "Join": grpc.stream_stream_rpc_method_handler(self._join),
            "Store": grpc.unary_unary_rpc_method_handler(self._store),
        }
        service = JOIN_METHOD.strip("/").split("/")[0]
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
        self._server.start()

    @property
    def count(self) -> int:
        """How many follow."""
        return self._ranks - 1

    @property
    def kv_addresses(self) -> tuple[str, ...]:
        """Where decode ranks reach them, in order, once they have joined."""
        return tuple(self._joined[rank].hello.kv_address for rank in range(1, self._ranks))

    def wait(self, num_blocks: int, received: Callable[[RankReceived], None]) -> None:
        """Return when all have joined with room for as many blocks. Raises ``RankLost``.

        ``received`` is told, on some thread, how transfers ended on them.
        """
        self._received = received
        deadline = time.monotonic() + JOIN_SECONDS
        with self._changed:
            if not self._changed.wait_for(
                lambda: self.lost is not None or len(self._joined) == self.count, deadline - time.monotonic()
            ):
                missing = sorted(set(range(1, self._ranks)) - self._joined.keys())
                raise RankLost(f"ranks {missing} have not joined within {JOIN_SECONDS:.0f} s")
            if self.lost is not None:
                raise RankLost(self.lost)
            for rank, follower in self._joined.items():
                if follower.hello.num_blocks != num_blocks:
                    raise RankLost(
                        f"rank {rank} has room for {follower.hello.num_blocks} blocks, the leading rank for "
                        f"{num_blocks}: start all with the same settings"
                    )

    def send(self, command: Command) -> None:
        """Queue a command for all; never blocks."""
        message = encode_command(command)
        for follower in self._joined.values():
            follower.commands.put(message)

    @contextmanager
    def connecting(self, command: ConnectPeer) -> Iterator[Callable[[], int]]:
        """Have all connect to a prefill replica while the leading rank does.

        Gives a function that waits for them and returns the fewest streams granted, or raises ``PeerRefused``.
        """
        answers: dict[int, wire.Connected] = {}
        with self._changed:
            self._connections[command.attempt] = answers
        self.send(command)

        def connected() -> int:
            with self._changed:
                complete = self._changed.wait_for(
                    lambda: self.lost is not None or len(answers) == self.count, CONNECT_SECONDS
                )
            if not complete or self.lost is not None:
                raise PeerRefused(f"not every rank has connected to {command.incarnation}", final=False)
            for rank, said in answers.items():
                if said.error:
                    raise PeerRefused(f"rank {rank}: {said.error}", final=said.final)
            return min(said.max_streams for said in answers.values())

        try:
            yield connected
        finally:
            with self._changed:
                del self._connections[command.attempt]

    def totals(self) -> Totals:
        """The last that each has reported, summed."""
        reports = [follower.totals for follower in self._joined.values()]
        return Totals(
            sent_bytes=sum(report.sent_bytes for report in reports),
            received_bytes=sum(report.received_bytes for report in reports),
            stale_pieces=sum(report.stale_pieces for report in reports),
            wire_bytes=sum(report.wire_bytes for report in reports),
            backlogged=frozenset(parse_name(name) for report in reports for name in report.backlogged),
        )

    def look(self, now: float) -> None:
        """Take a follower for lost that has been silent for too long. To be called every ``LOOK_SECONDS``."""
        for rank, follower in self._joined.items():
            if follower.silence.look(now):
                self._lose(f"rank {rank} of {self._ranks} has been silent for {SILENCE_SECONDS} s")

    def stop(self) -> None:
        """End all."""
        self._stopping = True
        for follower in self._joined.values():
            follower.commands.put(None)
        self._server.stop(grace=1.0).wait()

    def _join(self, reports: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        try:
            hello = wire.Report.FromString(next(reports)).hello
        except (DecodeError, StopIteration, grpc.RpcError):
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a rank begins with a Hello")
        follower = _Follower(queue.SimpleQueue(), hello, wire.Totals())
        with self._changed:
            if hello.incarnation != self.incarnation:
                context.abort(
                    grpc.StatusCode.FAILED_PRECONDITION,
                    f"rank {hello.rank} of {hello.incarnation} has come to {self.incarnation}",
                )
            if hello.ranks != self._ranks or not 0 < hello.rank < self._ranks or hello.rank in self._joined:
                context.abort(
                    grpc.StatusCode.FAILED_PRECONDITION,
                    f"rank {hello.rank} of {hello.ranks} cannot join a replica of {self._ranks}, of which "
                    f"{sorted(self._joined)} follow already",
                )
            self._joined[hello.rank] = follower
            self._changed.notify_all()
        name = f"reports-of-rank-{hello.rank}"
        threading.Thread(target=self._read, args=(hello.rank, reports, context), name=name, daemon=True).start()
        while (command := follower.commands.get()) is not None:
            yield command

    def _read(self, rank: int, reports: Iterator[bytes], context: grpc.ServicerContext) -> None:
        """Take a follower's reports until it is gone."""
        reason = "it has left"
        try:
            for message in reports:
                self._joined[rank].silence.heard()
                self._take(rank, wire.Report.FromString(message))
        except Exception as error:
            # Whatever it was, the replica is not whole any more.
            reason = str(error) or type(error).__name__
        self._lose(f"rank {rank} of {self._ranks} is lost: {reason}")
        self._joined[rank].commands.put(None)
        context.cancel()

    def _lose(self, reason: str) -> None:
        with self._changed:
            if not self._stopping:
                self.lost = self.lost or reason
            self._changed.notify_all()

    def _take(self, rank: int, report: wire.Report) -> None:
        match report.WhichOneof("report"):
            case "connected":
                with self._changed:
                    if report.connected.attempt in self._connections:
                        self._connections[report.connected.attempt][rank] = report.connected
                    self._changed.notify_all()
            case "received":
                assert self._received is not None
                self._received(_parse_received(rank, report.received))
            case "totals":
                self._joined[rank].totals = report.totals
            case "leaving":
                self.leaving = True

    def _store(self, message: bytes, context: grpc.ServicerContext) -> bytes:
        try:
            return answer(self.store, kv_wire.StoreRequest.FromString(message), context.is_active)
        except DecodeError:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "not a StoreRequest")
        except RuntimeError as error:
            context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, str(error))


def _parse_received(rank: int, message: wire.Received) -> RankReceived:
    # Only the leading rank's end says more than that it is one.
    end = EndFrame(message.epoch, message.received_bytes, 0, 0, 0.0, 0.0)
    return RankReceived(
        rank=rank,
        request_id=message.request_id,
        epoch=message.epoch,
        received_bytes=message.received_bytes,
        end=None if message.error else end,
        error=message.error,
        busy=message.busy,
    )
