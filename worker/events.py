"""What can happen to a generating engine from outside. Immutable; put into its inbox by other threads."""

from collections.abc import Callable
from dataclasses import dataclass

from kv_transfer.transfer import PieceArrived, TransferEnded
from worker.grammar.grammars import GrammarReady
from worker.incoming_transfers import RankReceived
from worker.replica_load import ReplicaLoad
from worker.request import Client
from worker.wire import engine_pb2 as wire


@dataclass(frozen=True, slots=True)
class Submitted:
    """A front end asks for tokens. ``arrived`` is in the engine's clock, seconds: it may have been computing then."""

    client: Client
    submit: wire.Submit
    arrived: float


@dataclass(frozen=True, slots=True)
class Aborted:
    """A front end has lost interest in one request."""

    client: Client
    wire_id: str


@dataclass(frozen=True, slots=True)
class ClientArrived:
    """A session begins."""

    client: Client


@dataclass(frozen=True, slots=True)
class ClientGone:
    """A session has ended, and with it all of its requests."""

    client: Client


@dataclass(frozen=True, slots=True)
class StatusWanted:
    """Someone asks how the engine is; ``reply`` is called on the engine's thread."""

    reply: Callable[[wire.StatusReply], None]


@dataclass(frozen=True, slots=True)
class LoadWanted:
    """Someone asks how much there is to do; ``reply`` is called on the engine's thread."""

    reply: Callable[[ReplicaLoad], None]


@dataclass(frozen=True, slots=True)
class CacheCleared:
    """Forget every cached prefix; ``reply`` is called when it is done."""

    reply: Callable[[], None]


@dataclass(frozen=True, slots=True)
class DrainStarted:
    """Take nothing new; ``drained`` is called, on the engine's thread, once nothing is left."""

    drained: Callable[[], None]


DecodeEvent = (
    Submitted
    | Aborted
    | ClientArrived
    | ClientGone
    | StatusWanted
    | LoadWanted
    | CacheCleared
    | DrainStarted
    | PieceArrived
    | TransferEnded
    | RankReceived
    | GrammarReady
)
