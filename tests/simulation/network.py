"""The network between replicas: connections, calls, and streams of frames that may break in every way.

It stands for gRPC and for nothing else: what goes in at one end comes out at the other, or the wrong thing does. Frames
of a stream keep their order, as gRPC's do, and streams overtake each other. Beyond what gRPC does, pieces are lost,
come twice, and come when nobody wants them any more.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from random import Random
from threading import Event

import grpc

from kv_transfer.frame import EndFrame, Frame, PieceFrame
from kv_transfer.layout import CacheLayout
from kv_transfer.outgoing_stream import OutgoingStream, StreamFailure
from kv_transfer.pair_group import GroupSettings
from kv_transfer.prefill_server import CallRefused, PrefillJob, RankStream, parse_call
from kv_transfer.rank_pair import RankPair, pair_layout
from kv_transfer.staging import StagingBudget
from kv_transfer.transfer import PieceArrived, Transfer, TransferEnded, TransferEvent
from kv_transfer.wire import kv_transfer_pb2 as wire
from tests.simulation.virtual_time import Trace, VirtualTime

NOTICED_SECONDS = 0.15
"""By then an end knows that the other is gone, if its system says so."""


@dataclass(frozen=True, slots=True)
class Faults:
    """Chances: of a frame to be late, of a stream to break, hang, lose a piece or bring one twice, of a full server."""

    slow: float = 0.0
    cut: float = 0.0
    hang: float = 0.0
    lose: float = 0.0
    repeat: float = 0.0
    linger: float = 0.0
    """Of what is under way of a cancelled stream to come all the same."""
    mute: float = 0.0
    """Of a stream's end not to be told."""
    busy: float = 0.0
    unreachable: float = 0.0


CALM = Faults()


@dataclass(slots=True)
class NetworkCounts:
    """What really happened."""

    streams: int = 0
    pieces: int = 0
    slow: int = 0
    cut: int = 0
    hung: int = 0
    lost: int = 0
    repeated: int = 0
    lingered: int = 0
    muted: int = 0
    refused: int = 0


class Unreachable(grpc.RpcError):
    """Nobody answers a handshake."""

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.UNAVAILABLE


@dataclass(eq=False, slots=True)
class Endpoint:
    """One prefill rank as others reach it."""

    incarnation: str
    layout: CacheLayout
    rank: int
    ranks: int
    max_streams: int
    accept: Callable[[PrefillJob | RankStream], None]
    streams: list["SimulatedStream"] = field(default_factory=list)


class Network:
    """All addresses. ``faults`` apply to what begins from then on."""

    def __init__(self, time: VirtualTime, random: Random) -> None:
        self.time = time
        self.random = random
        self.trace: Trace | None = None
        self.faults = CALM
        self.counts = NetworkCounts()
        self.endpoints: dict[str, Endpoint] = {}

    def delay(self) -> float:
        """Of one message, in seconds; of a few of them much more."""
        if self.faults.slow and self.random.random() < self.faults.slow:
            self.counts.slow += 1
            return self.random.uniform(0.02, 0.4)
        return self.random.uniform(0.0002, 0.003)

    def noticed(self) -> float:
        """Seconds until an end knows that the other is gone."""
        return self.random.uniform(0.0, NOTICED_SECONDS)

    def chance(self, probability: float) -> bool:
        """Whether something with that chance happens now."""
        return probability > 0 and self.random.random() < probability

    def kill(self, address: str) -> None:
        """The process behind an address is gone."""
        endpoint = self.endpoints.pop(address)
        for stream in endpoint.streams:
            stream.cut(f"{address} is gone")

    def open_streams(self) -> list["SimulatedStream"]:
        """Those that have not ended at both ends."""
        return [s for endpoint in self.endpoints.values() for s in endpoint.streams if not s.over]


class SimulatedPeer:
    """Stands for a ``PrefillPeer``: a decode rank's connection to a prefill rank."""

    def __init__(
        self,
        network: Network,
        host: "Caller",
        address: str,
        layout: CacheLayout,
        own_incarnation: str,
        staging: StagingBudget,
        group: GroupSettings | None,
        pair: RankPair,
        token: object = None,
    ) -> None:
        del own_incarnation, group, token
        self.address = address
        self.pair = pair
        self.passing = pair_layout(layout, pair)
        self.incarnation = ""
        self.max_streams = 0
        self.silent = False
        self._network = network
        self._host = host
        self._staging = staging
        self._streams: list[SimulatedStream] = []

    def connect(self) -> None:
        endpoint = self._network.endpoints.get(self.address)
        if endpoint is None:
            raise Unreachable
        self.incarnation, self.max_streams = endpoint.incarnation, endpoint.max_streams

    def open(self, request: wire.PrefillRequest, deliver: Callable[[TransferEvent], None], timeout: float) -> Transfer:
        request.receiver, request.receivers = self.pair.receiver, self.pair.receivers
        stream = SimulatedStream(self._network, self.address, self._host, self._staging)
        transfer = Transfer(
            request.request_id,
            request.epoch,
            self.pair.sender,
            None,  # type: ignore[arg-type]
            deliver,
            stream.abandoned,
        )
        stream.transfer = transfer
        self._host.streams.append(stream)
        self._network.counts.streams += 1
        time = self._network.time
        time.after(timeout, stream.expired)
        time.after(self._network.delay(), partial(self._call, request, stream))
        return transfer

    def close(self) -> None:
        for stream in self._host.streams:
            if stream.address == self.address:
                stream.cut("the channel was closed")

    def _call(self, request: wire.PrefillRequest, stream: "SimulatedStream") -> None:
        """The call reaches the server, or does not."""
        network = self._network
        endpoint = network.endpoints.get(self.address)
        if stream.closed or stream.cancelled:
            return
        if endpoint is None or network.chance(network.faults.unreachable):
            network.counts.refused += 1
            stream.fail(grpc.StatusCode.UNAVAILABLE, "nobody is there")
            return
        if network.chance(network.faults.busy):
            network.counts.refused += 1
            stream.fail(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many calls")
            return
        try:
            event = parse_call(
                request,
                stream,
                endpoint.layout,
                endpoint.incarnation,
                endpoint.rank,
                endpoint.ranks,
                arrived=network.time.now,
            )
        except CallRefused as refusal:
            stream.fail(refusal.code, refusal.message)
            return
        endpoint.streams.append(stream)
        endpoint.accept(event)


@dataclass(eq=False, slots=True)
class Caller:
    """A decode rank: what it has called, and whether it still lives. It stages up to ``staged_bytes``."""

    staged_bytes: int
    alive: bool = True
    streams: list["SimulatedStream"] = field(default_factory=list)

    def die(self) -> None:
        """Its prefill replicas notice in a while."""
        self.alive = False
        for stream in self.streams:
            stream.cut("the caller is gone")


class SimulatedStream(OutgoingStream):
    """Both ends of one call. The prefill engine puts frames; the decode engine gets events.

    ``closed``: the decode side has had its last event. ``cancelled``: the prefill side knows that nobody listens.
    """

    def __init__(self, network: Network, address: str, host: Caller, staging: StagingBudget) -> None:
        super().__init__()
        self.address = address
        self.transfer: Transfer
        self.closed = False
        self._network = network
        self._host = host
        self._staging = staging
        self._under_way: deque[Frame | StreamFailure] = deque()
        self._ready = 0.0
        self._moving = False
        self._bytes = 0
        self._ended = False
        faults, random = network.faults, network.random
        self._breaks_after = random.randrange(6) if network.chance(faults.cut) else -1
        self._hangs_after = random.randrange(6) if network.chance(faults.hang) else -1
        self._loses = random.randrange(4) if network.chance(faults.lose) else -1
        self._mute = network.chance(faults.mute)
        self._hung = False
        self._put = 0

    # The prefill side

    @property
    def queued_bytes(self) -> int:
        return self._bytes

    @property
    def over(self) -> bool:
        """Whether neither end waits for the other."""
        return self.closed and (self._ended or self.cancelled)

    def put(self, frame: Frame) -> None:
        if self.cancelled or self._hung:
            return
        network = self._network
        number, self._put = self._put, self._put + 1
        if number == self._hangs_after:
            network.counts.hung += 1
            self._hung = True
            return
        if number == self._breaks_after:
            network.counts.cut += 1
            self.cut("the connection broke")
            return
        if isinstance(frame, EndFrame):
            self._ended = True
        elif number == self._loses:
            network.counts.lost += 1
            return
        self._enqueue(frame)

    def fail(self, code: grpc.StatusCode, message: str) -> None:
        self._ended = True
        if not self._hung:
            self._enqueue(StreamFailure(code, message))

    def cancel(self) -> None:
        self._cancelled.set()

    # Between

    def _enqueue(self, frame: Frame | StreamFailure) -> None:
        if isinstance(frame, PieceFrame):
            self._bytes += frame.payload.nbytes
        self._ready = max(self._ready, self._network.time.now + self._network.delay())
        self._under_way.append(frame)
        if not self._moving:
            self._moving = True
            self._network.time.at(self._ready, self._arrive)

    def _arrive(self) -> None:
        """The first frame that is under way has come; its reader takes it as soon as there is room."""
        self._moving = False
        if not self._under_way:
            return
        frame = self._under_way[0]
        waits = self._host.alive and not self.closed and isinstance(frame, PieceFrame) and not self._has_room(frame)
        if waits:
            self._moving = True
            self._network.time.after(0.003, self._arrive)
            return
        self._under_way.popleft()
        if isinstance(frame, PieceFrame):
            self._bytes -= frame.payload.nbytes
        self._take(frame)
        if self._under_way:
            self._moving = True
            self._network.time.after(self._network.delay(), self._arrive)

    def cut(self, why: str) -> None:
        """Both ends are told that the other is gone, each in its own time; what was under way is lost."""
        network = self._network
        self._hung = True
        self._under_way.clear()
        if not self.closed:
            network.time.after(network.noticed(), partial(self._close, None, f"UNAVAILABLE: {why}"))
        if not self.cancelled:
            network.time.after(network.noticed(), self.cancel)

    def expired(self) -> None:
        """The call's own deadline has passed, which both ends know by themselves."""
        self._close(None, "DEADLINE_EXCEEDED")
        self.cancel()

    # The decode side

    def abandoned(self, transfer: Transfer) -> None:
        """The decode engine has cancelled. Some of what is under way may be in its inbox already."""
        network = self._network
        if network.chance(network.faults.linger):
            for frame in self._under_way:
                if isinstance(frame, PieceFrame):
                    network.counts.lingered += 1
                    network.time.after(network.random.expovariate(50.0), partial(self._deliver_piece, frame))
        self._under_way.clear()
        self._bytes = 0
        if not self._hung:
            network.time.after(network.delay(), self.cancel)
        network.time.after(network.delay(), partial(self._close, None, "CANCELLED"))

    def _take(self, frame: Frame | StreamFailure) -> None:
        network = self._network
        match frame:
            case PieceFrame():
                if self.closed:
                    return
                network.counts.pieces += 1
                self._deliver_piece(frame)
                if network.chance(network.faults.repeat):
                    network.counts.repeated += 1
                    again = network.random.choice((0.0, network.random.expovariate(20.0)))
                    network.time.after(again, partial(self._deliver_piece, frame))
            case EndFrame():
                self._close(frame, "")
            case StreamFailure():
                busy = frame.code is grpc.StatusCode.RESOURCE_EXHAUSTED
                self._close(None, f"{frame.code.name}: {frame.message}", busy=busy)

    def _deliver_piece(self, frame: PieceFrame) -> None:
        if self._host.alive and self._has_room(frame):
            self._staging.reserve(frame.payload.nbytes, Event())
            self.transfer.deliver(PieceArrived(self.transfer.request_id, frame, self.transfer.sender))

    def _has_room(self, frame: PieceFrame) -> bool:
        used = self._staging.used
        return used == 0 or used + frame.payload.nbytes <= self._host.staged_bytes

    def _close(self, end: EndFrame | None, error: str, busy: bool = False) -> None:
        if self.closed:
            return
        self.closed = True
        if self._network.trace is not None:
            self._network.trace(f"{self._name} ends: {error or 'complete'}")
        if self._mute:
            self._network.counts.muted += 1
        elif self._host.alive:
            transfer = self.transfer
            transfer.deliver(TransferEnded(transfer.request_id, transfer.epoch, end, error, busy, transfer.sender))

    @property
    def _name(self) -> str:
        return f"stream {self.transfer.request_id}#{self.transfer.epoch} from {self.address}"
