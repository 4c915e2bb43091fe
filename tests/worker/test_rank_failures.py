"""Replicas of several ranks that lose one: they are over within seconds, and nobody else loses a block or a token."""

import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.conftest import EngineProcesses
from tests.engine_process import EngineProcess, EngineProcessFailed, RankProcesses
from tests.replicas import connected
from tests.worker.long_transfer import LONG, SLOWLY, decode_config, prefill_config
from tests.worker.tiny_llama import TinyLlama

pytestmark = pytest.mark.replicas

NOTICED_SECONDS = 5.0


@pytest.fixture
def doomed(tmp_path: Path) -> Iterator[RankProcesses]:
    """Two processes that the test may kill."""
    with ExitStack() as stack:
        processes = [stack.enter_context(EngineProcess(tmp_path / f"{number}.log")) for number in range(2)]
        yield RankProcesses(processes)
        for process in processes:
            print(process.new_output())


def wait_until_unhealthy(replica: RankProcesses) -> float:
    """Seconds until a supervisor that asks would know that the replica needs new processes."""
    started = time.monotonic()
    while time.monotonic() - started < NOTICED_SECONDS:
        try:
            replica.require_health()
        except EngineProcessFailed:
            return time.monotonic() - started
        time.sleep(0.02)
    raise AssertionError(f"nobody noticed within {NOTICED_SECONDS} s")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP])
def test_a_decode_replica_whose_follower_dies_is_over_and_its_prefill_replica_keeps_every_block(
    tiny_llama: TinyLlama, engine_processes: EngineProcesses, doomed: RankProcesses, number: int
) -> None:
    prefill = engine_processes.first
    prefill_record = prefill.start(prefill_config(tiny_llama.config(), **SLOWLY))
    record = doomed.start(decode_config(tiny_llama.config()))
    doomed.use_prefill_replicas(prefill_record)
    with connected(record) as client, connected(prefill_record) as prefill_client:
        running = client.submit([77], max_tokens=2000)
        running.wait_for_tokens(1)
        arriving = client.submit(LONG)
        client.wait_for_status(lambda status: status.load.receiving_requests > 0)
        doomed.processes[1].signal(number)
        # At once, although the leading rank's process lives and its engine may be stuck in a step with a stopped one.
        for pending in (running, arriving):
            with pytest.raises(ConnectionError, match="UNAVAILABLE"):
                pending.result(NOTICED_SECONDS)
        wait_until_unhealthy(doomed)
        # What a supervisor does then.
        doomed.processes[0].signal(signal.SIGKILL)
        prefill_client.settled()
        prefill.require_health()
    prefill.stop_replica()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_prefill_replica_whose_follower_dies_is_replaced_by_the_decode_replica_itself(
    tiny_llama: TinyLlama, engine_processes: EngineProcesses, doomed: RankProcesses, number: int
) -> None:
    decode = engine_processes.second
    prefill_record = doomed.start(prefill_config(tiny_llama.config(), **SLOWLY))
    with connected(decode.start(decode_config(tiny_llama.config()))) as client:
        decode.use_prefill_replicas(prefill_record)
        pending = client.submit(LONG, logprobs=0)
        client.wait_for_status(lambda status: status.counters.payload_bytes > 0)
        doomed.processes[1].signal(number)
        wait_until_unhealthy(doomed)
        tiny_llama.require_greedy(LONG, pending.result())
        assert client.settled().counters.transfers_failed >= 1
        decode.require_health()
    decode.stop_replica()
