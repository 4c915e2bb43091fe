"""What replicas report as their part of their role's load adds up to the load."""

import math
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from cluster.demand import demand
from worker.config import Role
from worker.replica_load import ReplicaLoad
from worker.replica_record import ReplicaRecord


def record(role: Role, name: str, queued: int = 0, occupancy: float = 0.0) -> ReplicaRecord:
    return ReplicaRecord(role, name, "127.0.0.1:1", load=ReplicaLoad(queued, occupancy))


TOKENS = st.lists(st.integers(0, 10**6), min_size=1, max_size=9)


@given(prefill=TOKENS, decode=TOKENS)
def test_every_queued_token_counts_once(prefill: list[int], decode: list[int]) -> None:
    live = [record(Role.PREFILL, f"p{index}", tokens) for index, tokens in enumerate(prefill)]
    live += [record(Role.DECODE, f"d{index}", tokens, 0.5) for index, tokens in enumerate(decode)]
    total = math.fsum(demand(each, live) for each in live if each.role is Role.PREFILL)
    assert math.isclose(total, sum(prefill) + sum(decode))


def test_who_drains_answers_for_nothing_that_waits() -> None:
    staying, waiting = record(Role.PREFILL, "staying"), record(Role.DECODE, "waiting", 600)
    leaving = replace(record(Role.PREFILL, "leaving"), draining=True)
    assert demand(staying, [staying, leaving, waiting]) == 600


def test_others_are_loaded_by_what_they_hold() -> None:
    for role in (Role.DECODE, Role.COLOCATED):
        own = record(role, "own", queued=100, occupancy=0.7)
        assert demand(own, [own, record(Role.DECODE, "other", 5, 9.0)]) == 0.7


def test_before_the_directory_has_said_anything() -> None:
    assert demand(record(Role.PREFILL, "own", 70), []) == 70
