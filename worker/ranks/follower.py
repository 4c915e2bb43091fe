"""A rank that follows: the process around it, from joining its leader to the end of the replica.

Made by whatever carries it; ``run`` returns when the leader has ended, and raises when this rank can go on no longer.
Like the leading rank's engine it has one thread that touches pages, which takes commands and what arrives in order.
"""

import logging
import queue
import threading
import time
from typing import TYPE_CHECKING

import grpc
import torch
from google.protobuf.message import DecodeError

from kv_transfer.authentication import open_channel
from kv_transfer.group_sender import GroupSender
from kv_transfer.group_store import GroupStore
from kv_transfer.heartbeat import BEAT_SECONDS
from kv_transfer.pair_group import GroupSettings
from kv_transfer.prefill_server import PrefillJob, PrefillServer, RankStream
from kv_transfer.staging import StagingBudget
from kv_transfer.transfer import PieceArrived, TransferEnded
from kv_transfer.transport import Transport
from worker.config import EngineConfig, Role
from worker.cores import Cores
from worker.dtype import choose_device
from worker.heap import keep_freed_memory
from worker.inbox import Inbox
from worker.incoming_transfers import IncomingTransfers, RankReceived
from worker.model_runner import load_model_runner
from worker.outgoing_transfers import OutgoingTransfers
from worker.prefill_peers import PeerRefused, PrefillPeers
from worker.ranks.command_wire import MAX_COMMAND_BYTES, decode_command, name_message
from worker.ranks.commands import Command, ConnectPeer, ForgetPeer
from worker.ranks.followers import JOIN_METHOD, JOIN_SECONDS, STORE_METHOD
from worker.ranks.process_group import RankLost, TorchRankGroup
from worker.ranks.rank import Rank
from worker.wire import ranks_pb2 as wire

if TYPE_CHECKING:
    from grpc import _CallIterator

log = logging.getLogger(__name__)

TRANSFER_GRACE = 2.0
"""Seconds that decode replicas have to take what is computed when the replica ends."""
REPORT_SECONDS = 0.05
"""Totals are looked at this often."""


class _LeaderGone:
    """The call to the leader has ended."""


_Event = Command | RankStream | PieceArrived | TransferEnded | _LeaderGone


class Follower:
    """Rank ``rank`` of the replica ``incarnation``, whose leading rank is at ``leader``.

    The constructor returns when the model is loaded and the leader knows it. ``fill`` as in ``Replica``.
    """

    def __init__(self, config: EngineConfig, rank: int, incarnation: str, leader: str, *, fill: int = 0) -> None:
        keep_freed_memory()
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        self._config = config
        self._rank_number = rank
        self._inbox: Inbox[_Event] = Inbox()
        self._reports: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._sent = wire.Totals()
        self._reported = 0.0
        self._channel = open_channel(leader, config.token, MAX_COMMAND_BYTES)
        ranks, host = config.tensor_parallel_size, config.advertised_host
        store = GroupStore(self._channel.unary_unary(STORE_METHOD), patience=JOIN_SECONDS)
        group = TorchRankGroup(store, rank, ranks, choose_device(config.device), host)
        self._cores = Cores.claim(config.threads or 1) if config.bind_cores else Cores()
        runner = load_model_runner(config, group, self._cores, fill=fill)
        pairs = GroupSettings(host, runner.device) if config.transport is Transport.TORCH else None
        self._server: PrefillServer | None = None
        self._connections: queue.SimpleQueue[ConnectPeer | ForgetPeer | None] = queue.SimpleQueue()
        outgoing: OutgoingTransfers | None = None
        incoming: IncomingTransfers | None = None
        if config.role is Role.PREFILL:
            sender = None if pairs is None else GroupSender(pairs)
            self._server = PrefillServer(
                runner.layout,
                incarnation,
                config.max_prefill_streams,
                self._attach,
                host=host,
                sender=sender,
                rank=rank,
                ranks=ranks,
                token=config.token,
            )
            self._server.start()
            outgoing = OutgoingTransfers(
                runner,
                rank,
                ranks,
                min_piece_bytes=config.min_piece_bytes,
                max_piece_bytes=config.max_piece_bytes,
                staged=runner.pages.staged,
            )
        elif config.role is Role.DECODE:
            staging = StagingBudget(config.max_staged_bytes)
            peers = PrefillPeers(
                runner.layout,
                incarnation,
                staging,
                self._inbox.put,
                rank=rank,
                ranks=ranks,
                group=pairs,
                token=config.token,
            )
            threading.Thread(target=self._follow_peers, args=(peers,), name="connections", daemon=True).start()
            incoming = IncomingTransfers(runner, peers, staging, rank)
        self._rank = Rank(runner, outgoing, incoming)
        hello = wire.Hello(
            rank=rank,
            ranks=ranks,
            num_blocks=runner.num_blocks,
            kv_address="" if self._server is None else f"{host}:{self._server.port}",
            incarnation=incarnation,
        )
        self._reports.put(wire.Report(hello=hello).SerializeToString())
        join: grpc.StreamStreamMultiCallable[bytes, bytes] = self._channel.stream_stream(JOIN_METHOD)
        self._commands = join(iter(self._reports.get, None))
        threading.Thread(target=self._read, args=(self._commands,), name="commands", daemon=True).start()
        self._ended = threading.Event()
        threading.Thread(target=self._beat, name="beat", daemon=True).start()
        log.info("rank %d of %s follows %s", rank, incarnation, leader)

    def run(self) -> None:
        """Follow until the leader ends. Raises what made that impossible."""
        try:
            self._cores.bind()
            with torch.inference_mode():
                while self._turn():
                    pass
        except RankLost:
            log.exception("rank %d gives up", self._rank_number)
            raise
        finally:
            self._stop()

    def leave(self) -> None:
        """Ask the leader to finish what the replica has and then to end. May be called on any thread."""
        self._reports.put(wire.Report(leaving=wire.Leaving()).SerializeToString())

    def _turn(self) -> bool:
        for event in self._inbox.take(REPORT_SECONDS):
            match event:
                case _LeaderGone():
                    return False
                case RankStream():
                    assert self._rank.outgoing is not None
                    self._rank.outgoing.attach(event)
                case PieceArrived():
                    assert self._rank.incoming is not None
                    self._rank.incoming.take(event)
                case TransferEnded():
                    assert self._rank.incoming is not None
                    self._rank.incoming.end(event)
                case ConnectPeer() | ForgetPeer():
                    self._connections.put(event)
                case _:
                    self._rank.apply(event)
        for received in self._rank.incoming.take_ended() if self._rank.incoming is not None else ():
            self._report_received(received)
        if time.monotonic() - self._reported > REPORT_SECONDS:
            self._report_totals()
        return True

    def _attach(self, event: PrefillJob | RankStream) -> None:
        assert isinstance(event, RankStream), "prompts are the leading rank's"
        self._inbox.put(event)

    def _read(self, commands: "_CallIterator[bytes]") -> None:
        try:
            for message in commands:
                self._inbox.put(decode_command(message))
        except (grpc.RpcError, DecodeError) as error:
            log.info("the leader is gone: %s", error)
        self._inbox.put(_LeaderGone())

    def _beat(self) -> None:
        """Tell the leader, beside whatever is computed, that this process runs."""
        while not self._ended.wait(BEAT_SECONDS):
            self._reports.put(wire.Report().SerializeToString())

    def _follow_peers(self, peers: PrefillPeers) -> None:
        """Connect to prefill replicas and forget them in the order of the commands; steps must not wait for it."""
        while (command := self._connections.get()) is not None:
            match command:
                case ConnectPeer():
                    self._connect(peers, command)
                case ForgetPeer():
                    peers.forget(command.incarnation)
        peers.close()

    def _connect(self, peers: PrefillPeers, command: ConnectPeer) -> None:
        connected = wire.Connected(incarnation=command.incarnation, attempt=command.attempt)
        try:
            connected.max_streams = peers.connect(command)
        except PeerRefused as refusal:
            connected.error, connected.final = str(refusal) or "refused", refusal.final
        self._reports.put(wire.Report(connected=connected).SerializeToString())

    def _report_received(self, received: RankReceived) -> None:
        report = wire.Received(
            request_id=received.request_id,
            epoch=received.epoch,
            received_bytes=received.received_bytes,
            error="" if received.end is not None else received.error or "it failed",
            busy=received.busy,
        )
        self._reports.put(wire.Report(received=report).SerializeToString())

    def _report_totals(self) -> None:
        totals = wire.Totals()
        if self._rank.outgoing is not None and self._server is not None:
            totals.sent_bytes = self._rank.outgoing.payload_bytes
            totals.wire_bytes = self._server.socket_bytes.read()
            backlogged = self._rank.outgoing.backlogged(self._config.max_staged_bytes)
            totals.backlogged.extend(map(name_message, sorted(backlogged, key=str)))
        if self._rank.incoming is not None:
            totals.received_bytes = self._rank.incoming.payload_bytes
            totals.stale_pieces = self._rank.incoming.stale_pieces
        self._reported = time.monotonic()
        if totals != self._sent:
            self._sent = totals
            self._reports.put(wire.Report(totals=totals).SerializeToString())

    def _stop(self) -> None:
        self._ended.set()
        self._reports.put(None)
        self._commands.cancel()
        if self._server is not None:
            self._server.stop(TRANSFER_GRACE)
        self._connections.put(None)
        self._channel.close()
        self._cores.close()
