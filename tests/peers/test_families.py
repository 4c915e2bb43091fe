"""Every tiny family as replicas: the reference's tokens colocated and disaggregated, cached or not; the bytes moved."""

from dataclasses import replace

import pytest
import torch

from tests.conftest import EVERY_PAIR, EngineProcesses
from tests.peers.family_case import PROMPT_LENGTHS, Case
from tests.replicas import colocated, disaggregated
from tests.tiny_families import FAMILIES


@pytest.fixture(scope="module", params=FAMILIES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    torch.set_num_threads(1)
    family = FAMILIES[request.param]
    directory = family.write(tmp_path_factory.mktemp(request.param))
    return Case(request.param, directory, family.load(directory))


def test_colocated_with_and_without_a_cached_prefix(case: Case, engine_processes: EngineProcesses) -> None:
    """The second time the prompts begin in the cache, where the family's layers allow it."""
    with colocated(engine_processes.first, case.config(block_size=16)) as client:
        first, second = case.require_answers(client), case.require_answers(client)
        assert [answer.prompt_info.cached_tokens for answer in first] == [0] * len(first)
        cached = [answer.prompt_info.cached_tokens for answer in second]
        assert cached[-1] > 0, "a long prompt that was just computed begins in the cache"
        assert all(c < length for c, length in zip(cached, PROMPT_LENGTHS, strict=True))


EQUAL_BLOCKS = {
    *("mistral_sliding", "gemma4_shared", "gemma4_moe", "qwen3_next", "qwen3_moe", "hunyuan_large_cla", "hunyuan_moe"),
    *("deepseek_v2_lite", "deepseek_v3", "mistral_large4"),
}
"""Families whose two sides have blocks of one size; those of the others differ. Layers of every kind are in both."""


def block_sizes(family: str) -> list[tuple[int, int]]:
    """Of the prefill and the decode replica."""
    equal, different = (16, 16), (8, 24)
    return [equal, different] if EVERY_PAIR else [equal if family in EQUAL_BLOCKS else different]


def test_disaggregated(case: Case, engine_processes: EngineProcesses) -> None:
    for prefill_block, decode_block in block_sizes(case.name):
        config = case.config(decode_block)
        with disaggregated(engine_processes.first, engine_processes.second, config, block_size=prefill_block) as pair:
            answers = case.require_answers(pair.decode)
            for length, answer in zip(PROMPT_LENGTHS, answers, strict=True):
                transfer = answer.prompt_info.transfer
                moved = (transfer.payload_bytes, transfer.lower_bound_bytes)
                assert moved == (case.moved(length),) * 2, f"prompt of {length}"
            counters = pair.decode.settled().counters
            assert counters.payload_bytes == pair.prefill.settled().counters.payload_bytes > 0
            # A prompt of one token needs nobody, unless the model has tokens of its own before it.
            assert counters.transfers == len(PROMPT_LENGTHS) - (case.prefix == 0)
            assert counters.transfers_failed == counters.stale_pieces == counters.retransmitted_bytes == 0

            # What the decode replica holds by now is not sent again, and what is sent still gives the same tokens.
            again = case.require_answers(pair.decode)
            for answer, before in zip(again, answers, strict=True):
                assert answer.prompt_info.transfer.payload_bytes <= before.prompt_info.transfer.payload_bytes


def test_prompts_that_outgrow_the_cache_are_preempted_and_finish(case: Case, engine_processes: EngineProcesses) -> None:
    """With room for little more than one long sequence, everything still ends with the right tokens."""
    config = replace(case.config(block_size=16), kv_cache_memory=1 << 20)
    with colocated(engine_processes.first, config) as client:
        case.require_answers(client)
