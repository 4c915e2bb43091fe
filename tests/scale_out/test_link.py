"""A cable between a prefill and a decode replica is pulled in the middle of a transfer, and plugged in again."""

import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from kv_transfer.transport import Transport
from tests.engine_process import EngineProcess
from tests.peers.reference import Reference
from tests.replicas import connected
from tests.scale_out.hosts import Host, hosts
from tests.tiny_checkpoints import write_tiny
from tests.worker.tiny_llama import LAYERS, TinyLlama, random_prompt
from worker.config import Role

LONG = random_prompt(3000)
SHORT = random_prompt(100)
NOTICED_SECONDS = 5.0
SECONDS = 60.0


@pytest.fixture(scope="module")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> TinyLlama:
    torch.set_num_threads(1)
    checkpoint = write_tiny("llama", tmp_path_factory.mktemp("tiny-llama"), num_hidden_layers=LAYERS)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    return TinyLlama(checkpoint, Reference(model))


@pytest.fixture
def two_hosts() -> Iterator[tuple[Host, ...]]:
    with hosts(2) as both:
        yield both


@pytest.mark.parametrize("transport", Transport)
def test_a_link_is_cut_and_restored(
    tiny_llama: TinyLlama, two_hosts: tuple[Host, ...], tmp_path: Path, transport: Transport
) -> None:
    there, here = two_hosts
    root = Path.cwd()
    config = replace(tiny_llama.config(transport=transport), threads=1)
    with (
        EngineProcess(tmp_path / "prefill.log", partial(there.command, directory=root)) as prefill,
        EngineProcess(tmp_path / "decode.log", partial(here.command, directory=root)) as decode,
    ):
        slow = replace(config, role=Role.PREFILL, advertised_host=there.address, max_batched_tokens=2)
        prefill_record = prefill.start(slow)
        decode_record = decode.start(replace(config, role=Role.DECODE, advertised_host=here.address))
        decode.use_prefill_replicas(prefill_record)
        with connected(decode_record) as client:
            pending = client.submit(LONG, logprobs=0)
            client.wait_for_status(lambda s: s.load.receiving_requests > 0 and s.counters.payload_bytes > 0)
            there.cut()
            cut = time.monotonic()
            client.wait_for_status(lambda status: status.counters.transfers_failed > 0)
            assert time.monotonic() - cut < NOTICED_SECONDS
            tiny_llama.require_greedy(LONG, pending.result())
            assert client.settled().counters.local_prefills == 1
            there.restore()
            deadline = time.monotonic() + SECONDS
            while True:
                answer = client.generate(SHORT, cache_salt=str(time.monotonic()), logprobs=0)
                tiny_llama.require_greedy(SHORT, answer)
                if answer.prompt_info.transfer.prefill_replica == prefill_record.incarnation:
                    break
                assert time.monotonic() < deadline, "it is not used again"
            client.settled()
            decode.require_health()
            with connected(prefill_record) as prefill_client:
                prefill_client.settled()
            prefill.require_health()
