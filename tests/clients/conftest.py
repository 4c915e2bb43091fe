"""Clients as their users run them, from an environment of their own, against one cluster with a trained model."""

import os
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from cluster.config import ClusterConfig
from cluster.model_store import resolve_model
from cluster.ports import free_port
from cluster.running_cluster import running_cluster
from tests.serving import Serving

REPOSITORY = Path(__file__).parents[2]
# Where tests of clients that are too large for that environment find theirs.
VLLM = os.environ.get("CROSSKV_VLLM")
collect_ignore = [] if VLLM else ["test_vllm.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.clients)


@dataclass(frozen=True, slots=True)
class Clients:
    """The environment that has the clients, and what they are told of the server."""

    programs: Path
    cache: Path
    base_url: str

    @property
    def tokenizer(self) -> Path:
        """The served model's, for clients that count tokens themselves."""
        return resolve_model("smollm2").tokenizer

    def run(self, program: str | Path, *arguments: str, seconds: float = 300.0) -> str:
        """Run one of the environment's programs, or any by its path; returns what it printed."""
        offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(self.cache), "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
        keys = {"OPENAI_API_KEY": "unused", "OPENAI_BASE_URL": f"{self.base_url}/v1"}
        began = time.monotonic()
        finished = subprocess.run(
            [str(self.programs / program), *arguments],
            cwd=REPOSITORY,
            env=os.environ | offline | keys,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
        assert finished.returncode == 0, finished.stdout + finished.stderr
        print(f"{time.monotonic() - began:.0f} s: {Path(program).name} {' '.join(arguments)}\n{finished.stdout}")
        return finished.stdout


@pytest.fixture(scope="session")
def served() -> Iterator[Serving]:
    """SmolLM2 in float32, one prefill and one decode replica."""
    config = ClusterConfig(
        model="smollm2", port=free_port("127.0.0.1"), dtype="float32", threads=1, kv_cache_memory="512MiB"
    )
    with running_cluster(config, print) as cluster:
        yield Serving(cluster, config)


@pytest.fixture(scope="session")
def clients(served: Serving, tmp_path_factory: pytest.TempPathFactory) -> Clients:
    """What runs clients against the server."""
    environment = os.environ.get("CROSSKV_CLIENTS")
    assert environment, "CROSSKV_CLIENTS is not set; make test-clients makes the environment that it names"
    return Clients(Path(environment).absolute() / "bin", tmp_path_factory.mktemp("cache"), served.base_url)


@pytest.fixture(autouse=True)
def conservation(served: Serving) -> Iterator[None]:
    """Whatever a client did, nothing may be left of it."""
    yield
    served.wait_until_idle()


@pytest.fixture
def http(served: Serving) -> Iterator[httpx.Client]:
    """Plain HTTP to the same server."""
    with httpx.Client(base_url=served.base_url, timeout=120) as http:
        yield http


def payload_bytes(served: Serving) -> int:
    """KV that decode replicas have received since they started."""
    return sum(s["counters"]["payload_bytes"] for s in served.statuses() if s["role"] == "decode")
