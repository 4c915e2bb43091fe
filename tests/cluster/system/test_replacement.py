"""Engines die for real; the cluster goes on and Serve replaces them."""

import os
import signal

import httpx
import ray

from cluster.application import APPLICATION
from cluster.directory import directory_actor
from tests.cluster.system.conftest import Serving
from tests.cluster.system.processes import engine_process
from tests.cluster.system.test_serving import complete, prompts


def live(statuses: list[dict], role: str) -> set[str]:
    return {status["replica_id"] for status in statuses if status["role"] == role}


def replace(serving: Serving, role: str) -> None:
    """Kill one of two engines of a role, ask at once, and wait for its successor."""
    question = prompts(1, 200, seed=21)[0]
    expected = complete(serving, question)["choices"][0]["text"]
    before = live(serving.statuses(), role)
    assert len(before) == 2
    victim, process = engine_process(sorted(before)[0])
    os.kill(process, signal.SIGKILL)
    for salt in range(4):
        answer = complete(serving, question, cache_salt=str(salt))
        assert answer["choices"][0]["text"] == expected
    after = serving.wait_for(lambda s: len(live(s, role) - {victim}) == 2, 240.0, f"a new {role} replica")
    assert victim not in live(after, role)
    assert httpx.get(f"{serving.base_url}/health", timeout=5).status_code == 200


def test_prefill_engine_killed(serving: Serving) -> None:
    replace(serving, "prefill")


def test_decode_engine_killed(serving: Serving) -> None:
    replace(serving, "decode")


def test_directory_lost(serving: Serving) -> None:
    """Replicas make a new directory and report to it; nobody's request notices."""
    question = prompts(1, 200, seed=22)[0]
    expected = complete(serving, question)["choices"][0]["text"]
    before = {status["replica_id"] for status in serving.statuses()}
    ray.kill(directory_actor(APPLICATION))
    assert complete(serving, question, cache_salt="lost")["choices"][0]["text"] == expected
    known = serving.wait_for(lambda s: {status["replica_id"] for status in s} == before, 60.0, "the same replicas")
    assert len(known) == 4
    assert complete(serving, question, cache_salt="found")["choices"][0]["text"] == expected
