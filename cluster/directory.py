"""The replica directory: which replicas live, and how to reach them.

A small named actor. Replicas report to it twice a second, so an entry that is not renewed is a dead or stopped process.
It holds nothing that its callers do not know: if it is lost, the next report makes a new one.
"""

import asyncio
import time
from dataclasses import dataclass, replace

import ray

from cluster.siblings import FrontEndReport
from worker.replica_record import ReplicaRecord

NAME = "crosskv-directory"
ON_HEAD = {"node:__internal_head__": 0.001}
"""Ray's resource of its head: what is there is not lost with any other node, and without the head nothing works."""
HEARTBEAT_SECONDS = 0.5
EXPIRY_SECONDS = 5.0
"""Long enough for a busy machine to be late; a replica that died is noticed by its broken connections at once."""

ANSWER_SECONDS = 5.0
DEPARTED_SECONDS = 60.0
"""For so long it is known of a replica that it was not lost."""


@dataclass(frozen=True, slots=True)
class Listing:
    """The live replicas that a directory knows. A new directory's is not ``complete``: some may not have reported.

    ``departed`` are incarnations that ended in an orderly way of late.
    """

    records: tuple[ReplicaRecord, ...]
    complete: bool
    departed: frozenset[str] = frozenset()


class Directory:
    """The actor's content."""

    def __init__(self) -> None:
        self._complete_from = time.monotonic() + EXPIRY_SECONDS
        self._records: dict[str, tuple[ReplicaRecord, float]] = {}
        self._departed: dict[str, float] = {}
        self._front_ends: dict[str, tuple[FrontEndReport, float]] = {}

    def report(self, record: ReplicaRecord) -> Listing:
        """Renew one replica's entry; returns every live one."""
        self._records[record.incarnation] = (record, time.monotonic())
        return self.live()

    def remove(self, incarnation: str) -> None:
        """A replica ends in an orderly way."""
        self._records.pop(incarnation, None)
        self._departed[incarnation] = time.monotonic()

    def live(self) -> Listing:
        """Every replica that reported within ``EXPIRY_SECONDS``."""
        now = time.monotonic()
        self._records = {name: entry for name, entry in self._records.items() if now - entry[1] < EXPIRY_SECONDS}
        self._departed = {name: at for name, at in self._departed.items() if now - at < DEPARTED_SECONDS}
        records = tuple(record for record, _ in self._records.values())
        return Listing(records, now >= self._complete_from, frozenset(self._departed))

    def exchange(self, report: FrontEndReport) -> tuple[FrontEndReport, ...]:
        """Take one front end's report; returns those of all, with numbers of those at its address."""
        now = time.monotonic()
        self._front_ends[report.name] = (report, now)
        self._front_ends = {k: entry for k, entry in self._front_ends.items() if now - entry[1] < EXPIRY_SECONDS}
        return tuple(
            each if each.address == report.address else replace(each, metrics="")
            for each, _ in self._front_ends.values()
        )

    def remove_front_end(self, name: str) -> None:
        """A front end ends in an orderly way."""
        self._front_ends.pop(name, None)


class DirectoryClient:
    """One process's way to the directory: finds it or makes it, and does so again when it is lost.

    Raises ``TimeoutError`` when it does not answer.
    """

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace
        self._actor: ray.actor.ActorHandle | None = None
        self._known: dict[str, ReplicaRecord] = {}
        self._departed: frozenset[str] = frozenset()

    def departed(self) -> frozenset[str]:
        """Which replicas have ended in an orderly way of late, as of the last answer."""
        return self._departed

    async def report(self, record: ReplicaRecord) -> list[ReplicaRecord]:
        """Renew a replica's entry; returns every live one."""
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                return self._merge(await self._handle().report.remote(record))
        except ray.exceptions.RayActorError:
            self._actor = None
            raise

    async def live(self) -> list[ReplicaRecord]:
        """Every live replica."""
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                return self._merge(await self._handle().live.remote())
        except ray.exceptions.RayActorError:
            self._actor = None
            raise

    async def remove(self, incarnation: str) -> None:
        """A replica ends in an orderly way."""
        async with asyncio.timeout(ANSWER_SECONDS):
            await self._handle().remove.remote(incarnation)

    async def exchange(self, report: FrontEndReport) -> tuple[FrontEndReport, ...]:
        """Renew a front end's entry; returns every live one."""
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                reports: tuple[FrontEndReport, ...] = await self._handle().exchange.remote(report)
                return reports
        except ray.exceptions.RayActorError:
            self._actor = None
            raise

    async def remove_front_end(self, name: str) -> None:
        """A front end ends in an orderly way."""
        async with asyncio.timeout(ANSWER_SECONDS):
            await self._handle().remove_front_end.remote(name)

    def _merge(self, listing: Listing) -> list[ReplicaRecord]:
        """What is known after ``listing``: absence from an incomplete one means nothing."""
        listed = {record.incarnation: record for record in listing.records}
        self._departed = listing.departed
        self._known = listed if listing.complete else self._known | listed
        return list(self._known.values())

    def _handle(self) -> "ray.actor.ActorHandle":
        if self._actor is None:
            self._actor = directory_actor(self._namespace)
        return self._actor


def directory_actor(namespace: str) -> "ray.actor.ActorHandle":
    """The directory of one application, made if there is none."""
    return (
        ray.remote(Directory)
        .options(name=NAME, namespace=namespace, get_if_exists=True, lifetime="detached", num_cpus=0, resources=ON_HEAD)
        .remote()
    )


def this_node() -> str:
    """Ray's name of the machine that this process runs on."""
    node: str = ray.get_runtime_context().get_node_id()
    return node


def stop_directory(namespace: str) -> None:
    """End the directory with its application."""
    try:
        ray.kill(ray.get_actor(NAME, namespace=namespace))
    except ValueError:
        return
