"""A front end counts what it loses and what it gives to another replica, over sessions with replicas that fail."""

from contextlib import AsyncExitStack, aclosing

import anyio
import pytest
from prometheus_client import CollectorRegistry

from cluster.engine_client import PoisonRequest
from cluster.placement_metrics import PlacementMetrics
from cluster.replica_set import ReplicaSet
from tests.cluster.scripted_replica import ScriptedReplica
from tests.cluster.test_failover import FULL, LEAVING, request, until
from worker.config import Role
from worker.replica_record import ReplicaRecord

pytestmark = pytest.mark.anyio
SECONDS = 20.0


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class FrontEnd:
    """``listed`` are the replicas that the directory knows."""

    def __init__(self, *replicas: ScriptedReplica) -> None:
        self._registry = CollectorRegistry()
        self.replicas = replicas
        self.listed = [replica.record for replica in replicas]
        self.departed: set[str] = set()
        self.engine = ReplicaSet(
            self._live, lambda: self.departed, needs_prefill=False, metrics=PlacementMetrics(self._registry)
        )

    async def _live(self) -> list[ReplicaRecord]:
        return list(self.listed)

    async def __aenter__(self) -> "FrontEnd":
        self._stack = AsyncExitStack()
        for replica in self.replicas:
            await replica.start()
            self._stack.push_async_callback(replica.stop)
        self.engine.start()
        self._stack.push_async_callback(self.engine.stop)
        with anyio.fail_after(SECONDS):
            await until(lambda: len(self.engine._usable(frozenset())) == len(self.replicas))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def ask(self) -> None:
        async with aclosing(self.engine.generate(request())) as messages:
            async for _ in messages:
                pass

    def retries(self, reason: str) -> float:
        return self._registry.get_sample_value("crosskv_request_retries_total", {"reason": reason})

    def lost(self, role: Role) -> float:
        return self._registry.get_sample_value("crosskv_replicas_lost_total", {"role": role})

    @property
    def reports_missing(self) -> float:
        return self._registry.get_sample_value("crosskv_replica_reports_missing_total")


async def test_a_replica_that_dies_is_lost_once_and_its_request_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    async with FrontEnd(ScriptedReplica("a", steps_sent=2, then="die"), ScriptedReplica("b")) as front_end:
        await front_end.ask()
        assert front_end.retries("lost") == 1
        with anyio.fail_after(SECONDS):
            await until(lambda: front_end.lost(Role.DECODE) == 1)
        front_end.listed.pop(0)
        await until(lambda: "a" not in front_end.engine._sessions)
        assert front_end.lost(Role.DECODE) == 1
    assert "r has lost a" in caplog.text
    assert "a is gone" in caplog.text


async def test_a_replica_that_falls_silent_is_lost_as_often_as_it_does() -> None:
    first = ScriptedReplica("a", steps_sent=2, then="fall silent")
    async with FrontEnd(first, ScriptedReplica("b")) as front_end:
        await front_end.ask()
        await until(lambda: front_end.lost(Role.DECODE) == 1)
        first.silent = False
        await until(lambda: len(front_end.engine._usable(frozenset())) == 2)
        first.silent = True
        await until(lambda: front_end.lost(Role.DECODE) == 2)


async def test_one_that_ends_in_order_is_not_lost() -> None:
    async with FrontEnd(ScriptedReplica("a", steps_sent=2, then=LEAVING), ScriptedReplica("b")) as front_end:
        await front_end.ask()
        assert front_end.retries("sent_away") == 1
        front_end.departed.add("a")
        front_end.listed.pop(0)
        await until(lambda: "a" not in front_end.engine._sessions)
        assert front_end.lost(Role.DECODE) == 0


async def test_poison_and_waiting_for_room_are_counted() -> None:
    dying = [ScriptedReplica(name, steps_sent=3, then="die") for name in "ab"]
    async with FrontEnd(*dying) as front_end:
        with pytest.raises(PoisonRequest):
            await front_end.ask()
        assert front_end.retries("lost") == 1
    full = ScriptedReplica("b", steps_sent=0, then=FULL)
    async with (
        FrontEnd(ScriptedReplica("a", steps_sent=3, then="die"), full) as front_end,
        anyio.create_task_group() as group,
    ):

        async def make_room() -> None:
            await until(lambda: len(full.submits) == 2)
            full._steps_sent = 1000

        group.start_soon(make_room)
        await front_end.ask()
        assert front_end.retries("no_room") == len(full.submits) - 1


async def test_a_prefill_replica_that_disappears_is_lost_unless_it_said_so() -> None:
    async with FrontEnd(ScriptedReplica("d")) as front_end:
        # The last has drained before anybody looked, but ended in order.
        for draining, departed in ((False, set()), (True, set()), (False, {"p"})):
            front_end.departed = departed
            front_end.listed.append(
                ReplicaRecord(Role.PREFILL, "p", "127.0.0.1:1", ("127.0.0.1:1",), draining=draining)
            )
            await until(lambda: "p" in front_end.engine._prefill)
            front_end.listed.pop()
            await until(lambda: "p" not in front_end.engine._prefill)
        assert front_end.lost(Role.PREFILL) == 1


async def test_replicas_that_do_not_report_are_counted() -> None:
    async with FrontEnd(ScriptedReplica("d")) as front_end:
        front_end.listed.append(ReplicaRecord(Role.PREFILL, "p", "127.0.0.1:1", ("127.0.0.1:1",)))
        await until(lambda: "p" in front_end.engine._prefill)
        # The scripted one does not report either.
        assert await front_end.engine.statuses() == []
        assert front_end.reports_missing == 2
