"""Replicas on virtual time: the real engines, ranks and connections, with a turn of the loop as an event.

A turn is what ``worker.engine_loop`` does once: take what is in the inbox, then step. A killed replica takes no further
turn, and all that it knew is gone.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from cluster.router import PrefillRouter
from kv_transfer.outgoing_stream import OutgoingStream
from kv_transfer.prefill_server import RankStream, TransferName
from kv_transfer.staging import StagingBudget
from kv_transfer.transfer import PieceArrived, TransferEnded
from tests.simulation.network import Caller, Endpoint, Network, SimulatedPeer
from tests.simulation.shadow_model import ModelShape, ShadowRunner
from worker.config import EngineConfig, Role
from worker.decode_engine import DecodeEngine
from worker.incoming_transfers import IncomingTransfers, RankReceived
from worker.outgoing_transfers import OutgoingTransfers
from worker.prefill_connector import PrefillConnector
from worker.prefill_engine import PrefillEngine
from worker.prefill_peers import PrefillPeers
from worker.ranks.commands import Command, Compute, ConnectPeer, ForgetPeer
from worker.ranks.followers import Totals
from worker.ranks.rank import Rank
from worker.ranks.team import RankTeam
from worker.wire import engine_pb2 as wire

SHORTEST_POLL = 0.01
LONGEST_POLL = 0.25
"""An engine that can do nothing looks again after these. What the real loop does every few milliseconds is done ever
less often here, since only time changes."""


@dataclass(frozen=True, slots=True)
class ReplicaPlan:
    """How a replica is started, again and again."""

    config: EngineConfig
    shape: ModelShape
    num_blocks: int
    step_seconds: float
    prefix_tokens: tuple[int, ...]


class Loop:
    """Stands for an ``EngineLoop`` and its inbox. ``stopped_until``: the process was stopped by a signal."""

    def __init__(self, engine: DecodeEngine | PrefillEngine, network: Network, step_seconds: float, rest: Any) -> None:
        self._engine: Any = engine
        self._time = network.time
        self._random = network.random
        self._step_seconds = step_seconds
        self._rest: Callable[[], None] = rest
        self._inbox: list[Any] = []
        self._next = float("inf")
        self._free_from = 0.0
        self._poll = SHORTEST_POLL
        self.alive = True
        self.turns = 0

    def put(self, event: Any) -> None:
        """From any thread."""
        if self.alive:
            self._inbox.append(event)
            self._wake(self._time.now + 0.001)

    def pause(self, seconds: float) -> None:
        """It is stopped, or its step takes that long."""
        self._free_from = max(self._free_from, self._time.now + seconds)
        self._wake(self._free_from)

    def _wake(self, when: float) -> None:
        when = max(when, self._free_from)
        if when < self._next:
            self._next = when
            self._time.at(when, partial(self._turn, when))

    def _turn(self, planned: float) -> None:
        if not self.alive or planned != self._next:
            return
        now = self._time.now
        self._next = float("inf")
        if now < self._free_from:
            self._wake(self._free_from)
            return
        self.turns += 1
        events, self._inbox = self._inbox, []
        for event in events:
            self._engine.handle(event, now)
        worked = self._engine.step(now)
        if worked:
            self._free_from = now + self._step_seconds * self._random.uniform(0.5, 1.5)
        self._poll = SHORTEST_POLL if worked or events else min(LONGEST_POLL, self._poll * 2)
        if self._engine.idle:
            self._rest()
        else:
            self._wake(now + self._poll)
        if self._inbox:
            self._wake(now)


class SimulatedFollowers:
    """Stands for ``Followers``: ranks that carry out commands in order, each in its own time.

    A step's collectives make all meet: a ``Compute`` is carried out at once, behind all that came before it.
    """

    def __init__(self, ranks: list[Rank], network: Network, leader: ShadowRunner) -> None:
        self._ranks = ranks
        self._network = network
        self._leader = leader
        self._queues: list[deque[Any]] = [deque() for _ in ranks]
        self.peers: list[PrefillPeers] = []
        self.received: Callable[[RankReceived], None] = lambda received: None
        self.alive = True

    @property
    def count(self) -> int:
        return len(self._ranks)

    def put(self, index: int, event: Any) -> None:
        """A command, or what arrives on a rank's own streams."""
        self._queues[index].append(event)
        if isinstance(event, Compute):
            self._work(index)
        else:
            self._network.time.after(self._network.delay(), partial(self._work, index))

    def send(self, command: Command) -> None:
        if isinstance(command, ForgetPeer):
            for peers in self.peers:
                peers.forget(command.incarnation)
            return
        for index in range(len(self._ranks)):
            self.put(index, command)

    @contextmanager
    def connecting(self, command: ConnectPeer) -> Iterator[Callable[[], int]]:
        yield lambda: min(peers.connect(command) for peers in self.peers)

    def totals(self) -> Totals:
        sent = [rank.outgoing for rank in self._ranks if rank.outgoing is not None]
        backlogged = [name for outgoing in sent for name in outgoing.backlogged(64)]
        got = [rank.incoming for rank in self._ranks if rank.incoming is not None]
        return Totals(
            sent_bytes=sum(outgoing.payload_bytes for outgoing in sent),
            received_bytes=sum(incoming.payload_bytes for incoming in got),
            stale_pieces=sum(incoming.stale_pieces for incoming in got),
            backlogged=frozenset(backlogged),
        )

    def require_agreement(self) -> None:
        """All ranks have read the same in the last step, as their sums would tell."""
        for rank in self._ranks:
            assert rank.runner.words == self._leader.words, "a rank has read something else than the leading one"  # type: ignore[attr-defined]

    def _work(self, index: int) -> None:
        events, rank = self._queues[index], self._ranks[index]
        while events and self.alive:
            match event := events.popleft():
                case RankStream():
                    assert rank.outgoing is not None
                    rank.outgoing.attach(event)
                case PieceArrived():
                    assert rank.incoming is not None
                    rank.incoming.take(event)
                case TransferEnded():
                    assert rank.incoming is not None
                    rank.incoming.end(event)
                case _:
                    rank.apply(event)
        for received in rank.incoming.take_ended() if rank.incoming is not None else ():
            self._network.time.after(self._network.delay(), partial(self.received, received))


class _Team(RankTeam):
    """Compares what the ranks of a replica have read."""

    def __init__(self, rank: Rank, followers: SimulatedFollowers, peers: PrefillPeers | None = None) -> None:
        super().__init__(rank, followers, peers)  # type: ignore[arg-type]
        self._checked = followers

    def apply(self, command: Command) -> Any:
        logits = super().apply(command)
        if isinstance(command, Compute):
            self._checked.require_agreement()
        return logits


class DecodeReplica:
    """A decode replica in one of its lives."""

    def __init__(self, plan: ReplicaPlan, incarnation: str, network: Network) -> None:
        config, self.incarnation, self._network = plan.config, incarnation, network
        runner = ShadowRunner(config, plan.shape, plan.num_blocks, plan.prefix_tokens)
        self.runner = runner
        self.cache = runner.cache
        ranks = config.tensor_parallel_size
        self._callers = [Caller(config.max_staged_bytes) for _ in range(ranks)]
        self._staging = [StagingBudget(config.max_staged_bytes) for _ in range(ranks)]
        peers = [
            PrefillPeers(
                runner.layout,
                incarnation,
                self._staging[rank],
                partial(self._deliver, rank),
                rank=rank,
                ranks=ranks,
                make_peer=partial(SimulatedPeer, network, self._callers[rank]),  # type: ignore[arg-type]
            )
            for rank in range(ranks)
        ]
        runners = [runner, *(ShadowRunner(config, plan.shape, plan.num_blocks, leader=runner) for _ in range(1, ranks))]
        made = [
            Rank(each, incoming=IncomingTransfers(each, peers[rank], self._staging[rank], rank))  # type: ignore[arg-type]
            for rank, each in enumerate(runners)
        ]
        self._followers = SimulatedFollowers(made[1:], network, runner)
        self._ranks = made
        self._followers.peers = peers[1:]
        leader = made[0]
        team = RankTeam(leader, None, peers[0]) if ranks == 1 else _Team(leader, self._followers, peers[0])
        self.connector = PrefillConnector(team, PrefillRouter(), config.transfer_timeout)
        self._known: frozenset[str] = frozenset()
        self.engine = DecodeEngine(
            config,
            runner,  # type: ignore[arg-type]
            team,
            incarnation,
            self.connector,
            clock=lambda: network.time.now,
        )
        self.loop = Loop(self.engine, network, plan.step_seconds, self.cache.require_rest)
        self._followers.received = self.loop.put

    def follow(self, replicas: Mapping[str, tuple[str, ...]]) -> None:
        """What the directory says about prefill replicas has come."""
        if self.loop.alive:
            self._known = frozenset(replicas)
            self.connector.update(replicas)

    def kill(self) -> None:
        """The process and all of its ranks are gone."""
        self.loop.alive = self._followers.alive = False
        for caller in self._callers:
            caller.die()

    def require_rest(self) -> None:
        """With no request left it holds nothing: no block, no promise, no staged byte, no stream."""
        assert self.engine.idle, f"{self.incarnation} still has requests: {self.engine.load()}"
        self.cache.require_rest()
        for rank, staging in enumerate(self._staging):
            assert staging.used == 0, f"{staging.used} staged bytes of rank {rank} of {self.incarnation} are lost"
        for caller in self._callers:
            assert all(stream.closed for stream in caller.streams), "a stream has not ended"
        credit = self.connector.credit(self._network.time.now + 100.0)
        granted = sum(
            endpoint.max_streams
            for endpoint in self._network.endpoints.values()
            if endpoint.rank == 0 and endpoint.incarnation in self._known
        )
        assert credit.streams == granted, f"{credit.streams} streams of {granted} are left to {self.incarnation}"
        links = self.connector._links.values()
        assert all(link.outstanding_tokens == 0 for link in links), "a transfer that is over still counts"
        assert not self.engine._requests, f"{self.incarnation} remembers {list(self.engine._requests)}"
        assert all(rank.incoming is not None and not rank.incoming._live for rank in self._ranks), "a manifest is left"

    def status(self) -> wire.StatusReply:
        return self.engine.status()

    def _deliver(self, rank: int, event: Any) -> None:
        if rank == 0:
            self.loop.put(event)
        else:
            self._followers.put(rank - 1, event)


class PrefillReplica:
    """A prefill replica in one of its lives, reachable under an address per rank."""

    def __init__(self, plan: ReplicaPlan, incarnation: str, network: Network) -> None:
        config, self.incarnation, self._network = plan.config, incarnation, network
        runner = ShadowRunner(config, plan.shape, plan.num_blocks, plan.prefix_tokens)
        self.cache = runner.cache
        self.runner = runner
        ranks = config.tensor_parallel_size
        runners = [runner, *(ShadowRunner(config, plan.shape, plan.num_blocks, leader=runner) for _ in range(1, ranks))]
        made = [
            Rank(
                each,  # type: ignore[arg-type]
                outgoing=OutgoingTransfers(
                    each,  # type: ignore[arg-type]
                    rank,
                    ranks,
                    min_piece_bytes=config.min_piece_bytes,
                    max_piece_bytes=config.max_piece_bytes,
                    clock=lambda: network.time.now,
                ),
            )
            for rank, each in enumerate(runners)
        ]
        self._ranks = made
        self._followers = SimulatedFollowers(made[1:], network, runner)
        team = RankTeam(made[0]) if ranks == 1 else _Team(made[0], self._followers)
        self.engine = PrefillEngine(
            config,
            runner,  # type: ignore[arg-type]
            team,
            incarnation,
            lambda: 0,
            clock=lambda: network.time.now,
        )
        self.loop = Loop(self.engine, network, plan.step_seconds, self.cache.require_rest)
        self.addresses = tuple(f"{incarnation}:{rank}" for rank in range(ranks))
        for rank, address in enumerate(self.addresses):
            accept = self.loop.put if rank == 0 else partial(self._followers.put, rank - 1)
            network.endpoints[address] = Endpoint(
                incarnation, runner.layout, rank, ranks, config.max_prefill_streams, accept
            )

    def kill(self) -> None:
        """The process and all of its ranks are gone."""
        self.loop.alive = self._followers.alive = False
        for address in self.addresses:
            self._network.kill(address)

    def require_rest(self) -> None:
        """With no prompt left it holds no block, and nothing that it would still send."""
        assert self.engine.idle, f"{self.incarnation} still has prompts: {self.engine.load()}"
        self.cache.require_rest()
        assert not self.engine._jobs, f"{self.incarnation} remembers {list(self.engine._jobs)}"
        for rank in self._ranks:
            assert rank.outgoing is not None
            # Whatever was not taken is forgotten after its time, with the next stream that comes.
            rank.outgoing.attach(RankStream(TransferName("", "", 0), 0, OutgoingStream()))
            assert not rank.outgoing.backlogged(-1), "a transfer that is over is still open"

    def status(self) -> wire.StatusReply:
        return self.engine.status()


Replica = DecodeReplica | PrefillReplica


def start(plan: ReplicaPlan, incarnation: str, network: Network) -> Replica:
    """A new life."""
    kind = PrefillReplica if plan.config.role is Role.PREFILL else DecodeReplica
    return kind(plan, incarnation, network)
