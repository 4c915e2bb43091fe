"""Replicas under misfortune: killed, stopped or mismatched peers, aborts at every stage, deadlines, requests in error.

Nobody else's request may notice, the text stays the same, and afterwards every block is free or cached: the helpers
check the latter on their way out.
"""

import math
import signal
import time
from typing import Any

import pytest

from tests.conftest import EngineProcesses
from tests.engine_client import RequestFailed
from tests.engine_process import EngineProcess
from tests.replicas import colocated, connected, disaggregated
from tests.tiny_checkpoints import VOCAB_SIZE
from tests.worker.long_transfer import LONG, SLOWLY, decode_config, is_halfway, prefill_config
from tests.worker.tiny_llama import BYTES_PER_TOKEN, TinyLlama, random_prompt
from worker.wire import engine_pb2 as wire

pytestmark = pytest.mark.replicas

NOTICED_SECONDS = 5.0
"""Twice what it should take, on a machine that has other things to do."""


# Peers that die, hang, or do not fit


def test_a_prefill_replica_that_dies_is_replaced_by_the_decode_replica_itself(
    tiny_llama: TinyLlama, engine_processes: EngineProcesses, doomed: EngineProcess
) -> None:
    decode = engine_processes.second
    prefill_record = doomed.start(prefill_config(tiny_llama.config(), **SLOWLY))
    with connected(decode.start(decode_config(tiny_llama.config()))) as client:
        decode.use_prefill_replicas(prefill_record)
        running = client.submit([77], max_tokens=2000, logprobs=0)
        running.wait_for_tokens(1)
        pending = client.submit(LONG, logprobs=0)
        client.wait_for_status(is_halfway)
        doomed.signal(signal.SIGKILL)
        answer = pending.result()
        tiny_llama.require_greedy(LONG, answer)
        transfer = answer.prompt_info.transfer
        assert transfer.payload_bytes == 0
        assert 0 < transfer.retransmitted_bytes < 2999 * BYTES_PER_TOKEN
        decode.require_health()
        tiny_llama.require_greedy([77], running.result())
        counters = client.settled().counters
        assert (counters.transfers, counters.transfers_failed, counters.local_prefills) == (0, 1, 1)
    decode.stop_replica()


def test_a_prefill_replica_that_dies_is_replaced_by_another(
    tiny_llama: TinyLlama, engine_processes: EngineProcesses, doomed: EngineProcess
) -> None:
    decode, other = engine_processes.second, engine_processes.first
    victim = doomed.start(prefill_config(tiny_llama.config(), **SLOWLY))
    survivor = other.start(prefill_config(tiny_llama.config()))
    with connected(decode.start(decode_config(tiny_llama.config()))) as client:
        decode.use_prefill_replicas(victim)
        pending = client.submit(LONG, logprobs=0)
        client.wait_for_status(is_halfway)
        decode.use_prefill_replicas(victim, survivor)
        doomed.signal(signal.SIGKILL)
        answer = pending.result()
        tiny_llama.require_greedy(LONG, answer)
        transfer = answer.prompt_info.transfer
        assert transfer.prefill_replica == survivor.incarnation
        assert transfer.attempts == 2
        assert transfer.payload_bytes == transfer.lower_bound_bytes == 2999 * BYTES_PER_TOKEN
        assert transfer.retransmitted_bytes > 0
        assert client.settled().counters.local_prefills == 0
    decode.stop_replica()
    other.stop_replica()


def test_a_prefill_replica_that_hangs_is_given_up(
    tiny_llama: TinyLlama, engine_processes: EngineProcesses, doomed: EngineProcess
) -> None:
    decode = engine_processes.second
    config = tiny_llama.config()
    prefill_record = doomed.start(prefill_config(config, **SLOWLY))
    with connected(decode.start(decode_config(config))) as client:
        decode.use_prefill_replicas(prefill_record)
        pending = client.submit(LONG, logprobs=0)
        client.wait_for_status(is_halfway)
        doomed.signal(signal.SIGSTOP)
        stopped = time.monotonic()
        client.wait_for_status(lambda status: status.counters.transfers_failed > 0)
        assert time.monotonic() - stopped < NOTICED_SECONDS
        tiny_llama.require_greedy(LONG, pending.result())
        assert client.settled().counters.local_prefills == 1
        decode.require_health()
        # It is used again as soon as it answers again.
        doomed.signal(signal.SIGCONT)
        deadline = time.monotonic() + 30
        while not client.generate(random_prompt(100), cache_salt=str(time.monotonic())).prompt_info.transfer.attempts:
            assert time.monotonic() < deadline
    decode.stop_replica()


def test_a_decode_replica_that_dies_leaves_nothing_behind(
    tiny_llama: TinyLlama, engine_processes: EngineProcesses, doomed: EngineProcess
) -> None:
    prefill = engine_processes.first
    prefill_record = prefill.start(prefill_config(tiny_llama.config(), **SLOWLY))
    with connected(prefill_record) as prefill_client:
        with connected(doomed.start(decode_config(tiny_llama.config()))) as client:
            doomed.use_prefill_replicas(prefill_record)
            pending = client.submit(LONG)
            client.wait_for_status(is_halfway)
            doomed.signal(signal.SIGKILL)
            with pytest.raises(ConnectionError):
                pending.result()
        counters = prefill_client.settled().counters
        assert (counters.requests_finished, counters.requests_aborted) == (0, 1)
        prefill.require_health()
    prefill.stop_replica()


def test_a_restarted_prefill_replica_is_a_new_one(tiny_llama: TinyLlama, engine_processes: EngineProcesses) -> None:
    prefill, decode = engine_processes.first, engine_processes.second
    prompt = random_prompt(100)
    first = prefill.start(prefill_config(tiny_llama.config()))
    with connected(decode.start(decode_config(tiny_llama.config(prefix_caching=False)))) as client:
        decode.use_prefill_replicas(first)
        assert client.generate(prompt).prompt_info.transfer.prefill_replica == first.incarnation
        second = prefill.start(prefill_config(tiny_llama.config()))
        # The old connection is dead, and nobody has said so yet.
        tiny_llama.require_greedy(prompt, client.generate(prompt, logprobs=0))
        decode.use_prefill_replicas(second)
        answer = client.generate(prompt, logprobs=0)
        tiny_llama.require_greedy(prompt, answer)
        assert answer.prompt_info.transfer.prefill_replica == second.incarnation
        assert client.settled().load.prefill_peers == 1
    decode.stop_replica()
    prefill.stop_replica()


@pytest.mark.parametrize(
    ("settings", "named"),
    [({"kv_sharing": "every:2"}, "--kv-sharing"), ({"dtype": "bfloat16"}, "--dtype")],
)
def test_a_prefill_replica_that_does_not_match_is_not_used(
    tiny_llama: TinyLlama, engine_processes: EngineProcesses, settings: dict[str, str], named: str
) -> None:
    prefill, decode = engine_processes.first, engine_processes.second
    prefill_record = prefill.start(prefill_config(tiny_llama.config(), **settings))
    prompt = random_prompt(100)
    with connected(decode.start(decode_config(tiny_llama.config()))) as client:
        decode.use_prefill_replicas(prefill_record)
        tiny_llama.require_greedy(prompt, client.generate(prompt, logprobs=0))
        status = client.settled()
        assert status.load.prefill_peers == 0
        assert named in status.prefill_error
        assert status.counters.local_prefills == 1
    decode.stop_replica()
    prefill.stop_replica()


def test_a_prompt_too_long_for_the_prefill_replica_is_computed_where_it_is_needed(
    tiny_llama: TinyLlama, engine_processes: EngineProcesses
) -> None:
    prompt = random_prompt(400)
    prefill, decode = engine_processes.first, engine_processes.second
    with disaggregated(prefill, decode, tiny_llama.config(), kv_cache_memory=1 << 18) as pair:
        tiny_llama.require_greedy(prompt, pair.decode.generate(prompt, logprobs=0))
        assert pair.decode.settled().counters.local_prefills == 1


# Requests that end early


def test_aborts_at_every_stage(tiny_llama: TinyLlama, engine_processes: EngineProcesses) -> None:
    prompt = random_prompt(40)
    config = tiny_llama.config(max_running_requests=2)
    with disaggregated(engine_processes.first, engine_processes.second, config, **SLOWLY) as pair:
        client = pair.decode
        running = client.submit(prompt, max_tokens=3000, logprobs=0)
        running.wait_for_tokens(3)
        receiving = client.submit(LONG)
        client.wait_for_status(is_halfway)
        waiting = client.submit(prompt)
        lasting = client.submit(prompt, logprobs=0, max_tokens=100)
        client.wait_for_status(lambda status: status.load.waiting_requests == 2)

        waiting.abort()
        client.wait_for_status(lambda status: status.counters.requests_aborted == 1)
        receiving.abort()
        client.wait_for_status(lambda status: status.counters.requests_aborted == 2)
        assert pair.prefill.settled().counters.requests_aborted == 1
        tiny_llama.require_greedy(prompt, lasting.result())
        running.abort()
        assert client.settled().counters.requests_aborted == 3


def test_a_front_end_that_leaves_takes_its_requests_along(
    tiny_llama: TinyLlama, engine_processes: EngineProcesses
) -> None:
    prefill, decode = engine_processes.first, engine_processes.second
    prompt = random_prompt(40)
    prefill_record = prefill.start(prefill_config(tiny_llama.config(), **SLOWLY))
    decode_record = decode.start(decode_config(tiny_llama.config()))
    decode.use_prefill_replicas(prefill_record)
    with connected(decode_record) as other, connected(prefill_record) as prefill_client:
        lasting = other.submit(prompt, max_tokens=300, logprobs=0)
        lasting.wait_for_tokens(1)
        with connected(decode_record) as client:
            client.submit(prompt, n=3, max_tokens=3000).wait_for_tokens(30)
            client.submit(LONG)
            client.wait_for_status(is_halfway)
        tiny_llama.require_greedy(prompt, lasting.result())
        assert other.settled().counters.requests_aborted == 2
        assert prefill_client.settled().counters.requests_aborted == 1
    decode.stop_replica()
    prefill.stop_replica()


def test_deadlines_end_requests_at_every_stage(tiny_llama: TinyLlama, engine_processes: EngineProcesses) -> None:
    prompt = random_prompt(40)
    config = tiny_llama.config(max_running_requests=3)
    with disaggregated(engine_processes.first, engine_processes.second, config, max_batched_tokens=1) as pair:
        client = pair.decode
        lasting = client.submit(prompt, max_tokens=300, logprobs=0)
        lasting.wait_for_tokens(1)
        # What these ask for takes seconds.
        running = client.submit([5], max_tokens=4000, timeout_ms=1000)
        receiving = client.submit(LONG, timeout_ms=1000)
        client.wait_for_status(lambda status: status.load.receiving_requests == 1)
        waiting = client.submit(prompt, timeout_ms=1)
        for pending in (running, receiving, waiting):
            with pytest.raises(RequestFailed) as failure:
                pending.result()
            assert failure.value.kind == wire.ERROR_KIND_TIMEOUT
        tiny_llama.require_greedy(prompt, lasting.result())
        assert client.settled().counters.requests_failed == 3
        # Told by the decode replica, or by its own clock, whichever is first.
        counters = pair.prefill.settled().counters
        assert counters.requests_aborted + counters.requests_failed == 1


def test_a_full_queue_refuses(tiny_llama: TinyLlama, engine_processes: EngineProcesses) -> None:
    config = tiny_llama.config(max_running_requests=1, max_waiting_requests=2)
    prompt = random_prompt(10)
    with colocated(engine_processes.first, config) as client:
        running = client.submit(prompt, max_tokens=3000)
        running.wait_for_tokens(1)
        waiting = [client.submit(prompt, logprobs=0) for _ in range(2)]
        client.wait_for_status(lambda status: status.load.waiting_requests == 2)
        with pytest.raises(RequestFailed, match="2 requests already") as failure:
            client.generate(prompt)
        assert failure.value.kind == wire.ERROR_KIND_OVERLOADED
        running.abort()
        for pending in waiting:
            tiny_llama.require_greedy(prompt, pending.result())


# Requests in error

NAN = math.nan
INVALID: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -1.0}, "temperature"),
    ({"temperature": NAN}, "temperature"),
    ({"temperature": math.inf}, "temperature"),
    ({"top_p": 0.0}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"min_p": -0.1}, "min_p"),
    ({"presence_penalty": 3.0}, "presence_penalty"),
    ({"frequency_penalty": NAN}, "frequency_penalty"),
    ({"repetition_penalty": 0.0}, "repetition_penalty"),
    ({"logprobs": 1000}, "logprobs"),
    ({"prompt_logprobs": 1000}, "prompt_logprobs"),
    ({"max_tokens": 5, "min_tokens": 6}, "min_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"stop_token_ids": [VOCAB_SIZE]}, str(VOCAB_SIZE)),
    ({"logit_bias": {VOCAB_SIZE: 1.0}}, str(VOCAB_SIZE)),
    ({"logit_bias": {5: NAN}}, "logit_bias"),
    ({"n": 0}, "n is 0"),
    ({"n": 10_000}, "10000"),
    ({"prompt_len": 0}, "prompt_len"),
    ({"prompt_len": 100}, "prompt_len"),
    ({"token_ids": []}, "prompt_len"),
    ({"token_ids": [5, VOCAB_SIZE]}, str(VOCAB_SIZE)),
    ({"token_ids": [2**32 - 1]}, str(2**32 - 1)),
    ({"token_ids": [5] * 4096}, "4096"),
]


def test_a_request_in_error_is_refused_and_no_other_notices(
    tiny_llama: TinyLlama, engine_processes: EngineProcesses
) -> None:
    prompt = random_prompt(40)
    with disaggregated(engine_processes.first, engine_processes.second, tiny_llama.config()) as pair:
        lasting = pair.decode.submit(prompt, max_tokens=500, logprobs=0)
        lasting.wait_for_tokens(1)
        for request, named in INVALID:
            with pytest.raises(RequestFailed, match=named) as failure:
                pair.decode.generate(**{"token_ids": prompt} | request)
            assert failure.value.kind == wire.ERROR_KIND_INVALID, request
        tiny_llama.require_greedy(prompt, lasting.result())
        assert pair.decode.settled().counters.requests_finished == 1
