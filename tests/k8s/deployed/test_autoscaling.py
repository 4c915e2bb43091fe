"""A role grows with what is asked of it, on a real Ray cluster, and shrinks again; no request notices."""

import itertools
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.cluster.system.test_serving import body, prompts
from tests.k8s.deployed.conftest import Deployment, RayHead, deployed, until

pytestmark = pytest.mark.timeout(900)

CLIENTS = 10
HEAVY = [prompt * (1500 // len(prompt)) for prompt in prompts(3, 100, seed=5)]
LIGHT = prompts(3, 30, seed=6)


@contextmanager
def asking(deployment: Deployment, clients: int, questions: list[list[int]]) -> Iterator[None]:
    """Clients that ask one question after the other until the block ends; all get what was answered at first."""
    ended = threading.Event()

    def text(question: list[int], salt: str) -> str:
        asked = body(question, max_tokens=4, cache_salt=salt)
        response = httpx.post(f"{deployment.base_url}/v1/completions", json=asked, timeout=120)
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]["text"]

    expected = [text(question, "alone") for question in questions]

    def client(number: int) -> int:
        for turn in itertools.count():
            index = turn % len(questions)
            # Nothing of it is in a prefix cache.
            assert text(questions[index], f"{number}-{turn}-{threading.get_ident()}") == expected[index]
            if ended.is_set():
                return turn + 1
        raise AssertionError

    with ThreadPoolExecutor(clients) as threads:
        results: list[Future[int]] = [threads.submit(client, number) for number in range(clients)]
        try:
            yield
        finally:
            ended.set()
        assert all(result.result(180) > 0 for result in results)


def test_prefill_follows_the_queued_prompt_tokens(ray_head: RayHead, tiny_model: Path, tmp_path: Path) -> None:
    """The config of gpu-1p1d: one prefill replica, two at most. A decode replica's queue counts as well."""
    settings = {
        "kv_cache_memory": "64MiB",
        "max_batched_tokens": 128,
        "max_prefill_streams": 2,
        "scale_prefill_at": 1000,
        "scale_up_seconds": 1,
        "scale_down_seconds": 3,
    }

    def replicas(deployment: Deployment, role: str) -> int:
        return sum(status["role"] == role for status in deployment.statuses())

    with deployed(ray_head, "gpu-1p1d", tiny_model, tmp_path / "serve-config.yaml", **settings) as deployment:
        assert replicas(deployment, "prefill") == 1
        with asking(deployment, CLIENTS, HEAVY):
            until(120, "a second prefill replica", lambda: replicas(deployment, "prefill") == 2)
        with asking(deployment, 1, LIGHT):
            until(120, "one prefill replica less", lambda: replicas(deployment, "prefill") == 1)
        assert replicas(deployment, "decode") == 1
