"""Processes that replicas of any test may run in."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, settings

from tests.engine_process import EngineProcess

# How fast an example runs says nothing here but how busy the machine is.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")


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
