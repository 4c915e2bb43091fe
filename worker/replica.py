"""One replica's engine with everything around it, in one process: model, loop, and the servers that others reach.

Made by the actor that carries a replica, ready when the constructor returns, ended by ``stop``. It knows nothing of
Ray: tests make it in plain processes.
"""

import logging
import uuid
from collections.abc import Mapping
from typing import Any

import torch

from kv_transfer.group_sender import GroupSender
from kv_transfer.pair_group import GroupSettings
from kv_transfer.prefill_server import PrefillServer
from kv_transfer.staging import StagingBudget
from kv_transfer.transport import Transport
from worker.config import EngineConfig, Role
from worker.decode_engine import DecodeEngine
from worker.engine_loop import EngineLoop
from worker.inbox import Inbox
from worker.model_runner import ModelRunner
from worker.prefill_connector import PrefillConnector
from worker.prefill_engine import PrefillEngine
from worker.prefill_selector import PrefillSelector
from worker.replica_record import ReplicaRecord
from worker.session_server import SessionServer

log = logging.getLogger(__name__)

LONGEST_STEP_SECONDS = 120.0
"""A step that takes longer hangs. Loading is over when the loop starts, and chunks bound what one step computes."""


class Unhealthy(Exception):
    """The engine has failed or hangs; only a new process helps."""


class Replica:
    """See the module. ``fill`` is the byte that free KV memory is filled with; tests use a telling one."""

    def __init__(self, config: EngineConfig, selector: PrefillSelector | None = None, *, fill: int = 0) -> None:
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        incarnation = f"{config.role.value}-{uuid.uuid4().hex[:12]}"
        runner = ModelRunner(config, fill=fill)
        inbox: Inbox[Any] = Inbox()
        self._connector: PrefillConnector | None = None
        self._prefill_server: PrefillServer | None = None
        host = config.advertised_host
        group = GroupSettings(host, runner.device) if config.transport is Transport.TORCH else None
        if config.role is Role.PREFILL:
            self._prefill_server = PrefillServer(
                runner.layout,
                incarnation,
                config.max_prefill_streams,
                inbox.put,
                host=host,
                sender=None if group is None else GroupSender(group),
            )
            engine: PrefillEngine | DecodeEngine = PrefillEngine(
                config, runner, incarnation, self._prefill_server.socket_bytes.read
            )
        else:
            staging = StagingBudget(config.max_staged_bytes)
            if config.role is Role.DECODE:
                assert selector is not None, "a decode replica needs a way to choose a prefill replica"
                self._connector = PrefillConnector(
                    runner.layout, incarnation, selector, staging, inbox.put, config.transfer_timeout, group
                )
            engine = DecodeEngine(config, runner, incarnation, self._connector, staging)
        self._loop: EngineLoop[Any] = EngineLoop(engine, inbox)
        self._sessions = SessionServer(inbox.put, host=host)
        self._loop.start()
        self._sessions.start()
        if self._prefill_server is not None:
            self._prefill_server.start()
        kv_port = None if self._prefill_server is None else self._prefill_server.port
        self.record = ReplicaRecord(
            role=config.role,
            incarnation=incarnation,
            session_address=f"{host}:{self._sessions.port}",
            kv_address=None if kv_port is None else f"{host}:{kv_port}",
        )
        log.info("%s serves %d blocks at %s", incarnation, runner.num_blocks, self.record.session_address)

    def use_prefill_replicas(self, replicas: Mapping[str, str]) -> None:
        """Tell a decode replica which prefill replicas exist: incarnation to KV address. Blocks while connecting."""
        if self._connector is not None:
            self._connector.update(replicas)

    def require_health(self) -> None:
        """Raise ``Unhealthy`` if the engine's thread has ended or hangs."""
        if self._loop.failure is not None:
            raise Unhealthy(f"{self.record.incarnation}: the engine failed: {self._loop.failure!r}")
        if self._loop.stalled_for > LONGEST_STEP_SECONDS:
            raise Unhealthy(f"{self.record.incarnation}: one step takes {self._loop.stalled_for:.0f} s")

    def stop(self, grace: float = 1.0) -> None:
        """End everything."""
        self._loop.stop()
        if self._prefill_server is not None:
            self._prefill_server.stop(grace)
        self._sessions.stop(grace)
