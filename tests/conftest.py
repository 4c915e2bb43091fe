"""Processes that replicas of any test may run in."""

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from tests.engine_process import TOKEN, EngineProcess

if TYPE_CHECKING:
    from tests.cluster.otlp_receiver import Collector
    from tests.serving import Serving

# How fast an example runs says nothing here but how busy the machine is.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")

ROOT = Path(__file__).resolve().parents[1]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Which schedules the simulation runs."""
    group = parser.getgroup("simulation")
    group.addoption("--simulation-seed", type=int, help="run only this schedule, and tell its story")
    group.addoption("--simulation-schedules", type=int, default=20_000, help="how many schedules to run")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What happened in all schedules of the simulation."""
    total: Counter[str] = Counter()
    for report in terminalreporter.getreports("passed"):
        total += Counter(dict(report.user_properties).get("simulation", {}))
    if schedules := total.pop("schedules", 0):
        rates = ", ".join(f"{name} {count * 1000 // schedules}" for name, count in sorted(total.items()))
        terminalreporter.write_line(f"simulation: {schedules} schedules; of 1,000 of them: {rates}")


# What starts a cluster, or kills and stops processes and watches how soon that is noticed.
ALONE = {"serving", "one_cluster", "doomed"}
# What asks replicas in processes, and waits for as long as it takes.
ENGINES = {"engine_processes", "rank_pool"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests that want the machine to themselves, and keep a file's tests on one worker, unless they say otherwise.

    What takes longest comes first, and the simulation, in small parts, last: so no worker is left alone at the end.
    """
    for item in items:
        path = item.path.relative_to(ROOT).as_posix()
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(path))
        if path.startswith("tests/cluster/system/") or ALONE & fixtures_of(item):
            item.add_marker(pytest.mark.replicas)
    items.sort(key=lambda item: ("simulation" in item.path.parts) - bool(ENGINES & fixtures_of(item)))


def fixtures_of(item: pytest.Item) -> set[str]:
    return set(item.fixturenames) if isinstance(item, pytest.Function) else set()


# Every pair of tensor-parallel sizes over both transports, not only a covering subset.
EVERY_PAIR = os.environ.get("CROSSKV_EVERY_PAIR") == "1"
LARGEST_PAIR = 8


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


@pytest.fixture(scope="session")
def _rank_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[EngineProcess]]:
    logs = tmp_path_factory.mktemp("rank-processes")
    with ExitStack() as stack:
        yield [stack.enter_context(EngineProcess(logs / f"{number}.log")) for number in range(LARGEST_PAIR)]


@pytest.fixture
def rank_pool(_rank_pool: list[EngineProcess]) -> Iterator[list[EngineProcess]]:
    """Processes for a prefill and a decode replica of four ranks each; pytest shows what they wrote if a test fails."""
    yield _rank_pool
    for number, process in enumerate(_rank_pool):
        print(f"--- rank process {number} ---\n{process.new_output()}")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama's directory."""
    from tests.tiny_checkpoints import write_tiny  # noqa: PLC0415 (imports torch)

    return write_tiny("llama", tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="session")
def collector() -> "Iterator[Collector]":
    """What the session's cluster sends its traces to."""
    from tests.cluster.otlp_receiver import collecting  # noqa: PLC0415

    with collecting() as collector:
        yield collector


@pytest.fixture(scope="session")
def one_cluster(tiny_model: Path, collector: "Collector") -> "Iterator[Serving]":
    """One Ray cluster for the whole session, at first with two prefill and two decode replicas."""
    # Most tests need neither Ray nor torch.
    from cluster.config import ClusterConfig  # noqa: PLC0415
    from cluster.ports import free_port  # noqa: PLC0415
    from cluster.running_cluster import running_cluster  # noqa: PLC0415
    from tests.serving import Serving  # noqa: PLC0415

    config = ClusterConfig(
        model=str(tiny_model),
        served_model_name="tiny",
        port=free_port("127.0.0.1"),
        prefill_replicas=2,
        decode_replicas=2,
        dtype="float32",
        threads=1,
        # So small that concurrent requests preempt each other.
        kv_cache_memory="768KiB",
        max_batched_tokens=256,
        cluster_token=TOKEN.value,
        otlp_traces_endpoint=collector.url,
    )
    largest = config.replace(tensor_parallel_size=2)
    with pytest.MonkeyPatch.context() as environment:
        # Milliseconds between two batches of spans.
        environment.setenv("OTEL_BSP_SCHEDULE_DELAY", "200")
        with running_cluster(config, print, later=[largest]) as cluster:
            yield Serving(cluster, config)
