"""The Ray actor that carries one engine: keeps the directory informed and tells the engine about its peers.

Made by its deployment in the replica's placement group; it lives exactly as long as the engine. Of a replica of several
ranks it carries the leading one.
"""

import asyncio
import logging
from typing import TYPE_CHECKING

from cluster.directory import HEARTBEAT_SECONDS, DirectoryClient
from cluster.rank_actor import on_this_machine
from cluster.router import PrefillRouter
from worker.config import EngineConfig, Role

if TYPE_CHECKING:
    from worker.ranks.followers import Followers
    from worker.replica import Replica

log = logging.getLogger(__name__)


class ReplicaActor:
    """See the module. ``model`` and the address ``auto`` are resolved here, since both differ between machines."""

    def __init__(self, config: EngineConfig, model: str, directory: str) -> None:
        logging.basicConfig(level=logging.INFO)
        self._config = on_this_machine(config, model)
        self._directory = DirectoryClient(directory)
        self._followers: Followers | None = None
        self._running: Replica | None = None

    async def lead(self) -> tuple[str, str]:
        """Get ready to lead other ranks: the replica's incarnation, and the address where they join it."""
        # Imported here: supervisors need this class too, but not torch.
        from worker.ranks.followers import Followers  # noqa: PLC0415
        from worker.replica import new_incarnation  # noqa: PLC0415

        ranks, host = self._config.tensor_parallel_size, self._config.advertised_host
        self._followers = Followers(new_incarnation(self._config.role), ranks, host, self._config.token)
        return self._followers.incarnation, self._followers.address

    async def start(self) -> None:
        """Load the model and serve."""
        from worker.replica import Replica  # noqa: PLC0415

        def make() -> Replica:
            return Replica(self._config, PrefillRouter(), self._followers)

        self._running = await asyncio.to_thread(make)

    @property
    def _replica(self) -> "Replica":
        assert self._running is not None, "it was not started"
        return self._running

    async def run(self) -> None:
        """Report to the directory until the engine fails. Never returns otherwise."""
        updating: asyncio.Task[None] | None = None
        while True:
            self._replica.require_health()
            try:
                live = await self._directory.report(self._replica.record)
            except Exception:
                log.exception("the replica directory does not answer")
            else:
                if updating is None or updating.done():
                    if updating is not None:
                        # A bug there must end the replica, not leave it without peers.
                        updating.result()
                    prefill = {r.incarnation: r.kv_addresses for r in live if r.role is Role.PREFILL}
                    # Connecting may take seconds; heartbeats must not wait for it.
                    updating = asyncio.create_task(asyncio.to_thread(self._replica.use_prefill_replicas, prefill))
            await asyncio.sleep(HEARTBEAT_SECONDS)

    async def require_health(self) -> None:
        """Raise if only a new process helps."""
        self._replica.require_health()

    async def stop(self) -> None:
        """End in an orderly way."""
        await self._directory.remove(self._replica.record.incarnation)
        await asyncio.to_thread(self._replica.stop)
