"""Replicas whose ranks are Ray actors: one unequal pair per kind of model, and a rank that is killed."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
import torch

from cluster.ports import free_port
from tests.cluster.system.conftest import Serving
from tests.conftest import EVERY_PAIR
from tests.engine_client import EngineClient
from tests.peers.family_case import PROMPT_LENGTHS, Case
from tests.peers.test_tensor_parallel import MODELS
from tests.replica_listing import listed_replicas
from worker.config import Role
from worker.replica_record import ReplicaRecord

# float32 decides near ties among the indexer's scores one way or the other, which float64 does not, and is not served.
PAIRS = [("qwen3_next", 2, 1)]
if EVERY_PAIR:
    PAIRS += [("qwen3", 1, 2), ("gemma3n", 2, 1), ("deepseek_v3", 1, 2)]


def records() -> dict[Role, ReplicaRecord]:
    """The live replicas of a cluster with one of each role."""
    return {record.role: record for record in listed_replicas()}


@pytest.fixture
def serving(redeployed: Serving) -> Iterator[Serving]:
    """The session's cluster, which each test deploys as it needs it."""
    yield redeployed
    redeployed.wait_until_idle()


def deploy(serving: Serving, model: Path, prefill_ranks: int, decode_ranks: int) -> None:
    serving.require(
        serving.config.replace(
            model=str(model),
            port=free_port("127.0.0.1"),
            prefill_replicas=1,
            decode_replicas=1,
            prefill_tensor_parallel_size=prefill_ranks,
            tensor_parallel_size=decode_ranks,
            kv_cache_memory="16MiB",
            max_batched_tokens=50,
        )
    )


@pytest.mark.parametrize(("name", "prefill_ranks", "decode_ranks"), PAIRS, ids=str)
def test_an_unequal_pair(
    name: str,
    prefill_ranks: int,
    decode_ranks: int,
    serving: Serving,
    tmp_path: Path,
) -> None:
    torch.set_num_threads(1)
    family = MODELS[name]
    directory = family.write(tmp_path / "model")
    case = Case(name, directory, family.load(directory))
    deploy(serving, directory, prefill_ranks, decode_ranks)
    assert len(records()[Role.PREFILL].kv_addresses) == prefill_ranks
    client = EngineClient(records()[Role.DECODE].session_address)
    try:
        for length, answer in zip(PROMPT_LENGTHS, case.require_answers(client), strict=True):
            transfer = answer.prompt_info.transfer
            assert transfer.payload_bytes == transfer.lower_bound_bytes == case.moved(length, decode_ranks)
    finally:
        client.close()


def test_a_rank_that_is_killed_costs_its_replica_and_nobody_else(serving: Serving, tiny_model: Path) -> None:
    deploy(serving, tiny_model, prefill_ranks=2, decode_ranks=2)
    for role in (Role.PREFILL, Role.DECODE):
        kill_a_follower(serving, role)


def kill_a_follower(serving: Serving, role: Role) -> None:
    """In the middle of an answer; afterwards there is a new replica that gives the same answers."""
    before = records()[role].incarnation
    ask = {"model": "tiny", "prompt": "once upon a time " * 20, "max_tokens": 400, "ignore_eos": True, "temperature": 0}
    url = f"{serving.base_url}/v1/completions"
    expected = httpx.post(url, json=ask | {"max_tokens": 8}, timeout=60).json()["choices"][0]["text"]
    with httpx.stream("POST", url, json=ask | {"stream": True, "cache_salt": "victim"}, timeout=120) as stream:
        lines = stream.iter_lines()
        next(lines)
        os.kill(follower_process(role), signal.SIGKILL)
        rest = list(lines)
    # Of the only decode replica's answer its successor sends the rest.
    assert "data: [DONE]" in rest
    serving.wait_for(
        lambda statuses: records()[role].incarnation != before and len(statuses) == 2,
        120.0,
        "a new replica",
    )
    deadline = time.monotonic() + 60
    while httpx.get(f"{serving.base_url}/health", timeout=5).status_code != httpx.codes.OK:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    again = httpx.post(url, json=ask | {"max_tokens": 8, "cache_salt": "again"}, timeout=60).json()
    assert again["choices"][0]["text"] == expected


def follower_process(role: Role) -> int:
    """The process of the second rank of the only replica of a role; a prefill rank listens on its KV port."""
    port = int(records()[Role.PREFILL].kv_addresses[1].rsplit(":", 1)[1])
    found = {}
    for process in psutil.Process().children(recursive=True):
        if "RankActor" in " ".join(process.cmdline()):
            listens = any(
                c.status == psutil.CONN_LISTEN and c.laddr.port == port for c in process.net_connections("tcp")
            )
            found[Role.PREFILL if listens else Role.DECODE] = process.pid
    return found[role]
