"""Every replica of every role is replaced while clients ask, and none of them notices."""

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import dataclass, field

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from cluster.config import ClusterConfig
from cluster.ports import free_port
from tests.cluster.system.conftest import Serving
from tests.cluster.system.test_serving import body, complete, prompts

CLIENTS = 4


@pytest.fixture
def redundant(redeployed: Serving) -> Iterator[ClusterConfig]:
    """Two replicas of every role, front ends included."""
    # The token that the cluster makes for itself: replicas of before and after must have the same.
    config = redeployed.config.replace(port=free_port("127.0.0.1"), front_ends=2, drain_seconds=20, cluster_token=None)
    redeployed.require(config)
    yield config
    redeployed.wait_until_idle()


class Unanswered(Exception):
    """Not a byte of an answer has come."""


@dataclass
class Load:
    """Clients that ask one question after the other, until the block ends; half of them keep their connections."""

    serving: Serving
    expected: dict[int, str]
    questions: list[list[int]]
    failures: list[str] = field(default_factory=list)
    answered: int = 0
    repeated: int = 0
    over: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> "Load":
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.over.set()
        self._thread.join(60)
        assert not self._thread.is_alive()

    async def _run(self) -> None:
        await asyncio.gather(*(self._client(number) for number in range(CLIENTS)))

    async def _client(self, number: int) -> None:
        kept = httpx.Limits(max_keepalive_connections=1 if number % 2 else 0)
        async with httpx.AsyncClient(base_url=self.serving.base_url, timeout=60, limits=kept) as client:
            turn = number
            while not self.over.is_set():
                question = turn % len(self.questions)
                turn += 1
                ask = body(self.questions[question], stream=True, max_tokens=60, cache_salt=f"{number}-{turn}")
                try:
                    try:
                        text = await self._text(client, ask)
                    except Unanswered:
                        # A connection that is being made while a front end closes the port may be reset, before
                        # anybody has read from it; OpenAI's clients, like most, then try again.
                        self.repeated += 1
                        text = await self._text(client, ask)
                except Exception as error:
                    self.failures.append(f"client {number}, {question}: {error!r}")
                    continue
                self.answered += 1
                if text != self.expected[question]:
                    self.failures.append(f"client {number}: {text!r}, not {self.expected[question]!r}")

    async def _text(self, client: httpx.AsyncClient, ask: dict) -> str:
        text = []
        ended = False
        try:
            response = await client.send(client.build_request("POST", "/v1/completions", json=ask), stream=True)
        except httpx.TransportError as error:
            raise Unanswered from error
        async with aclosing(response):
            if response.status_code != 200:
                raise RuntimeError(f"{response.status_code}: {(await response.aread()).decode()}")
            async for line in response.aiter_lines():
                ended = ended or line == "data: [DONE]"
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        raise RuntimeError(str(event))
                    text += [choice["text"] for choice in event["choices"]]
        if not ended:
            raise RuntimeError("the stream broke off")
        return "".join(text)


@pytest.fixture
def load(redeployed: Serving, redundant: ClusterConfig) -> Load:
    questions = prompts(6, 120, seed=31)
    expected = {
        index: complete(redeployed, question, max_tokens=60, cache_salt="alone")["choices"][0]["text"]
        for index, question in enumerate(questions)
    }
    return Load(redeployed, expected, questions)


def scrape(serving: Serving, name: str, **labels: str) -> list[tuple[dict[str, str], float]]:
    """A metric's samples in one answer of ``/metrics``."""
    text = httpx.get(f"{serving.base_url}/metrics", timeout=10).text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return [(s.labels, s.value) for s in samples if s.name == name and labels.items() <= s.labels.items()]


def incarnations(serving: Serving) -> set[str]:
    return {status["replica_id"] for status in serving.statuses()}


def require_that_both_front_ends_answer_for_both(serving: Serving, asked: int) -> None:
    """Every request, of which there were ``asked``, and every scrape is a connection that either of the two may get."""

    def served() -> set[tuple[int, float]]:
        """Of several scrapes, how many front ends had how many requests."""
        scraped = [scrape(serving, "crosskv_requests_total", status="200") for _ in range(6)]
        return {(len({labels["front_end"] for labels, _ in s}), sum(value for _, value in s)) for s in scraped}

    def wait_for(expected: set[tuple[int, float]]) -> None:
        deadline = time.monotonic() + 20
        while (shown := served()) != expected:
            assert time.monotonic() < deadline, (expected, shown)

    wait_for({(2, asked)})
    for prompt in prompts(12, 20, seed=33):
        complete(serving, prompt, max_tokens=2)
    wait_for({(2, asked + 12)})
    for _ in range(6):
        replicas = [labels["replica"] for labels, _ in scrape(serving, "crosskv_engine_steps_total")]
        assert sorted(replicas) == sorted(incarnations(serving))


def test_a_rolling_restart_of_all_roles_fails_no_request(
    redeployed: Serving, redundant: ClusterConfig, load: Load
) -> None:
    require_that_both_front_ends_answer_for_both(redeployed, asked=len(load.questions))
    before = incarnations(redeployed)
    assert len(before) == 4
    with load:
        redeployed.cluster.roll(redundant)
        after = redeployed.wait_for(
            lambda statuses: len(statuses) == 4 and not before & {s["replica_id"] for s in statuses}, 60.0, "new ones"
        )
    assert not load.failures, load.failures
    assert load.repeated <= 2, f"{load.repeated} connections were reset"
    assert load.answered > 2 * CLIENTS
    assert {status["role"] for status in after} == {"prefill", "decode"}
    # What went in order is not lost.
    assert not [lost for lost, count in scrape(redeployed, "crosskv_replicas_lost_total") if count]
