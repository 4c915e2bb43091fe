"""Replicas that are to end: they finish what they have, transfers included, and refuse what is new."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import pytest

from tests.conftest import EngineProcesses
from tests.engine_client import RequestFailed
from tests.engine_process import EngineProcess
from tests.replicas import connected
from tests.worker.long_transfer import LONG, SLOWLY, is_halfway, prefill_config
from tests.worker.tiny_llama import BYTES_PER_TOKEN, TinyLlama, random_prompt
from worker.config import Role
from worker.wire import engine_pb2 as wire

pytestmark = pytest.mark.replicas


@contextmanager
def draining(process: EngineProcess, seconds: float = 60.0) -> Iterator[Future[bool]]:
    """The process drains beside the test; nothing else may be asked of it meanwhile."""
    with ThreadPoolExecutor(1) as thread:
        yield thread.submit(process.drain, seconds)


def test_a_replica_finishes_what_it_has_and_takes_nothing_new(
    tiny_llama: TinyLlama, engine_processes: EngineProcesses
) -> None:
    process = engine_processes.first
    config = replace(tiny_llama.config(max_running_requests=1), role=Role.COLOCATED, threads=1)
    with connected(process.start(config)) as client:
        running = client.submit(random_prompt(9), max_tokens=300, logprobs=0)
        running.wait_for_tokens(1)
        waiting = client.submit(random_prompt(8), logprobs=0)
        client.wait_for_status(lambda status: status.load.waiting_requests == 1)
        with draining(process) as drained:
            client.wait_for_status(lambda status: status.load.draining)
            assert not drained.done()
            with pytest.raises(RequestFailed) as failure:
                client.generate([1, 2, 3])
            assert failure.value.kind == wire.ERROR_KIND_UNAVAILABLE
            tiny_llama.require_greedy(random_prompt(9), running.result())
            tiny_llama.require_greedy(random_prompt(8), waiting.result())
            assert drained.result(10)
        client.settled()
    process.stop_replica()


def test_what_is_not_finished_in_time_can_be_continued_elsewhere(
    tiny_llama: TinyLlama, engine_processes: EngineProcesses
) -> None:
    process = engine_processes.first
    config = replace(tiny_llama.config(), role=Role.COLOCATED, threads=1)
    with connected(process.start(config)) as client:
        endless = client.submit([7], max_tokens=3000)
        endless.wait_for_tokens(1)
        assert not process.drain(0.2)
        process.stop_replica()
        with pytest.raises(RequestFailed) as failure:
            endless.result()
        assert failure.value.kind == wire.ERROR_KIND_UNAVAILABLE


def test_a_prefill_replica_finishes_its_transfers_and_is_asked_for_no_more(
    tiny_llama: TinyLlama, engine_processes: EngineProcesses
) -> None:
    prefill, decode = engine_processes.first, engine_processes.second
    record = prefill.start(prefill_config(tiny_llama.config(), **SLOWLY))
    with connected(decode.start(replace(tiny_llama.config(), role=Role.DECODE, threads=1))) as client:
        decode.use_prefill_replicas(record)
        begun = client.submit(LONG, logprobs=0)
        client.wait_for_status(is_halfway)
        with draining(prefill) as drained:
            decode.use_prefill_replicas(replace(record, draining=True))
            later = random_prompt(50)
            tiny_llama.require_greedy(later, client.generate(later, logprobs=0))
            assert client.status().counters.local_prefills == 1
            assert client.status().load.receiving_requests == 1
            answer = begun.result()
            assert drained.result(10)
        tiny_llama.require_greedy(LONG, answer)
        transfer = answer.prompt_info.transfer
        assert transfer.payload_bytes == transfer.lower_bound_bytes == (len(LONG) - 1) * BYTES_PER_TOKEN
        assert (transfer.attempts, transfer.retransmitted_bytes) == (1, 0)
        prefill.stop_replica()
        decode.use_prefill_replicas()
        assert client.settled().counters.transfers_failed == 0
    decode.stop_replica()


def test_before_a_decode_replica_knows_better_a_refused_prompt_goes_elsewhere(
    tiny_llama: TinyLlama, engine_processes: EngineProcesses, doomed: EngineProcess
) -> None:
    ending, decode = engine_processes.first, engine_processes.second
    old = ending.start(prefill_config(tiny_llama.config()))
    new = doomed.start(prefill_config(tiny_llama.config()))
    with connected(decode.start(replace(tiny_llama.config(), role=Role.DECODE, threads=1))) as client:
        assert ending.drain(10.0)
        decode.use_prefill_replicas(old, new)
        for seed in range(4):
            prompt = random_prompt(40, seed=seed)
            answer = client.generate(prompt, logprobs=0)
            tiny_llama.require_greedy(prompt, answer)
            assert answer.prompt_info.transfer.prefill_replica == new.incarnation
        counters = client.settled().counters
        assert (counters.transfers, counters.transfers_failed, counters.local_prefills) == (4, 0, 0)
    for process in (decode, ending, doomed):
        process.stop_replica()
