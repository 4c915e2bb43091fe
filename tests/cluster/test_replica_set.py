"""A front end's view of its replicas: real sessions over gRPC, with replicas that say what the test has them say."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager

import pytest

from cluster.decode_session import DecodeSession
from cluster.engine_client import EngineOverloaded, EngineUnavailable
from cluster.replica_set import ReplicaSet
from worker.config import Role
from worker.events import ClientArrived, ClientGone, Submitted
from worker.replica_record import ReplicaRecord
from worker.request import Client
from worker.session_server import SessionServer
from worker.wire import engine_pb2 as wire

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


SECONDS = 10.0


class Replica:
    """Greets with a load and keeps what it is sent; answers only when it is told."""

    def __init__(self, name: str, **load: int) -> None:
        self.load = {"total_blocks": 100, "free_blocks": 100, "queue_limit": 4} | load
        self.clients: list[Client] = []
        self.submits: list[wire.Submit] = []
        self.gone: list[Client] = []
        self.server = SessionServer(self._take, host="127.0.0.1")
        self.server.start()
        self.record = ReplicaRecord(Role.COLOCATED, name, f"127.0.0.1:{self.server.port}")

    def report(self, **load: int) -> None:
        self.load |= load
        for client in self.clients:
            client.send(wire.EngineMessage(load=wire.Load(**self.load), submits=len(self.submits)))

    def answer(self, submit: wire.Submit, **output: object) -> None:
        fields = {"token_ids": [7], "finish_reason": wire.FINISH_REASON_LENGTH} | output
        self.clients[0].send(wire.EngineMessage(outputs=[wire.Output(request_id=submit.request_id, **fields)]))

    def _take(self, event: object) -> None:
        match event:
            case ClientArrived(client):
                self.clients.append(client)
                self.report()
            case Submitted(_, submit):
                self.submits.append(submit)
            case ClientGone(client):
                self.gone.append(client)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 (what is waited for happens on other threads)
            await asyncio.sleep(0.005)


@asynccontextmanager
async def replica_set(*replicas: Replica) -> AsyncIterator[ReplicaSet]:
    async def live() -> list[ReplicaRecord]:
        return [replica.record for replica in replicas]

    replica_set = ReplicaSet(live, needs_prefill=False)
    replica_set.start()
    try:
        await until(lambda: all(replica.clients for replica in replicas) and replica_set.ready())
        # The greeting of the last is on its way.
        await until(lambda: all(session.usable for session in replica_set._sessions.values()))
        yield replica_set
    finally:
        await replica_set.stop()
        for replica in replicas:
            replica.server.stop(grace=0.0)


class Asking:
    """A request that runs beside the test."""

    def __init__(self, replicas: ReplicaSet, name: str, caller: str = "") -> None:
        self.outputs: list[wire.Output] = []
        submit = wire.Submit(request_id=name, token_ids=[1, 2], prompt_len=2, n=1, caller=caller)
        self.task = asyncio.create_task(self._run(replicas, submit))

    async def _run(self, replicas: ReplicaSet, submit: wire.Submit) -> None:
        async for outputs in replicas.generate(submit):
            self.outputs += outputs


@asynccontextmanager
async def asked(replicas: ReplicaSet, *names: str, caller: str = "") -> AsyncIterator[list[Asking]]:
    asking = [Asking(replicas, name, caller) for name in names]
    await asyncio.sleep(0)
    try:
        yield asking
    finally:
        for each in asking:
            each.task.cancel()
        await asyncio.gather(*(each.task for each in asking), return_exceptions=True)


@contextmanager
def overloaded(retry_after: float):
    with pytest.raises(EngineOverloaded, match="--max-waiting-requests") as refusal:
        yield
    assert refusal.value.retry_after == retry_after


async def test_a_front_end_refuses_by_itself_when_all_replicas_are_full() -> None:
    first, second = Replica("a"), Replica("b")
    async with replica_set(first, second) as replicas:
        replicas.require_room("")
        first.report(waiting_requests=4, queue_ms_per_request=2000)
        await until(lambda: replicas._sessions["a"].load.waiting_requests == 4)
        # The other one has room, and is where the next request goes.
        async with asked(replicas, "r"):
            await until(lambda: bool(second.submits))
        second.report(waiting_requests=5, queue_ms_per_request=700)
        await until(lambda: not _has_room(replicas))
        with overloaded(3.5):
            replicas.require_room("")
        with overloaded(3.5):
            await anext(replicas.generate(wire.Submit(request_id="late", token_ids=[1], prompt_len=1, n=1)))
        first.report(waiting_requests=3)
        await until(lambda: _has_room(replicas))
        assert not first.submits


async def test_what_was_sent_and_is_not_reported_yet_counts() -> None:
    replica = Replica("a", queue_limit=3)
    async with replica_set(replica) as replicas, asked(replicas, *"abc"):
        with overloaded(0.0):
            replicas.require_room("")
        await until(lambda: len(replica.submits) == 3)
        # The report counts all three: one waits, two were taken.
        replica.report(waiting_requests=1)
        await until(lambda: _has_room(replicas))
        async with asked(replicas, "d"):
            replicas.require_room("")
            async with asked(replicas, "e"):
                with overloaded(0.0):
                    replicas.require_room("")


async def test_a_queue_that_is_full_of_one_callers_requests_is_not_full_for_another() -> None:
    replica = Replica("a", queue_limit=3)
    async with AsyncExitStack() as stack:
        replicas = await stack.enter_async_context(replica_set(replica))
        (flood, *_) = await stack.enter_async_context(asked(replicas, *"abc", caller="flood"))
        await until(lambda: len(replica.submits) == 3)
        replica.report(waiting_requests=3)
        with overloaded(0.0):
            replicas.require_room("flood")
        replicas.require_room("small")
        await stack.enter_async_context(asked(replicas, "d", caller="small"))
        await until(lambda: len(replica.submits) == 4)
        # A second one of three would have two of the flood's give way.
        with overloaded(0.0):
            replicas.require_room("flood")
        replica.answer(replica.submits[0])
        await until(flood.task.done)
        with overloaded(0.0):
            replicas.require_room("small")


async def test_a_draining_replica_is_not_chosen_and_keeps_what_it_has() -> None:
    first, second = Replica("a"), Replica("b")
    async with replica_set(first, second) as replicas, asked(replicas, "r0", "r1") as asking:
        await until(lambda: bool(first.submits and second.submits))
        first.report(draining=True)
        await until(lambda: not replicas._sessions["a"].accepting)
        async with asked(replicas, "r2", "r3"):
            await until(lambda: len(second.submits) == 3)
            first.answer(first.submits[0])
            await until(lambda: sum(each.task.done() for each in asking) == 1)
            assert len(first.submits) == 1
        second.report(draining=True)
        await until(lambda: not replicas.ready())


async def test_what_a_replica_refuses_because_it_ends_goes_elsewhere() -> None:
    first, second = Replica("a"), Replica("b")
    async with replica_set(first, second) as replicas, asked(replicas, "r") as (asking,):
        await until(lambda: bool(first.submits or second.submits))
        old, new = (first, second) if first.submits else (second, first)
        error = wire.Error(kind=wire.ERROR_KIND_UNAVAILABLE, message="it ends")
        old.answer(old.submits[0], token_ids=[], finish_reason=wire.FINISH_REASON_ERROR, error=error)
        await until(lambda: bool(new.submits))
        new.answer(new.submits[0])
        await until(asking.task.done)
        assert [list(output.token_ids) for output in asking.outputs] == [[7]]


async def test_a_request_waits_for_a_replica_that_is_about_to_come() -> None:
    first, second = Replica("a"), Replica("b")
    known = [first.record]

    async def live() -> list[ReplicaRecord]:
        return known

    replicas = ReplicaSet(live, needs_prefill=False)
    replicas.start()
    try:
        await until(replicas.ready)
        first.report(draining=True)
        await until(lambda: not replicas.ready())
        async with asked(replicas, "r") as (asking,):
            known.append(second.record)
            await until(lambda: bool(second.submits))
            second.answer(second.submits[0])
            await until(asking.task.done)
        assert not first.submits
    finally:
        await replicas.stop()
        for replica in (first, second):
            replica.server.stop(grace=0.0)


async def test_a_replica_that_the_directory_forgets_is_there_until_it_says_that_it_goes() -> None:
    """A directory that was lost and made anew knows a replica only when that has found it."""
    replica = Replica("a")
    known, departed = [replica.record], set()

    async def live() -> list[ReplicaRecord]:
        return list(known)

    replicas = ReplicaSet(live, lambda: departed, needs_prefill=False, patience=0.2)
    replicas.start()
    try:
        await until(replicas.ready)
        known.clear()
        replicas._update(await live())
        async with asked(replicas, "r") as (asking,):
            await until(lambda: bool(replica.submits))
            departed.add("a")
            replicas._update(await live())
            with pytest.raises(EngineUnavailable, match="no decode replica"):
                await anext(replicas.generate(wire.Submit(request_id="late", token_ids=[1], prompt_len=1, n=1)))
            replica.answer(replica.submits[0])
            await until(asking.task.done)
            assert [list(output.token_ids) for output in asking.outputs] == [[7]]
        replicas._update(await live())
        assert not replicas._sessions
    finally:
        await replicas.stop()
        replica.server.stop(grace=0.0)


async def test_a_front_end_that_does_not_run_for_a_while_is_given_up_and_asks_again() -> None:
    """As if it had been stopped: its replica is not taken for one that died, although nobody else is there."""
    replica = Replica("a")
    async with replica_set(replica) as replicas, asked(replicas, "r") as (asking,):
        await until(lambda: len(replica.submits) == 1)
        # It beats, so it is listened for.
        await until(lambda: any(client._silence is not None for client in replica.server._servicer._clients))
        assert not replica.gone
        asleep_until = time.monotonic() + SECONDS
        while not replica.gone:
            time.sleep(0.01)  # noqa: ASYNC251 (that is the point)
            assert time.monotonic() < asleep_until
        assert replica.gone == replica.clients[:1]
        await until(lambda: len(replica.submits) == 2)
        replica.clients[-1].send(wire.EngineMessage(outputs=[_last_output(replica.submits[1])]))
        await until(asking.task.done)
        assert [list(output.token_ids) for output in asking.outputs] == [[7]]
    assert replica.gone.count(replica.clients[0]) == 1


async def test_an_older_front_end_that_never_beats_is_not_taken_for_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DecodeSession, "beat", lambda self: None)
    replica = Replica("a")
    async with replica_set(replica) as replicas, asked(replicas, "r"):
        await until(lambda: bool(replica.submits))
        (client,) = replica.server._servicer._clients
        assert not any(client.look(100.0 + 0.1 * look) for look in range(100))


async def test_an_older_replica_that_reports_no_limit_is_asked() -> None:
    async with replica_set(Replica("a", queue_limit=0, waiting_requests=50)) as replicas:
        replicas.require_room("")


async def test_without_a_replica_nobody_says_that_it_is_full() -> None:
    async with _nobody() as replicas:
        replicas.require_room("")
        with pytest.raises(EngineUnavailable):
            await anext(replicas.generate(wire.Submit(request_id="r", token_ids=[1], prompt_len=1, n=1)))


@asynccontextmanager
async def _nobody() -> AsyncIterator[ReplicaSet]:
    async def live() -> list[ReplicaRecord]:
        return []

    replicas = ReplicaSet(live, needs_prefill=False, patience=0.2)
    replicas.start()
    try:
        yield replicas
    finally:
        await replicas.stop()


def _last_output(submit: wire.Submit) -> wire.Output:
    return wire.Output(request_id=submit.request_id, token_ids=[7], finish_reason=wire.FINISH_REASON_LENGTH)


def _has_room(replicas: ReplicaSet) -> bool:
    try:
        replicas.require_room("")
    except EngineOverloaded:
        return False
    return True
