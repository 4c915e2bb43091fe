"""Requests that outlive their decode replica, over real sessions with replicas that fail as they are told."""

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager

import anyio
import pytest

from cluster import replica_set
from cluster.engine_client import EngineTimeout, EngineUnavailable, PoisonRequest
from cluster.replica_set import ReplicaSet
from tests.cluster.scripted_replica import ScriptedReplica
from tests.cluster.test_transcript import steps, texts
from worker.wire import engine_pb2 as wire

pytestmark = pytest.mark.anyio
SECONDS = 20.0
LEAVING = wire.Error(kind=wire.ERROR_KIND_UNAVAILABLE, message="the replica is shutting down")
FULL = wire.Error(kind=wire.ERROR_KIND_OVERLOADED, message="full", retry_after_ms=10)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@asynccontextmanager
async def serving(*replicas: ScriptedReplica) -> AsyncIterator[ReplicaSet]:
    """A front end's view of these replicas, once it can use all."""

    async def live() -> list:
        return [replica.record for replica in replicas]

    async with AsyncExitStack() as stack:
        for replica in replicas:
            await replica.start()
            stack.push_async_callback(replica.stop)
        engine = ReplicaSet(live, needs_prefill=False)
        engine.start()
        stack.push_async_callback(engine.stop)
        with anyio.fail_after(SECONDS):
            await until(lambda: len(engine._usable(frozenset())) == len(replicas))
            yield engine


def request(**fields: object) -> wire.Submit:
    sampling = {"seed": 9, "max_tokens": 12, "min_tokens": 12} | fields.pop("sampling", {})
    settings = {"request_id": "r", "token_ids": [5, 6, 7], "prompt_len": 3, "n": 1} | fields
    return wire.Submit(sampling=wire.Sampling(**sampling), **settings)


async def answer(engine: ReplicaSet, submit: wire.Submit) -> list[wire.Output]:
    async with aclosing(engine.generate(submit)) as messages:
        return [output async for outputs in messages for output in outputs]


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 (what happens elsewhere has no event)
        await anyio.sleep(0.01)


def undisturbed(submit: wire.Submit) -> dict[int, tuple[list[int], list[int]]]:
    return texts([output for step in steps(submit) for output in step])


@pytest.mark.parametrize("then", ["die", LEAVING], ids=["dies", "leaves"])
@pytest.mark.parametrize("sent", [0, 5])
@pytest.mark.parametrize("n", [1, 3])
async def test_another_replica_goes_on(then: object, sent: int, n: int) -> None:
    first, second = ScriptedReplica("a", steps_sent=sent, then=then), ScriptedReplica("b")
    submit = request(n=n)
    async with serving(first, second) as engine:
        outputs = await answer(engine, submit)
    assert texts(outputs) == undisturbed(submit)
    assert len(first.submits) == 1
    assert [(one.n, one.choice, len(one.token_ids)) for one in second.submits] == (
        [(1, choice, 3 + sent) for choice in range(n)] if sent else [(n, 0, 3)]
    )
    assert all(0 < one.timeout_ms <= 600_000 for one in second.submits)


async def test_a_request_that_two_replicas_died_with_is_given_to_no_third() -> None:
    replicas = [ScriptedReplica(name, steps_sent=3, then="die") for name in "abc"]
    async with serving(*replicas) as engine:
        with pytest.raises(PoisonRequest, match="2 replicas died"):
            await answer(engine, request())
    assert sorted(len(replica.submits) for replica in replicas) == [0, 1, 1]


async def test_replicas_that_leave_are_no_suspicion() -> None:
    replicas = [ScriptedReplica(name, steps_sent=2, then=LEAVING) for name in "abc"] + [ScriptedReplica("d")]
    submit = request()
    async with serving(*replicas) as engine:
        assert texts(await answer(engine, submit)) == undisturbed(submit)
    assert [len(replica.submits) for replica in replicas] == [1, 1, 1, 1]


async def test_half_an_answer_waits_for_room_and_a_new_request_does_not() -> None:
    first = ScriptedReplica("a", steps_sent=3, then="die")
    full = ScriptedReplica("b", steps_sent=0, then=FULL)
    submit = request()
    async with serving(full) as engine:
        (refused,) = await answer(engine, submit)
        assert refused.error == FULL
    full = ScriptedReplica("b", steps_sent=0, then=FULL)
    async with serving(first, full) as engine, anyio.create_task_group() as group:

        async def make_room() -> None:
            await until(lambda: len(full.submits) == 2)
            full._steps_sent = 1000

        group.start_soon(make_room)
        assert texts(await answer(engine, submit)) == undisturbed(submit)


async def test_a_replica_that_never_answers_costs_its_request_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_set, "LATENESS_SECONDS", 0.1)
    silent = ScriptedReplica("a", steps_sent=0, then="hang")
    async with serving(silent) as engine:
        with pytest.raises(EngineTimeout):
            await answer(engine, request(timeout_ms=100))
        await until(lambda: bool(silent.aborted))
    assert silent.aborted == ["r"]


async def test_without_any_other_replica_it_waits_for_one_to_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_set, "LOSS_PATIENCE_SECONDS", 0.2)
    lonely = ScriptedReplica("a", steps_sent=3, then="die")
    async with serving(lonely) as engine:
        with pytest.raises(EngineUnavailable, match="no decode replica"):
            await answer(engine, request())


async def test_a_client_that_leaves_aborts_every_choice_that_is_open() -> None:
    first, second = ScriptedReplica("a", steps_sent=3, then="die"), ScriptedReplica("b", steps_sent=2, then="hang")
    async with serving(first, second) as engine:
        async with aclosing(engine.generate(request(n=2))) as messages:
            async for _ in messages:
                if second.submits:
                    break
        await until(lambda: len(second.aborted) == 2)
    assert set(second.aborted) == {"r~2.0", "r~2.1"}


async def test_a_replica_that_falls_silent_is_left_until_it_speaks_again() -> None:
    first, second = ScriptedReplica("a", steps_sent=3, then="fall silent"), ScriptedReplica("b")
    submit = request()
    async with serving(first, second) as engine:
        assert texts(await answer(engine, submit)) == undisturbed(submit)
        assert engine._usable(frozenset()).keys() == {"b"}
        # It is told, for the case that it was only slow.
        await until(lambda: first.aborted == ["r"])
        first.silent = False
        await until(lambda: engine._usable(frozenset()).keys() == {"a", "b"})
