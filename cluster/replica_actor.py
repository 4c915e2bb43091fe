"""The Ray actor that carries one engine: keeps the directory informed and tells the engine about its peers.

Made by its deployment in the replica's placement group; it lives exactly as long as the engine. Of a replica of several
ranks it carries the leading one. It ends in an orderly way when its supervisor says so, or on SIGTERM.
"""

import asyncio
import logging
import sys
import threading
import time
from dataclasses import replace
from enum import Enum, auto
from typing import TYPE_CHECKING

from cluster.demand import demand
from cluster.directory import HEARTBEAT_SECONDS, DirectoryClient
from cluster.garbage import made_to_stay
from cluster.model_store import resolve_model
from cluster.rank_actor import give_way, on_sigterm, on_this_machine
from cluster.router import PrefillRouter
from cluster.text.vocabulary import vocabulary_of
from worker.config import EngineConfig, Role
from worker.grammar.vocabulary import Vocabulary
from worker.replica_load import ReplicaLoad

if TYPE_CHECKING:
    from worker.ranks.followers import Followers
    from worker.replica import Replica
    from worker.replica_record import ReplicaRecord

log = logging.getLogger(__name__)

TRANSFER_GRACE = 2.0
"""Seconds that decode replicas have at least to take what is computed when a prefill replica ends."""
LOAD_SECONDS = 5.0
"""What an engine that does not say its load meanwhile said last is what is reported."""


class _Life(Enum):
    """What the actor does with its replica, one after the other."""

    SERVING = auto()
    DRAINING = auto()
    ENDING = auto()
    ENDED = auto()


class ReplicaActor:
    """See the module. ``model`` and the address ``auto`` are resolved here, since both differ between machines.

    It has no coroutines: only then does Ray make an actor in the main thread, where SIGTERM is heard. What waits, waits
    on an event loop beside it.
    """

    def __init__(self, config: EngineConfig, model: str, directory: str) -> None:
        logging.basicConfig(level=logging.INFO)
        self._config = on_this_machine(config, model)
        self._model = model
        self._directory = directory
        self._followers: Followers | None = None
        self._service: ReplicaService | None = None
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="replica", daemon=True).start()
        on_sigterm(self._told_to_end)

    def lead(self) -> tuple[str, str]:
        """Get ready to lead other ranks: the replica's incarnation, and the address where they join it."""
        # Imported here: supervisors need this class too, but not torch.
        from worker.ranks.followers import Followers  # noqa: PLC0415
        from worker.replica import new_incarnation  # noqa: PLC0415

        ranks, host = self._config.tensor_parallel_size, self._config.advertised_host
        self._followers = Followers(new_incarnation(self._config.role), ranks, host, self._config.token)
        return self._followers.incarnation, self._followers.address

    def start(self) -> None:
        """Load the model and serve."""

        def vocabulary() -> Vocabulary:
            return vocabulary_of(resolve_model(self._model).tokenizer)

        with made_to_stay():
            from worker.replica import Replica  # noqa: PLC0415

            give_way(self._config)
            replica = Replica(self._config, PrefillRouter(), self._followers, vocabulary)
        self._service = ReplicaService(
            replica, self._followers, DirectoryClient(self._directory), self._config.drain_seconds
        )

    def run(self) -> None:
        """Report to the directory until the replica is stopped. Raises when the engine has failed."""
        asyncio.run_coroutine_threadsafe(self._started.run(), self._loop).result()

    def beat(self) -> None:
        """Return: this process runs."""

    def demand(self) -> float:
        """What this replica adds to the load by which its role is scaled."""
        return self._started.demand()

    def require_health(self) -> None:
        """Raise if only a new process helps."""
        self._started.replica.require_health()

    def stop(self) -> None:
        """Take nothing new, finish what was taken, and end; what then is left can be continued elsewhere."""
        asyncio.run_coroutine_threadsafe(self._started.stop(), self._loop).result()

    @property
    def _started(self) -> "ReplicaService":
        assert self._service is not None, "it was not started"
        return self._service

    def _told_to_end(self) -> None:
        if self._service is None:
            sys.exit("told to end before it served")
        self._loop.call_soon_threadsafe(self._service.begin_to_end)


class ReplicaService:
    """A replica from the moment it serves: known to the directory, told about its peers, drained in the end.

    Everything but ``demand`` runs on one event loop.
    """

    def __init__(
        self, replica: "Replica", followers: "Followers | None", directory: DirectoryClient, drain_seconds: float
    ) -> None:
        self.replica = replica
        self._followers = followers
        self._directory = directory
        self._drain_seconds = drain_seconds
        self._life = _Life.SERVING
        self._load = ReplicaLoad()
        self._live: list[ReplicaRecord] = []
        self._end: asyncio.Task[None] | None = None

    @property
    def _record(self) -> "ReplicaRecord":
        return replace(self.replica.record, draining=self._life is not _Life.SERVING, load=self._load)

    def demand(self) -> float:
        """See ``ReplicaActor.demand``."""
        return demand(self._record, self._live)

    async def run(self) -> None:
        """See ``ReplicaActor.run``."""
        await asyncio.gather(self._report(), self._measure())

    async def _measure(self) -> None:
        """Keep up with what the engine is asked for; heartbeats must not wait for its answers."""
        while self._life is _Life.SERVING:
            load = await asyncio.to_thread(self.replica.load, LOAD_SECONDS)
            self._load = load or self._load
            await asyncio.sleep(HEARTBEAT_SECONDS)

    async def _report(self) -> None:
        updating: asyncio.Task[None] | None = None
        while self._life is not _Life.ENDED:
            self.replica.require_health()
            if self._followers is not None and self._followers.leaving:
                self.begin_to_end()
            try:
                live = self._live = await self._directory.report(self._record)
            except Exception:
                log.exception("the replica directory does not answer")
            else:
                if self._life is not _Life.ENDING and (updating is None or updating.done()):
                    if updating is not None:
                        # A bug there must end the replica, not leave it without peers.
                        updating.result()
                    prefill = {r.incarnation: r.kv_addresses for r in live if r.role is Role.PREFILL}
                    draining = {r.incarnation for r in live if r.draining}
                    # Connecting may take seconds; heartbeats must not wait for it.
                    updating = asyncio.create_task(
                        asyncio.to_thread(self.replica.use_prefill_replicas, prefill, draining)
                    )
            await asyncio.sleep(HEARTBEAT_SECONDS)

    async def stop(self) -> None:
        """See ``ReplicaActor.stop``."""
        await self.begin_to_end()

    def begin_to_end(self) -> asyncio.Task[None]:
        """Begin to stop, once, whoever is the first to say so."""
        if self._end is None:
            self._end = asyncio.create_task(self._finish())
        return self._end

    async def _finish(self) -> None:
        deadline = time.monotonic() + self._drain_seconds
        self._life = _Life.DRAINING
        try:
            await self._directory.report(self._record)
        except Exception:
            log.exception("the replica directory does not answer; the replica itself says that it is draining")
        if not await asyncio.to_thread(self.replica.drain, self._drain_seconds):
            log.warning("requests are left after %.0f s; they end here", self._drain_seconds)
        self._life = _Life.ENDING
        grace = max(TRANSFER_GRACE, deadline - time.monotonic())
        await asyncio.to_thread(self.replica.stop, transfer_grace=grace)
        self._life = _Life.ENDED
        await self._directory.remove(self.replica.record.incarnation)
