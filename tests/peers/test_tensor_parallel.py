"""Replicas of several ranks: the reference's tokens, whatever the two sides are split over, and not a byte too many.

Every rank is a process and the ranks of a replica are a real process group. ``CROSSKV_EVERY_PAIR=1`` runs every pair of
sizes over both transports (``make test-tensor-parallel``); without it a subset covers every size on either side, every
kind of layer and both transports.
"""

from dataclasses import replace
from itertools import product

import pytest
import torch

from kv_transfer.transport import Transport
from tests.conftest import EVERY_PAIR
from tests.engine_process import EngineProcess, RankProcesses
from tests.peers.family_case import PROMPT_LENGTHS, Case
from tests.replicas import colocated, disaggregated
from tests.tiny_families import FAMILIES, of_transformers

QWEN3 = of_transformers("Qwen3Config", "Qwen3ForCausalLM", num_hidden_layers=4, head_dim=24)
MODELS = {name: FAMILIES[name] for name in ("gemma3n", "deepseek_v3", "deepseek_v32", "qwen3_next")} | {"qwen3": QWEN3}
SIZES = (1, 2, 4)

Run = tuple[str, int, int, Transport]
SUBSET: list[Run] = [
    ("qwen3", 1, 4, Transport.GRPC),
    ("qwen3", 4, 2, Transport.TORCH),
    ("gemma3n", 4, 1, Transport.TORCH),
    ("gemma3n", 1, 2, Transport.GRPC),
    ("deepseek_v3", 2, 1, Transport.GRPC),
    ("deepseek_v32", 4, 2, Transport.GRPC),
    ("qwen3_next", 2, 4, Transport.TORCH),
    ("qwen3_next", 2, 1, Transport.GRPC),
]
RUNS = [*product(MODELS, SIZES, SIZES, Transport)] if EVERY_PAIR else SUBSET


def _name(value: object) -> str:
    return value.value if isinstance(value, Transport) else str(value)


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    torch.set_num_threads(1)
    made = {}
    for name, family in MODELS.items():
        directory = family.write(tmp_path_factory.mktemp(name) / "model")
        made[name] = Case(name, directory, family.load(directory))
    return made


@pytest.mark.parametrize(("name", "prefill_ranks", "decode_ranks", "transport"), RUNS, ids=_name)
def test_every_pair_gives_the_references_tokens_and_moves_the_lower_bound(
    name: str,
    prefill_ranks: int,
    decode_ranks: int,
    transport: Transport,
    cases: dict[str, Case],
    rank_pool: list[EngineProcess],
) -> None:
    case = cases[name]
    prefill = RankProcesses(rank_pool[:prefill_ranks])
    decode = RankProcesses(rank_pool[-decode_ranks:])
    config = replace(case.config(block_size=24), transport=transport)
    with disaggregated(prefill, decode, config, block_size=8) as pair:
        answers = case.require_answers(pair.decode)
        for length, answer in zip(PROMPT_LENGTHS, answers, strict=True):
            transfer = answer.prompt_info.transfer
            moved = (transfer.payload_bytes, transfer.lower_bound_bytes)
            assert moved == (case.moved(length, decode_ranks),) * 2, f"prompt of {length}"
        total = sum(case.moved(length, decode_ranks) for length in PROMPT_LENGTHS)
        # Followers tell what they counted a little later than what they did.
        for client in (pair.decode, pair.prefill):
            client.wait_for_status(lambda status: status.counters.payload_bytes == total)
        counters = pair.decode.settled().counters
        assert counters.transfers == len(PROMPT_LENGTHS) - 1
        assert counters.transfers_failed == counters.stale_pieces == counters.retransmitted_bytes == 0
        # What the decode replica holds by now is not sent again.
        again = case.require_answers(pair.decode)
        assert all(
            later.prompt_info.transfer.payload_bytes <= first.prompt_info.transfer.payload_bytes
            for later, first in zip(again, answers, strict=True)
        )


@pytest.mark.parametrize(
    ("name", "ranks"),
    [*product(MODELS, SIZES[1:])] if EVERY_PAIR else [("gemma3n", 2), ("deepseek_v32", 4), ("qwen3_next", 2)],
    ids=str,
)
def test_colocated(name: str, ranks: int, cases: dict[str, Case], rank_pool: list[EngineProcess]) -> None:
    with colocated(RankProcesses(rank_pool[:ranks]), cases[name].config(block_size=16)) as client:
        cases[name].require_answers(client)
        # The second time the prompts begin in the cache, and more choices than one are copied there on every rank.
        cases[name].require_answers(client)
        prompt = cases[name].prompts[-1]
        several = client.generate(prompt, n=3, max_tokens=8)
        alone = client.generate(prompt, max_tokens=8)
        assert [choice.tokens for choice in several.choices] == [alone.tokens] * 3


@pytest.mark.parametrize("name", MODELS if EVERY_PAIR else ("qwen3", "gemma3n"))
def test_prompts_that_outgrow_the_cache_are_preempted_on_every_rank(
    name: str, cases: dict[str, Case], rank_pool: list[EngineProcess]
) -> None:
    # Room for the longest prompt and its answer, not for all at once; with index keys a block is twice as large.
    memory = 1 << (20 if name == "deepseek_v32" else 19)
    config = replace(cases[name].config(block_size=16), kv_cache_memory=memory)
    with colocated(RankProcesses(rank_pool[:2]), config) as client:
        cases[name].require_answers(client)
