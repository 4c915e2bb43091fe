"""Random schedules of a whole cluster on virtual time. ``pytest tests/simulation --simulation-seed N`` replays one."""

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.simulation.simulation import Statistics, simulate, tell

SCHEDULES_PER_TEST = 500
ROOT = Path(__file__).resolve().parents[2]

REACHED = (
    *("complete", "aborted", "timeout", "overloaded", "broken"),
    *("undisturbed", "kill", "stop", "pause", "breakstep", "cutstreams", "cutsession", "clearcache", "resubmissions"),
    *("cut", "hung", "lost", "repeated", "lingered", "muted", "refused", "slow"),
    *("transfers", "transfers_failed", "retransmitted_bytes", "stale_pieces", "local_prefills"),
    *("preemptions", "decode_prefix_hits", "prefill_prefix_hits", "forks", "split_replicas"),
)
"""What must have happened in the schedules of a test: what never happens is not tested."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "first" not in metafunc.fixturenames:
        return
    seed, schedules = (metafunc.config.getoption(f"--simulation-{name}") for name in ("seed", "schedules"))
    firsts = [] if seed is not None else range(0, schedules, SCHEDULES_PER_TEST)
    # Parts of one long test, which may run beside each other.
    metafunc.parametrize(
        "first", [pytest.param(first, marks=pytest.mark.xdist_group(f"simulation-{first}")) for first in firsts]
    )


def test_whatever_happens_everybody_is_served_and_nothing_is_left_over(
    first: int, request: pytest.FixtureRequest, record_property: Callable[[str, object], None]
) -> None:
    seeds = range(first, min(first + SCHEDULES_PER_TEST, request.config.getoption("--simulation-schedules")))
    total: Statistics = Counter(schedules=len(seeds))
    for seed in seeds:
        total += simulate(seed)
    record_property("simulation", dict(total))
    if len(seeds) == SCHEDULES_PER_TEST:
        assert [name for name in REACHED if not total[name]] == []


def test_a_schedule_is_told_and_fails_if_it_must(
    request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    """The one of ``--simulation-seed``, or any."""
    seed: int | None = request.config.getoption("--simulation-seed")
    story = tell(seed or 0)
    if seed is not None:
        with capsys.disabled():
            print(f"\n{story}")
    simulate(seed or 0)
    assert "ends: complete" in story


def test_a_seed_gives_the_same_schedule_in_every_process() -> None:
    script = "from tests.simulation.simulation import tell; print([tell(seed) for seed in range(40)])"
    stories = {
        subprocess.run(
            [sys.executable, "-c", script],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert len(stories) == 1
