"""Engines die for real; the cluster goes on and Serve replaces them."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import httpx
import ray

from cluster.application import APPLICATION
from cluster.directory import directory_actor
from tests.cluster.system.conftest import Serving
from tests.cluster.system.processes import engine_process
from tests.cluster.system.test_serving import complete, prompts


def live(statuses: list[dict], role: str) -> set[str]:
    return {status["replica_id"] for status in statuses if status["role"] == role}


def working(statuses: list[dict], role: str) -> set[str]:
    return {s["replica_id"] for s in statuses if s["role"] == role and s["load"]["running_requests"]}


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


def test_an_engine_that_is_told_to_end_finishes_what_it_has(serving: Serving) -> None:
    """SIGTERM to its process, as an operator may send it: nobody has to go on elsewhere."""
    question = prompts(1, 200, seed=23)[0]
    long = {"max_tokens": 500}
    expected = complete(serving, question, **long)["choices"][0]["text"]
    before = live(serving.statuses(), "decode")
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(complete, serving, question, cache_salt="told", **long)
        statuses = serving.wait_for(lambda s: working(s, "decode"), 30.0, "a running request")
        (victim,) = working(statuses, "decode")
        _, process = engine_process(victim)
        os.kill(process, signal.SIGTERM)
        told = answer.result()
    assert told["choices"][0]["text"] == expected
    assert told["usage"]["crosskv"]["resumptions"] == 0
    after = serving.wait_for(lambda s: len(live(s, "decode") - {victim}) == 2, 240.0, "a new decode replica")
    assert before - {victim} < live(after, "decode")


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
