"""What callers conclude from a directory that is old, new, or forgets."""

import time

import pytest

from cluster import directory
from cluster.directory import Directory, DirectoryClient, Listing
from worker.config import Role
from worker.replica_record import ReplicaRecord


def record(name: str) -> ReplicaRecord:
    return ReplicaRecord(Role.DECODE, name, "127.0.0.1:1")


def test_entries_expire_and_a_new_directory_says_that_it_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    content = Directory()
    assert content.report(record("a")) == Listing((record("a"),), complete=False)
    now += directory.EXPIRY_SECONDS - 0.1
    assert content.report(record("b")).records == (record("a"), record("b"))
    now += 0.2
    assert content.live() == Listing((record("b"),), complete=True)
    content.remove("b")
    # One that expired has not said that it goes.
    assert content.live() == Listing((), complete=True, departed=frozenset({"b"}))
    now += directory.DEPARTED_SECONDS + 1
    assert content.live() == Listing((), complete=True)


def test_absence_from_an_incomplete_listing_means_nothing() -> None:
    client = DirectoryClient("test")
    both = [record("a"), record("b")]
    assert client._merge(Listing(tuple(both), complete=True)) == both
    assert client._merge(Listing((), complete=False)) == both
    assert client._merge(Listing((record("c"),), complete=False)) == [*both, record("c")]
    assert client._merge(Listing((record("c"),), complete=True)) == [record("c")]
