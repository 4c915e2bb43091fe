"""What the directory of the session's cluster lists, once every replica has reported."""

import time
from collections.abc import Callable, Sequence

import ray

from cluster.application import APPLICATION
from cluster.directory import directory_actor
from worker.config import Role
from worker.replica_record import ReplicaRecord

LISTING_SECONDS = 120.0


def has_both_roles(records: Sequence[ReplicaRecord]) -> bool:
    return {record.role for record in records} == {Role.PREFILL, Role.DECODE}


def listed_replicas(complete: Callable[[Sequence[ReplicaRecord]], bool] = has_both_roles) -> Sequence[ReplicaRecord]:
    """Asks until ``complete`` holds: on a busy machine a report may be late, and its replica not listed meanwhile."""
    deadline = time.monotonic() + LISTING_SECONDS
    while True:
        listing = ray.get(directory_actor(APPLICATION).live.remote())
        if listing.complete and complete(listing.records):
            return listing.records
        assert time.monotonic() < deadline, f"listed are only {listing}"
        time.sleep(0.1)
