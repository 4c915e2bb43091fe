"""Cores belong to one rank at a time, for as long as its process lives."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.tiny_families import FAMILIES
from worker.cores import Cores

CLAIMS = """
import sys
from pathlib import Path
from worker.cores import Cores
cores = Cores.claim(1, Path(sys.argv[1]))
print(*cores.numbers, flush=True)
sys.stdin.read()
"""


def test_nobody_has_what_another_process_has_until_it_is_killed(tmp_path: Path) -> None:
    every = os.sched_getaffinity(0)
    with subprocess.Popen(
        [sys.executable, "-c", CLAIMS, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        theirs = int(other.stdout.readline())
        assert theirs in every
        rest = Cores.claim(len(every) - 1, tmp_path)
        assert rest.numbers == every - {theirs}
        assert Cores.claim(1, tmp_path).numbers == frozenset()
        other.kill()
    assert Cores.claim(1, tmp_path).numbers == {theirs}
    rest.close()


def test_who_finds_too_few_takes_none(tmp_path: Path) -> None:
    every = os.sched_getaffinity(0)
    assert Cores.claim(len(every) + 1, tmp_path).numbers == frozenset()
    whole = Cores.claim(len(every), tmp_path)
    assert whole.numbers == every
    whole.close()


def test_only_the_thread_that_is_bound_is_bound(tmp_path: Path) -> None:
    before = os.sched_getaffinity(0)
    cores = Cores.claim(1, tmp_path)
    seen: list[set[int]] = []

    def run() -> None:
        cores.bind()
        child = threading.Thread(target=lambda: seen.append(os.sched_getaffinity(0)))
        child.start()
        child.join()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [cores.numbers]
    assert os.sched_getaffinity(0) == before
    cores.close()


def test_a_rank_that_was_not_told_to_runs_anywhere() -> None:
    before = os.sched_getaffinity(0)
    Cores().bind()
    assert os.sched_getaffinity(0) == before


def test_a_directory_of_somebody_else_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stranger = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: stranger)
    assert Cores.claim(1, tmp_path).numbers == frozenset()
    assert list(tmp_path.iterdir()) == []


SERVES = """
import os
import sys
import time
from worker.config import EngineConfig, Role
from worker.replica import Replica

config = EngineConfig(sys.argv[1], Role.COLOCATED, dtype="float32", kv_cache_memory=1 << 22, threads=1, bind_cores=True)
replica = Replica(config)
deadline = time.monotonic() + 10
bound = 0
while not bound and time.monotonic() < deadline:
    bound = sum(len(os.sched_getaffinity(int(thread))) == 1 for thread in os.listdir("/proc/self/task"))
print(bound, flush=True)
os._exit(0)
"""


def test_a_replica_binds_the_thread_that_computes(tmp_path: Path) -> None:
    """On a machine of one core they all are."""
    model = FAMILIES["gemma3"].write(tmp_path / "model")
    command = [sys.executable, "-c", SERVES, str(model)]
    ran = subprocess.run(
        command, env=os.environ | {"TMPDIR": str(tmp_path)}, check=True, capture_output=True, text=True
    )
    assert int(ran.stdout) == 1 or len(os.sched_getaffinity(0)) == 1
