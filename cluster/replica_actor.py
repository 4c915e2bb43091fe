"""The Ray actor that carries one engine: keeps the directory informed and tells the engine about its peers.

Made by its deployment in the replica's placement group; it lives exactly as long as the engine.
"""

import asyncio
import logging
from dataclasses import replace

import ray

from cluster.directory import HEARTBEAT_SECONDS, DirectoryClient
from cluster.model_store import resolve_model
from cluster.router import PrefillRouter
from worker.config import EngineConfig, Role
from worker.replica_record import ReplicaRecord

log = logging.getLogger(__name__)


class ReplicaActor:
    """See the module. ``model`` and the address ``auto`` are resolved here, since both differ between machines."""

    def __init__(self, config: EngineConfig, model: str, directory: str) -> None:
        # Imported here: supervisors need this class too, but not torch.
        from worker.replica import Replica  # noqa: PLC0415

        logging.basicConfig(level=logging.INFO)
        weights = str(resolve_model(model).weights)
        if config.advertised_host == "auto":
            config = replace(config, advertised_host=ray.util.get_node_ip_address())
        self._directory = DirectoryClient(directory)
        self._replica = Replica(config.with_model(weights), PrefillRouter())

    async def record(self) -> ReplicaRecord:
        """How others reach it."""
        return self._replica.record

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
                    prefill = {r.incarnation: r.kv_address for r in live if r.role is Role.PREFILL and r.kv_address}
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
