"""Requests of different salts never see each other's prefixes: not on either side, and not in what is sent."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.router import PREFIX_TOKENS, PrefixIndex, Target, choose
from tests.conftest import EngineProcesses
from tests.engine_client import Answer
from tests.replicas import colocated, disaggregated
from tests.worker.tiny_llama import BYTES_PER_TOKEN, TinyLlama, random_prompt

LONG = 321
HELD = 320


def seen(answer: Answer) -> tuple[int, int, int]:
    """All that usage tells of caches: tokens held on either side, and bytes sent."""
    info = answer.prompt_info
    assert info.transfer.payload_bytes == info.transfer.lower_bound_bytes
    return info.cached_tokens, info.prefill_cached_tokens, info.transfer.payload_bytes


def test_a_prompt_of_another_tenant_looks_like_one_that_nobody_sent(
    tiny_llama: TinyLlama, engine_processes: EngineProcesses
) -> None:
    prompt = random_prompt(LONG)
    new, held = (0, 0, (LONG - 1) * BYTES_PER_TOKEN), (HELD, 0, 0)
    with disaggregated(engine_processes.first, engine_processes.second, tiny_llama.config()) as pair:

        def ask(salt: str, tokens: Sequence[int] = prompt) -> Answer:
            answer = pair.decode.generate(tokens, max_tokens=4, cache_salt=salt, logprobs=0)
            tiny_llama.require_greedy(tokens, answer)
            return answer

        for salt in ("", "alice", "bob", "alic", "alice\0", "bob:"):
            assert seen(ask(salt)) == new, salt
            assert seen(ask(salt)) == held, salt
        # Longer prompts that begin alike, and generated tokens, are shared within a salt alone.
        longer = [*prompt, *random_prompt(32)]
        assert ask("alice", longer).prompt_info.cached_tokens == HELD
        assert seen(ask("carol", longer)) == (0, 0, (len(longer) - 1) * BYTES_PER_TOKEN)


def test_the_prefill_side_keeps_tenants_apart_as_well(tiny_llama: TinyLlama, engine_processes: EngineProcesses) -> None:
    """A decode replica without a prefix cache asks for everything: what is found then was found on the other side."""
    prompt = random_prompt(LONG)
    with disaggregated(
        engine_processes.first, engine_processes.second, tiny_llama.config(prefix_caching=False), prefix_caching=True
    ) as pair:
        for salt, found in (("", 0), ("alice", 0), ("bob", 0), ("alice", HELD), ("", HELD), ("carol", 0)):
            answer = pair.decode.generate(prompt, max_tokens=2, cache_salt=salt)
            cached, found_there, sent = seen(answer)
            assert (cached, sent) == (0, (LONG - 1) * BYTES_PER_TOKEN)
            # The prefill side computes all but the prompt's last token.
            assert found_there == found, salt


def test_a_colocated_engine_keeps_tenants_apart(tiny_llama: TinyLlama, engine_processes: EngineProcesses) -> None:
    prompt = random_prompt(LONG)
    with colocated(engine_processes.first, tiny_llama.config()) as client:
        for salt, held in (("alice", 0), ("bob", 0), ("alice", HELD), ("", 0)):
            assert client.generate(prompt, max_tokens=2, cache_salt=salt).prompt_info.cached_tokens == held


def test_requests_at_the_same_time_are_kept_apart(tiny_llama: TinyLlama, engine_processes: EngineProcesses) -> None:
    prompt = random_prompt(LONG)
    with disaggregated(engine_processes.first, engine_processes.second, tiny_llama.config()) as pair:
        pending = [pair.decode.submit(prompt, max_tokens=4, cache_salt=f"tenant-{number}") for number in range(6)]
        for each in pending:
            assert seen(each.result()) == (0, 0, (LONG - 1) * BYTES_PER_TOKEN)


@given(
    tokens=st.lists(st.integers(0, 100), min_size=PREFIX_TOKENS, max_size=4 * PREFIX_TOKENS),
    mine=st.text(max_size=3),
    theirs=st.text(max_size=3),
)
def test_where_others_prompts_went_does_not_decide_where_mine_goes(tokens: list[int], mine: str, theirs: str) -> None:
    index = PrefixIndex()
    # The second is a little busier, so only a remembered prefix makes a prompt go there.
    assert choose([Target("b", 0.0)], index, tokens, theirs) == "b"
    chosen = choose([Target("a", 0.0), Target("b", 1.0)], index, tokens, mine)
    assert chosen == ("b" if mine == theirs else "a")


@pytest.mark.parametrize("salt", ["x" * 256, "ü" * 256])
def test_any_salt_can_be_had(salt: str, tiny_llama: TinyLlama, engine_processes: EngineProcesses) -> None:
    with colocated(engine_processes.first, tiny_llama.config()) as client:
        assert client.generate(random_prompt(40), max_tokens=1, cache_salt=salt).prompt_info.cached_tokens == 0
