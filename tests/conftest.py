"""Processes that replicas of any test may run in."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.engine_process import EngineProcess

# How fast an example runs says nothing here but how busy the machine is.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")

ROOT = Path(__file__).resolve().parents[1]


# What takes longest begins first, so that several workers end at about the same time.
LONGEST = ("tests/cluster/system/", "tests/peers/test_smollm2.py", "tests/peers/", "tests/worker/test_generation.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let several workers share the suite: a file's tests stay together, and so do all that use the Ray cluster."""

    def group(item: pytest.Item) -> str:
        path = item.path.relative_to(ROOT).as_posix()
        return LONGEST[0] if path.startswith(LONGEST[0]) else path

    def turn(item: pytest.Item) -> int:
        return next((index for index, prefix in enumerate(LONGEST) if group(item).startswith(prefix)), len(LONGEST))

    for item in items:
        item.add_marker(pytest.mark.xdist_group(group(item)))
    items.sort(key=turn)


@dataclass(frozen=True, slots=True)
class EngineProcesses:
    """Two, so that a prefill and a decode replica never share one."""

    first: EngineProcess
    second: EngineProcess


@pytest.fixture(scope="session")
def _engine_processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcesses]:
    logs = tmp_path_factory.mktemp("engine-processes")
    with EngineProcess(logs / "first.log") as first, EngineProcess(logs / "second.log") as second:
        yield EngineProcesses(first, second)


@pytest.fixture
def engine_processes(_engine_processes: EngineProcesses) -> Iterator[EngineProcesses]:
    """The two processes; pytest shows what they wrote if the test fails."""
    yield _engine_processes
    for name, process in (("first", _engine_processes.first), ("second", _engine_processes.second)):
        print(f"--- {name} engine process ---\n{process.new_output()}")
