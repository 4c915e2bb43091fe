"""Families with all kinds of layers over process groups: the reference's tokens, and not a byte more than needed."""

from dataclasses import replace

import pytest
import torch

from kv_transfer.transport import Transport
from tests.conftest import EngineProcesses
from tests.peers.test_families import PROMPT_LENGTHS, Case
from tests.replicas import disaggregated
from tests.tiny_families import FAMILIES


@pytest.mark.parametrize("name", ["mistral_sliding", "gemma3n", "qwen3_next", "hymba"])
def test_disaggregated(name: str, engine_processes: EngineProcesses, tmp_path_factory: pytest.TempPathFactory) -> None:
    torch.set_num_threads(1)
    directory = FAMILIES[name].write(tmp_path_factory.mktemp(name))
    case = Case(name, directory, FAMILIES[name].load(directory))
    config = replace(case.config(block_size=24), transport=Transport.TORCH)
    with disaggregated(engine_processes.first, engine_processes.second, config, block_size=8) as pair:
        answers = case.require_answers(pair.decode)
        for length, answer in zip(PROMPT_LENGTHS, answers, strict=True):
            transfer = answer.prompt_info.transfer
            moved = (transfer.payload_bytes, transfer.lower_bound_bytes)
            assert moved == (case.moved(length),) * 2, f"prompt of {length}"
        counters = pair.decode.settled().counters
        sent = pair.prefill.settled().counters
        assert counters.payload_bytes == sent.payload_bytes > 0
        assert counters.transfers_failed == counters.stale_pieces == counters.retransmitted_bytes == 0
        # What the kernel saw on the group's socket and on the streams'.
        assert sent.wire_bytes > sent.payload_bytes
