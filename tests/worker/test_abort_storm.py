"""Hundreds of requests, most of them cancelled at any moment of their lives: nothing of them may stay behind."""

import random
import time

import pytest

from tests.conftest import EngineProcesses
from tests.engine_process import EngineProcess
from tests.replicas import Pair, disaggregated
from tests.worker.tiny_llama import TinyLlama, random_prompt

pytestmark = pytest.mark.replicas

REQUESTS = 500
CANCELLED = 0.9
SECONDS = 6.0
"""In which the requests of a storm arrive."""
LONGEST_LIFE = 2.0
GROWTH = 0.03
"""Of a process' memory, beside what its first storm had it allocate."""


def storm(pair: Pair, llama: TinyLlama, seed: int) -> None:
    """Requests come and go; those that stay answer as they would alone. Afterwards both replicas hold nothing."""
    numbers = random.Random(seed)
    prompts = [random_prompt(numbers.randint(1, 300), seed=numbers.randrange(900)) for _ in range(REQUESTS)]
    arrivals = sorted(numbers.uniform(0, SECONDS) for _ in prompts)
    doomed = set(numbers.sample(range(REQUESTS), int(REQUESTS * CANCELLED)))
    moments = [(arrival, number, False) for number, arrival in enumerate(arrivals)]
    # Some are cancelled in the moment in which they are sent, some after their last token.
    moments += [(arrivals[number] + numbers.uniform(0, LONGEST_LIFE) ** 2 / 2, number, True) for number in doomed]
    pending = {}
    began = time.monotonic()
    for moment, number, cancel in sorted(moments):
        time.sleep(max(0.0, began + moment - time.monotonic()))
        if cancel:
            pending[number].abort()
        else:
            length = 250 if number in doomed else 1 + number % 30
            pending[number] = pair.decode.submit(prompts[number], logprobs=0, max_tokens=length)
    for number in sorted(pending.keys() - doomed):
        llama.require_greedy(prompts[number], pending[number].result())
    pair.decode.settled()
    pair.prefill.settled()


def test_memory_and_blocks_return_after_every_storm(tiny_llama: TinyLlama, engine_processes: EngineProcesses) -> None:
    processes: tuple[EngineProcess, ...] = (engine_processes.first, engine_processes.second)
    with disaggregated(*processes, tiny_llama.config(prefix_caching=False)) as pair:
        # The first has allocators, threads and channels grow to what such a load needs.
        storm(pair, tiny_llama, seed=0)
        before = [process.resident_bytes() for process in processes]
        for seed in (1, 2):
            storm(pair, tiny_llama, seed)
        after = [process.resident_bytes() for process in processes]
        counters = pair.decode.status().counters
        print(f"bytes before {before}, after {after}; {counters}")
        for name, was, is_now in zip(("prefill", "decode"), before, after, strict=True):
            assert is_now <= was * (1 + GROWTH), f"the {name} replica grew from {was} to {is_now} bytes"
        assert counters.requests_aborted > REQUESTS
        assert counters.transfers_failed == 0
