"""One replica's engine with everything around it, in one process: model, loop, and the servers that others reach.

Made by the actor that carries a replica, ready when the constructor returns, ended by ``stop``. It knows nothing of
Ray: tests make it in plain processes.
"""

import logging
import queue
import threading
import time
import uuid
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Any

import torch

from kv_transfer.group_sender import GroupSender
from kv_transfer.pair_group import GroupSettings
from kv_transfer.prefill_server import PrefillServer
from kv_transfer.staging import StagingBudget
from kv_transfer.strangers import Strangers
from kv_transfer.transport import Transport
from worker.config import EngineConfig, Role
from worker.cores import Cores
from worker.decode_engine import DecodeEngine
from worker.dtype import choose_device
from worker.engine_loop import EngineLoop
from worker.events import DrainStarted, LoadWanted
from worker.grammar.grammars import Grammars
from worker.grammar.vocabulary import VocabularySource
from worker.heap import keep_freed_memory
from worker.inbox import Inbox
from worker.incoming_transfers import IncomingTransfers
from worker.model_runner import ModelRunner, load_model_runner
from worker.outgoing_transfers import OutgoingTransfers
from worker.prefill_connector import PrefillConnector
from worker.prefill_engine import PrefillEngine
from worker.prefill_peers import PrefillPeers
from worker.prefill_selector import PrefillSelector
from worker.ranks.followers import Followers
from worker.ranks.process_group import TorchRankGroup
from worker.ranks.rank import Rank
from worker.ranks.rank_group import SOLO, RankGroup
from worker.ranks.team import RankTeam
from worker.replica_load import ReplicaLoad
from worker.replica_record import ReplicaRecord
from worker.session_server import SessionServer
from worker.watchdog import Watchdog

log = logging.getLogger(__name__)


class Unhealthy(Exception):
    """The engine has failed or hangs; only a new process helps."""


class Replica:
    """See the module. ``fill`` is the byte that free KV memory is filled with; tests use a telling one.

    Of a replica of several ranks this is the leading one. ``followers`` is where the others join; it was made before,
    because they need its address, and ends with the replica. Without a ``vocabulary`` it refuses grammars.
    """

    def __init__(
        self,
        config: EngineConfig,
        selector: PrefillSelector | None = None,
        followers: Followers | None = None,
        vocabulary: VocabularySource | None = None,
        *,
        fill: int = 0,
    ) -> None:
        keep_freed_memory()
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        incarnation = new_incarnation(config.role) if followers is None else followers.incarnation
        self._strangers = Strangers() if followers is None else followers.strangers
        self._followers = followers
        self._step_timeout = config.step_timeout
        self._cores = Cores.claim(config.threads or 1) if config.bind_cores else Cores()
        runner = load_model_runner(config, _rank_group(config, followers), self._cores, fill=fill)
        inbox: Inbox[Any] = Inbox()
        self._inbox = inbox
        self._connector: PrefillConnector | None = None
        self._prefill_server: PrefillServer | None = None
        grammars = None if vocabulary is None else Grammars(vocabulary, runner.model.vocab_size, inbox.put)
        engine: PrefillEngine | DecodeEngine
        match config.role:
            case Role.PREFILL:
                engine = self._prefill_engine(config, runner, incarnation, inbox)
            case Role.DECODE:
                assert selector is not None, "a decode replica needs a way to choose a prefill replica"
                engine = self._decode_engine(config, runner, incarnation, inbox, selector, grammars)
            case Role.COLOCATED:
                team = RankTeam(Rank(runner), followers)
                engine = DecodeEngine(config, runner, team, incarnation, grammars=grammars)
        if followers is not None:
            followers.wait(runner.num_blocks, inbox.put)
        self._loop: EngineLoop[Any] = EngineLoop(engine, inbox, self._cores)
        host = config.advertised_host
        self._sessions = SessionServer(inbox.put, host=host, token=config.token, strangers=self._strangers)
        self._loop.start()
        self._sessions.start()
        kv_addresses: tuple[str, ...] = ()
        if self._prefill_server is not None:
            self._prefill_server.start()
            others = followers.kv_addresses if followers is not None else ()
            kv_addresses = (f"{host}:{self._prefill_server.port}", *others)
        self.record = ReplicaRecord(
            role=config.role,
            incarnation=incarnation,
            session_address=f"{host}:{self._sessions.port}",
            kv_addresses=kv_addresses,
        )
        self._watchdog = Watchdog(self._look, self._hang_up)
        self._watchdog.start()
        log.info("%s serves %d blocks at %s", incarnation, runner.num_blocks, self.record.session_address)

    def _prefill_engine(
        self, config: EngineConfig, runner: ModelRunner, incarnation: str, inbox: Inbox[Any]
    ) -> PrefillEngine:
        group, ranks = _pair_settings(config, runner), config.tensor_parallel_size
        self._prefill_server = PrefillServer(
            runner.layout,
            incarnation,
            config.max_prefill_streams,
            inbox.put,
            host=config.advertised_host,
            sender=None if group is None else GroupSender(group),
            ranks=ranks,
            token=config.token,
            strangers=self._strangers,
            max_prompt_tokens=runner.max_model_len - 1,
        )
        outgoing = OutgoingTransfers(
            runner,
            0,
            ranks,
            min_piece_bytes=config.min_piece_bytes,
            max_piece_bytes=config.max_piece_bytes,
            staged=runner.pages.staged,
        )
        team = RankTeam(Rank(runner, outgoing=outgoing), self._followers)
        return PrefillEngine(config, runner, team, incarnation, self._prefill_server.socket_bytes.read)

    def _decode_engine(
        self,
        config: EngineConfig,
        runner: ModelRunner,
        incarnation: str,
        inbox: Inbox[Any],
        selector: PrefillSelector,
        grammars: Grammars | None,
    ) -> DecodeEngine:
        group, staging = _pair_settings(config, runner), StagingBudget(config.max_staged_bytes)
        peers = PrefillPeers(
            runner.layout,
            incarnation,
            staging,
            inbox.put,
            ranks=config.tensor_parallel_size,
            group=group,
            token=config.token,
        )
        incoming = IncomingTransfers(runner, peers, staging)
        team = RankTeam(Rank(runner, incoming=incoming), self._followers, peers)
        self._connector = PrefillConnector(team, selector, config.transfer_timeout)
        return DecodeEngine(config, runner, team, incarnation, self._connector, grammars)

    def use_prefill_replicas(
        self, replicas: Mapping[str, tuple[str, ...]], draining: AbstractSet[str] = frozenset()
    ) -> None:
        """Tell a decode replica which prefill replicas exist: incarnation to KV addresses. Blocks while connecting.

        Those of ``draining`` finish what they were asked for and are asked for nothing new.
        """
        if self._connector is not None:
            self._connector.update(replicas, draining)

    def drain(self, seconds: float) -> bool:
        """Take nothing new and wait until nothing is left, but no longer than ``seconds``; whether that is so."""
        drained = threading.Event()
        self._inbox.put(DrainStarted(drained.set))
        return drained.wait(seconds)

    def load(self, seconds: float) -> ReplicaLoad | None:
        """What it is asked for now; None if its engine, busy with a step, does not say so within ``seconds``."""
        answer: queue.SimpleQueue[ReplicaLoad] = queue.SimpleQueue()
        self._inbox.put(LoadWanted(answer.put))
        try:
            return answer.get(timeout=seconds)
        except queue.Empty:
            return None

    def require_health(self) -> None:
        """Raise ``Unhealthy`` if the engine's thread has ended or hangs, or a rank is lost."""
        problem = self._problem()
        if problem is not None:
            raise Unhealthy(problem)

    def _problem(self) -> str | None:
        """Why only a new process helps, if so. Loading is over when anybody asks; chunks bound what a step computes."""
        problem: str | None = None
        if self._loop.failure is not None:
            problem = f"the engine failed: {self._loop.failure!r}"
        elif self._loop.stalled_for > self._step_timeout:
            problem = f"one step takes {self._loop.stalled_for:.0f} s (--step-timeout)"
        elif self._followers is not None:
            problem = self._followers.lost
        return None if problem is None else f"{self.record.incarnation}: {problem}"

    def _look(self) -> str | None:
        if self._followers is not None:
            self._followers.look(time.monotonic())
        return self._problem()

    def _hang_up(self, problem: str) -> None:
        """Let everybody who waits for this replica turn to another, whatever the engine's thread is doing."""
        self._sessions.hang_up(problem)
        if self._prefill_server is not None:
            self._prefill_server.hang_up()

    def stop(self, grace: float = 1.0, transfer_grace: float | None = None) -> None:
        """End everything. What is computed and not yet taken has ``transfer_grace`` seconds (``grace`` if None)."""
        self._watchdog.stop()
        self._loop.stop()
        if self._prefill_server is not None:
            self._prefill_server.stop(grace if transfer_grace is None else transfer_grace)
        self._sessions.stop(grace)
        if self._followers is not None:
            self._followers.stop()
        self._cores.close()


def new_incarnation(role: Role) -> str:
    """A name that no replica had before."""
    return f"{role.value}-{uuid.uuid4().hex[:12]}"


def _rank_group(config: EngineConfig, followers: Followers | None) -> RankGroup:
    """The leading rank's side of the replica's process group. Raises ``RankLost``."""
    ranks = config.tensor_parallel_size
    if followers is None:
        assert ranks == 1, f"{ranks} ranks, and no place where they join"
        return SOLO
    return TorchRankGroup(followers.store, 0, ranks, choose_device(config.device), config.advertised_host)


def _pair_settings(config: EngineConfig, runner: ModelRunner) -> GroupSettings | None:
    """How payloads travel between replicas, if not in gRPC streams."""
    return GroupSettings(config.advertised_host, runner.device) if config.transport is Transport.TORCH else None
