"""The decode replicas of a cluster as one engine: follows the directory, keeps sessions, routes requests.

One per front end, on its event loop, for its whole life. It implements ``EngineClient``.
"""

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import aclosing

import grpc
from prometheus_client import CollectorRegistry

from cluster.decode_session import STATUS_SECONDS, DecodeSession, ReplicaLost
from cluster.engine_client import (
    EngineOverloaded,
    EngineTimeout,
    EngineUnavailable,
    PoisonRequest,
    Retry,
    nobody_asks,
)
from cluster.placement_metrics import PlacementMetrics
from cluster.router import REQUEST_COST_TOKENS, PrefixIndex, Target, choose
from cluster.transcript import Transcript
from kv_transfer.cluster_token import ClusterToken, metadata_of
from kv_transfer.heartbeat import BEAT_SECONDS, LOOK_SECONDS, SILENCE_SECONDS
from worker.config import Role
from worker.replica_record import ReplicaRecord
from worker.wire import engine_pb2 as wire
from worker.wire import engine_pb2_grpc

log = logging.getLogger(__name__)

POLL_SECONDS = 0.5
PLACE_POLL_SECONDS = 0.05
PATIENCE_SECONDS = 5.0
"""How long a request waits for a replica that takes something new: its successor may be about to start."""
LOSS_PATIENCE_SECONDS = 60.0
"""The same for one that has lost its replica: as long as starting another may take."""
MAX_PLACEMENTS = 10
"""How many replicas one request is given to, one after the other, as they go away."""
MAX_DEATHS = 2
"""How many of them may die with it. It might be what kills them."""
ASLEEP_SECONDS = SILENCE_SECONDS - 2 * BEAT_SECONDS
"""A front end that has not run for so long may be taken for one that was stopped."""
WAKING_SECONDS = 5.0
"""After that it may still lose sessions for having been silent."""
LATENESS_SECONDS = 2.0
"""Replicas keep deadlines by themselves; this is how much later it is done for one that does not."""


class _SentAway(Exception):
    """The replica is going away; another can go on."""


class _NoRoom(Exception):
    """The replica's queue is full; it may be asked again in ``seconds``."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds


class ReplicaSet:
    """See the module. ``live`` asks the directory, which then knows who ``departed`` in an orderly way. Replicas want
    to see ``token``.

    A request without a deadline has ``request_timeout`` seconds.
    """

    def __init__(
        self,
        live: Callable[[], Awaitable[Sequence[ReplicaRecord]]],
        departed: Callable[[], AbstractSet[str]] = frozenset,
        *,
        needs_prefill: bool,
        token: ClusterToken | None = None,
        patience: float = PATIENCE_SECONDS,
        request_timeout: float = 600.0,
        metrics: PlacementMetrics | None = None,
    ) -> None:
        self._live = live
        self._departed = departed
        self._needs_prefill = needs_prefill
        self._token = token
        self._patience = patience
        self._request_timeout = request_timeout
        self._metrics = metrics or PlacementMetrics(CollectorRegistry())
        self._sessions: dict[str, DecodeSession] = {}
        self._left: AbstractSet[str] = frozenset()
        self._prefill: dict[str, ReplicaRecord] = {}
        self._lost: set[str] = set()
        self._index = PrefixIndex()
        self._tasks: list[asyncio.Task[None]] = []
        self._woken = -math.inf

    def start(self) -> None:
        """Begin to follow the directory, to listen for replicas that fall silent, and not to be silent."""
        self._tasks = [asyncio.create_task(each()) for each in (self._follow, self._listen, self._beat)]

    async def stop(self) -> None:
        """Close every session."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*(session.close() for session in self._sessions.values()))
        self._sessions.clear()

    def ready(self) -> bool:
        """Whether a request could be served now."""
        return any(
            session.load.prefill_peers > 0 or not self._needs_prefill for session in self._usable(frozenset()).values()
        )

    async def generate(
        self, submit: wire.Submit, placed: Callable[[str], None] = nobody_asks
    ) -> AsyncGenerator[list[wire.Output], None]:
        """See ``EngineClient``. What loses its replica goes on with another, behind the token that came last."""
        transcript = Transcript(submit)
        deadline = asyncio.get_running_loop().time() + (submit.timeout_ms / 1e3 or self._request_timeout)
        avoided: set[str] = set()
        deaths = 0
        for placement in range(MAX_PLACEMENTS):
            session = await self._place(transcript, avoided, deadline, again=placement > 0)
            name = session.record.incarnation
            placed(name)
            try:
                async with aclosing(self._run(session, transcript, deadline)) as messages:
                    async for outputs in messages:
                        yield outputs
                return
            except ReplicaLost as lost:
                log.warning("%s has lost %s: %s", submit.request_id, name, lost)
                if self._has_just_woken():
                    self._metrics.retried(Retry.LOST)
                    continue
                avoided.add(name)
                deaths += 1
                if deaths == MAX_DEATHS:
                    raise PoisonRequest(
                        f"{deaths} replicas died while they had this request; it is not given to another one"
                    ) from None
                self._metrics.retried(Retry.LOST)
            except _SentAway as reason:
                log.info("%s goes from %s to another replica: %s", submit.request_id, name, reason)
                avoided.add(name)
                self._metrics.retried(Retry.SENT_AWAY)
            except _NoRoom as reason:
                self._metrics.retried(Retry.NO_ROOM)
                await asyncio.sleep(reason.seconds)
        raise EngineUnavailable(f"{MAX_PLACEMENTS} replicas were asked, and none could serve this request to its end")

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
        found = [reply for reply in replies if isinstance(reply, wire.StatusReply)]
        self._metrics.reports_missing(len(replies) - len(found))
        return found

    async def _run(
        self, session: DecodeSession, transcript: Transcript, deadline: float
    ) -> AsyncGenerator[list[wire.Output], None]:
        """What one replica makes of what is left of a request, until every choice has ended."""
        left = max(1, math.ceil((deadline - asyncio.get_running_loop().time()) * 1e3))
        submits = transcript.submissions(left)
        resumed = transcript.begun
        call = session.submit(submits)
        session.open_requests += 1
        try:
            while transcript.open_choices > 0:
                try:
                    async with asyncio.timeout_at(deadline + LATENESS_SECONDS):
                        outputs = await call.take()
                except TimeoutError:
                    raise EngineTimeout("the request's deadline has passed, and its replica does not say so") from None
                error = next((o.error for o in outputs if o.finish_reason == wire.FINISH_REASON_ERROR), None)
                if error is None:
                    transcript.take(outputs)
                    yield outputs
                elif error.kind == wire.ERROR_KIND_UNAVAILABLE:
                    raise _SentAway(error.message)
                elif error.kind == wire.ERROR_KIND_OVERLOADED and resumed:
                    # The client has half of its answer: it is worth a wait.
                    raise _NoRoom(error.retry_after_ms / 1e3)
                else:
                    # An error ends the request, whatever its number of choices.
                    if error.kind not in (wire.ERROR_KIND_INVALID, wire.ERROR_KIND_OVERLOADED):
                        name = session.record.incarnation
                        log.warning("%s failed on %s: %s", submits[0].request_id, name, error.reason)
                    yield outputs
                    return
        finally:
            session.open_requests -= 1
            for one in submits:
                session.end(one.request_id, abort=transcript.open_choices > 0)

    def _usable(self, avoided: AbstractSet[str]) -> dict[str, DecodeSession]:
        """Replicas that take requests: one that has left the directory only goes on with those that it has.

        One that the directory does not know, and that never said it would go, is late with its report, or the directory
        is a new one: the session tells whether it lives.
        """
        names = self._sessions.keys() - self._left - avoided
        return {name: session for name, session in self._sessions.items() if session.accepting and name in names}

    async def _place(
        self, transcript: Transcript, avoided: AbstractSet[str], deadline: float, *, again: bool
    ) -> DecodeSession:
        """The replica to ask. If there is none, one may be about to come; for a request that is placed ``again`` it may
        take longer. Raises ``EngineUnavailable``, and for a request that has had none ``EngineOverloaded``.
        """
        clock = asyncio.get_running_loop().time
        until = min(deadline, clock() + (LOSS_PATIENCE_SECONDS if again else self._patience))
        while not (usable := self._usable(avoided)):
            if clock() >= until:
                raise EngineUnavailable("no decode replica is there")
            await asyncio.sleep(PLACE_POLL_SECONDS)
        submit = transcript.submit
        if not again:
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

    async def _listen(self) -> None:
        clock = asyncio.get_running_loop().time
        looked = clock()
        while True:
            now = clock()
            if now - looked > ASLEEP_SECONDS:
                log.warning("this front end did not run for %.1f s; replicas may have given it up", now - looked)
                self._woken = now
            looked = now
            for session in self._sessions.values():
                session.look(now)
            self._count_lost()
            await asyncio.sleep(LOOK_SECONDS)

    def _has_just_woken(self) -> bool:
        """Whether a session that ends has ended because of this front end: its replica is alive, and may be asked."""
        return asyncio.get_running_loop().time() - self._woken < WAKING_SECONDS

    async def _beat(self) -> None:
        while True:
            for session in self._sessions.values():
                session.beat()
            await asyncio.sleep(BEAT_SECONDS)

    def _count_lost(self) -> None:
        """Sessions tell of generating replicas, unless it was this front end that did not run."""
        lost = {name for name, session in self._sessions.items() if session.lost}
        for name in lost - self._lost if not self._has_just_woken() else ():
            log.warning("%s is gone", name)
            self._metrics.lost(self._sessions[name].record.role)
        self._lost = lost

    def _count_lost_prefill(self, found: Mapping[str, ReplicaRecord]) -> None:
        """Of prefill replicas the directory tells."""
        for name, record in self._prefill.items():
            if name not in found and not record.draining and name not in self._departed():
                log.warning("%s is gone", name)
                self._metrics.lost(record.role)

    def _update(self, records: Sequence[ReplicaRecord]) -> None:
        generating = {record.incarnation: record for record in records if record.role is not Role.PREFILL}
        prefill = {record.incarnation: record for record in records if record.role is Role.PREFILL}
        self._count_lost()
        self._count_lost_prefill(prefill)
        self._prefill = prefill
        absent = self._sessions.keys() - generating.keys()
        self._left = absent & (self._left | self._departed())
        for name, session in list(self._sessions.items()):
            gone = name in self._left or (name in absent and not session.usable)
            if session.broken or (gone and session.open_requests == 0):
                del self._sessions[name]
                self._index.forget(name)
                self._closing = asyncio.create_task(session.close())
        for name, record in generating.items():
            if name not in self._sessions:
                self._sessions[name] = DecodeSession(record, self._token)


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
