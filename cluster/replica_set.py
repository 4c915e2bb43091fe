"""The decode replicas of a cluster as one engine: follows the directory, keeps sessions, routes requests.

One per front end, on its event loop, for its whole life. It implements ``EngineClient``.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

import grpc

from cluster.decode_session import STATUS_SECONDS, DecodeSession
from cluster.engine_client import EngineOverloaded, EngineUnavailable
from cluster.router import REQUEST_COST_TOKENS, PrefixIndex, Target, choose
from kv_transfer.cluster_token import ClusterToken, metadata_of
from worker.config import Role
from worker.replica_record import ReplicaRecord
from worker.wire import engine_pb2 as wire
from worker.wire import engine_pb2_grpc

log = logging.getLogger(__name__)

POLL_SECONDS = 0.5
PLACE_POLL_SECONDS = 0.05
PATIENCE_SECONDS = 5.0
"""How long a request waits for a replica that takes something new: its successor may be about to start."""
MAX_PLACEMENTS = 3
"""How many replicas a request is offered to before its client is told that none is there."""


class ReplicaSet:
    """See the module. ``live`` asks the directory. ``token`` is what replicas want to see."""

    def __init__(
        self,
        live: Callable[[], Awaitable[Sequence[ReplicaRecord]]],
        *,
        needs_prefill: bool,
        token: ClusterToken | None = None,
        patience: float = PATIENCE_SECONDS,
    ) -> None:
        self._live = live
        self._needs_prefill = needs_prefill
        self._token = token
        self._patience = patience
        self._sessions: dict[str, DecodeSession] = {}
        self._prefill: dict[str, ReplicaRecord] = {}
        self._index = PrefixIndex()
        self._follower: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to follow the directory."""
        self._follower = asyncio.create_task(self._follow())

    async def stop(self) -> None:
        """Close every session."""
        if self._follower is not None:
            self._follower.cancel()
        await asyncio.gather(*(session.close() for session in self._sessions.values()))
        self._sessions.clear()

    def ready(self) -> bool:
        """Whether a request could be served now."""
        return any(
            session.accepting and (session.load.prefill_peers > 0 or not self._needs_prefill)
            for session in self._sessions.values()
        )

    async def generate(self, submit: wire.Submit) -> AsyncGenerator[list[wire.Output], None]:
        """See ``EngineClient``. A replica that vanishes before its first output is replaced by another."""
        tried: set[str] = set()
        for _ in range(MAX_PLACEMENTS):
            session = await self._patiently_place(submit, tried)
            tried.add(session.record.incarnation)
            started = False
            try:
                async for outputs in self._run(session, submit):
                    started = True
                    yield outputs
                return
            except EngineUnavailable:
                if started:
                    raise
        raise EngineUnavailable(f"{MAX_PLACEMENTS} decode replicas vanished while they held this request")

    def require_room(self, caller: str) -> None:
        """See ``EngineClient``."""
        usable = [session for session in self._sessions.values() if session.accepting]
        if usable and all(session.full_for(caller) for session in usable):
            raise EngineOverloaded(
                "every replica's queue is full (--max-waiting-requests)",
                min(session.retry_after for session in usable),
            )

    async def statuses(self) -> list[wire.StatusReply]:
        """Every replica's report, prefill replicas included; those that do not answer are left out."""
        decode = [session.status() for session in self._sessions.values() if session.usable]
        prefill = [_status(record, self._token) for record in self._prefill.values()]
        replies = await asyncio.gather(*decode, *prefill, return_exceptions=True)
        return [reply for reply in replies if isinstance(reply, wire.StatusReply)]

    async def _run(self, session: DecodeSession, submit: wire.Submit) -> AsyncGenerator[list[wire.Output], None]:
        call = session.submit(submit)
        session.open_requests += 1
        open_choices = max(1, submit.n)
        try:
            while open_choices > 0:
                outputs = await call.take()
                for output in outputs:
                    if output.error.kind == wire.ERROR_KIND_UNAVAILABLE:
                        raise EngineUnavailable(output.error.message)
                    if output.finish_reason == wire.FINISH_REASON_ERROR:
                        # An error ends the request, whatever its number of choices.
                        open_choices = 0
                    elif output.finish_reason != wire.FINISH_REASON_UNSPECIFIED:
                        open_choices -= 1
                yield outputs
        finally:
            session.open_requests -= 1
            session.end(submit.request_id, abort=open_choices > 0)

    async def _patiently_place(self, submit: wire.Submit, tried: set[str]) -> DecodeSession:
        patience = asyncio.get_running_loop().time() + self._patience
        while True:
            try:
                return self._place(submit, tried)
            except EngineUnavailable:
                if asyncio.get_running_loop().time() > patience:
                    raise
            await asyncio.sleep(PLACE_POLL_SECONDS)

    def _place(self, submit: wire.Submit, tried: set[str]) -> DecodeSession:
        usable = {name: session for name, session in self._sessions.items() if session.accepting and name not in tried}
        if not usable:
            raise EngineUnavailable("no decode replica is there")
        self.require_room(submit.caller)
        roomy = {name: session for name, session in usable.items() if not session.full_for(submit.caller)} or usable
        targets = [_target(name, session, len(submit.token_ids)) for name, session in roomy.items()]
        return usable[choose(targets, self._index, submit.token_ids, submit.cache_salt)]

    async def _follow(self) -> None:
        while True:
            try:
                self._update(await self._live())
            except Exception:
                # Without a directory the known replicas are still there; their sessions tell when they are not.
                log.exception("the replica directory does not answer")
            await asyncio.sleep(POLL_SECONDS)

    def _update(self, records: Sequence[ReplicaRecord]) -> None:
        generating = {record.incarnation: record for record in records if record.role is not Role.PREFILL}
        self._prefill = {record.incarnation: record for record in records if record.role is Role.PREFILL}
        for name, session in list(self._sessions.items()):
            if session.broken or name not in generating:
                del self._sessions[name]
                self._index.forget(name)
                self._closing = asyncio.create_task(session.close())
        for name in generating.keys() - self._sessions.keys():
            self._sessions[name] = DecodeSession(generating[name], self._token)


def _target(name: str, session: DecodeSession, tokens: int) -> Target:
    """Requests that we opened are known at once; the replica's own report also counts other front ends' requests."""
    load = session.load
    reported = load.running_requests + load.waiting_requests + load.receiving_requests
    blocks_per_request = (load.total_blocks - load.free_blocks - load.cached_blocks) / max(1, reported)
    return Target(
        name,
        cost=max(reported, session.open_requests) * REQUEST_COST_TOKENS,
        room=load.free_blocks + load.cached_blocks >= max(1.0, blocks_per_request) and tokens > 0,
    )


async def _status(record: ReplicaRecord, token: ClusterToken | None) -> wire.StatusReply:
    async with grpc.aio.insecure_channel(record.session_address) as channel:
        stub = engine_pb2_grpc.EngineStub(channel)  # type: ignore[no-untyped-call]
        reply: wire.StatusReply = await stub.Status(
            wire.StatusRequest(), timeout=STATUS_SECONDS, metadata=metadata_of(token)
        )
        return reply
