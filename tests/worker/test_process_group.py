"""Replicas whose KV travels over process groups, undisturbed and under misfortune."""

import signal

import pytest

from kv_transfer.transport import Transport
from tests.conftest import EngineProcesses
from tests.engine_process import EngineProcess
from tests.replicas import connected, disaggregated
from tests.worker.long_transfer import LONG, SLOWLY, decode_config, is_halfway, prefill_config
from tests.worker.tiny_llama import BYTES_PER_TOKEN, TinyLlama, random_prompt

pytestmark = pytest.mark.replicas

TORCH = {"transport": Transport.TORCH}


def test_many_prompts_at_once(tiny_llama: TinyLlama, engine_processes: EngineProcesses) -> None:
    prompts = [random_prompt(length) for length in (1, 2, 33, 150, 700, 20, 90, 3)]
    config = tiny_llama.config(**TORCH, max_piece_bytes=5000)
    with disaggregated(engine_processes.first, engine_processes.second, config) as pair:
        pending = [pair.decode.submit(prompt, logprobs=0) for prompt in prompts]
        for prompt, answer in zip(prompts, (p.result() for p in pending), strict=True):
            tiny_llama.require_greedy(prompt, answer)
            transfer = answer.prompt_info.transfer
            assert transfer.payload_bytes == transfer.lower_bound_bytes == (len(prompt) - 1) * BYTES_PER_TOKEN
        counters = pair.decode.settled().counters
        assert (counters.transfers, counters.transfers_failed, counters.local_prefills) == (7, 0, 0)
        sent = pair.prefill.settled().counters
        assert counters.payload_bytes == sent.payload_bytes == sum(len(p) - 1 for p in prompts) * BYTES_PER_TOKEN
        assert sent.payload_bytes < sent.wire_bytes < 1.15 * sent.payload_bytes + 30_000


def test_a_prefill_replica_that_is_killed(
    tiny_llama: TinyLlama, engine_processes: EngineProcesses, doomed: EngineProcess
) -> None:
    decode, config = engine_processes.second, tiny_llama.config(**TORCH)
    victim = doomed.start(prefill_config(config, **SLOWLY))
    with connected(decode.start(decode_config(config))) as client:
        decode.use_prefill_replicas(victim)
        running = client.submit([77], max_tokens=2000, logprobs=0)
        running.wait_for_tokens(1)
        pending = client.submit(LONG, logprobs=0)
        client.wait_for_status(is_halfway)
        doomed.signal(signal.SIGKILL)
        answer = pending.result()
        tiny_llama.require_greedy(LONG, answer)
        assert answer.prompt_info.transfer.payload_bytes == 0
        assert answer.prompt_info.transfer.retransmitted_bytes > 0
        tiny_llama.require_greedy([77], running.result())
        decode.require_health()
        counters = client.settled().counters
        assert (counters.transfers, counters.transfers_failed, counters.local_prefills) == (0, 1, 1)
        # Another one is used as if nothing had been.
        survivor = engine_processes.first.start(prefill_config(config, **SLOWLY))
        decode.use_prefill_replicas(survivor)
        answer = client.generate(random_prompt(50), logprobs=0)
        tiny_llama.require_greedy(random_prompt(50), answer)
        assert answer.prompt_info.transfer.prefill_replica == survivor.incarnation
    decode.stop_replica()
    engine_processes.first.stop_replica()


def test_a_prefill_replica_that_hangs_is_given_up(
    tiny_llama: TinyLlama, engine_processes: EngineProcesses, doomed: EngineProcess
) -> None:
    decode, config = engine_processes.second, tiny_llama.config(**TORCH)
    victim = doomed.start(prefill_config(config, **SLOWLY))
    with connected(decode.start(decode_config(config))) as client:
        decode.use_prefill_replicas(victim)
        pending = client.submit(LONG, logprobs=0)
        client.wait_for_status(is_halfway)
        doomed.signal(signal.SIGSTOP)
        tiny_llama.require_greedy(LONG, pending.result())
        counters = client.settled().counters
        assert (counters.transfers_failed, counters.local_prefills) == (1, 1)
        decode.require_health()
    decode.stop_replica()


def test_a_decode_replica_that_is_killed_leaves_nothing_behind(
    tiny_llama: TinyLlama, engine_processes: EngineProcesses, doomed: EngineProcess
) -> None:
    prefill, config = engine_processes.first, tiny_llama.config(**TORCH)
    prefill_record = prefill.start(prefill_config(config, **SLOWLY))
    with connected(prefill_record) as prefill_client:
        with connected(doomed.start(decode_config(config))) as client:
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


def test_a_cancelled_request_frees_everything_and_disturbs_nobody(
    tiny_llama: TinyLlama, engine_processes: EngineProcesses
) -> None:
    config = tiny_llama.config(**TORCH)
    other = random_prompt(1000)
    with disaggregated(engine_processes.first, engine_processes.second, config, **SLOWLY) as pair:
        doomed, lasting = pair.decode.submit(LONG), pair.decode.submit(other, logprobs=0)
        pair.decode.wait_for_status(is_halfway)
        doomed.abort()
        answer = lasting.result()
        tiny_llama.require_greedy(other, answer)
        assert answer.prompt_info.transfer.attempts == 1
        assert pair.prefill.settled().counters.requests_aborted == 1
        counters = pair.decode.settled().counters
        assert (counters.requests_aborted, counters.transfers, counters.transfers_failed) == (1, 1, 0)


@pytest.mark.parametrize("ours", Transport)
def test_replicas_with_different_transports_do_not_exchange(
    tiny_llama: TinyLlama, engine_processes: EngineProcesses, ours: Transport
) -> None:
    (theirs,) = set(Transport) - {ours}
    prefill, decode = engine_processes.first, engine_processes.second
    prefill_record = prefill.start(prefill_config(tiny_llama.config(transport=theirs), **SLOWLY))
    with connected(decode.start(decode_config(tiny_llama.config(transport=ours)))) as client:
        decode.use_prefill_replicas(prefill_record)
        client.generate(random_prompt(20))
        status = client.settled()
        assert status.load.prefill_peers == 0
        assert "--transport" in status.prefill_error
        assert theirs.value in status.prefill_error
        assert status.counters.local_prefills == 1
    decode.stop_replica()
    prefill.stop_replica()
