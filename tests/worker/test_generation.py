"""Requests through whole replicas, in both modes: prefixes, choices, sampling, ends, log-probabilities, pressure."""

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from tests.conftest import EngineProcesses
from tests.engine_client import Answer, EngineClient
from tests.peers.agreement import require_described
from tests.replicas import Pair, colocated, disaggregated
from tests.worker.tiny_llama import BLOCK_TOKENS, BYTES_PER_TOKEN, TinyLlama, random_prompt
from worker.config import EngineConfig
from worker.wire import engine_pb2 as wire

EOS = 1
"""Of the tiny checkpoints; so is token 3."""

SAMPLED = {"temperature": 1.5, "top_k": 8}
"""Few candidates: the random number then hardly ever falls so near to a border that rounding decides."""

MODES = ("colocated", "disaggregated")


@contextlib.contextmanager
def generating(mode: str, processes: EngineProcesses, config: EngineConfig) -> Iterator[EngineClient]:
    """A client of what generates in this mode."""
    if mode == "colocated":
        with colocated(processes.first, config) as client:
            yield client
    else:
        with pair_of(processes, config) as pair:
            yield pair.decode


def pair_of(
    processes: EngineProcesses, config: EngineConfig, **prefill_settings: Any
) -> contextlib.AbstractContextManager[Pair]:
    return disaggregated(processes.first, processes.second, config, **prefill_settings)


def in_both_modes(
    processes: EngineProcesses, config: EngineConfig, ask: Callable[[EngineClient], list[Answer]]
) -> list[Answer]:
    """Ask in both modes; the texts must be equal. Returns the disaggregated answers."""
    answers = []
    for mode in MODES:
        with generating(mode, processes, config) as client:
            answers.append(ask(client))
    texts = [[[choice.tokens for choice in answer.choices] for answer in each] for each in answers]
    assert texts[0] == texts[1]
    return answers[1]


# Prefixes


def test_only_what_the_decode_side_lacks_is_sent(tiny_llama: TinyLlama, engine_processes: EngineProcesses) -> None:
    first = random_prompt(300)
    with pair_of(engine_processes, tiny_llama.config()) as pair:
        cold = pair.decode.generate(first, max_tokens=40, logprobs=0)
        tiny_llama.require_greedy(first, cold)
        conversation = first + cold.tokens + random_prompt(25)
        branch = first[:200] + random_prompt(50)
        # What has been computed of a sequence is found again, whole blocks of it, but never its last token.
        for prompt, cached in ((first, 288), (conversation, 336), (branch, 192)):
            answer = pair.decode.generate(prompt, max_tokens=20, logprobs=0)
            tiny_llama.require_greedy(prompt, answer)
            assert answer.prompt_info.cached_tokens == cached
            transfer = answer.prompt_info.transfer
            assert transfer.payload_bytes == transfer.lower_bound_bytes == (len(prompt) - 1 - cached) * BYTES_PER_TOKEN
            assert transfer.payload_bytes > 0
        assert pair.decode.settled().counters.local_prefills == 0


def test_phases_of_a_prompt_are_told_in_order(tiny_llama: TinyLlama, engine_processes: EngineProcesses) -> None:
    """Two processes with a clock each; what the prefill replica measured lies within the transfer."""
    with pair_of(engine_processes, tiny_llama.config(max_batched_tokens=64)) as pair:
        sent = pair.decode.generate(random_prompt(300), max_tokens=1).prompt_info
        local = pair.decode.generate(random_prompt(300), max_tokens=1, prompt_logprobs=0).prompt_info
        counters = pair.decode.settled().counters
    phases = sent.phases
    assert sent.transfer.payload_bytes > 0
    assert 0 <= phases.queue_ms == phases.start_ms
    assert phases.prefill_queue_ms > 0
    assert phases.prefill_ms > 0
    assert phases.prefill_queue_ms + phases.prefill_ms < phases.transfer_ms
    assert phases.transfer_ms == pytest.approx(sent.transfer.transfer_ms)
    assert phases.transfer_ms == pytest.approx(counters.transfer_seconds * 1e3)
    assert phases.start_ms + phases.transfer_ms < phases.first_token_ms
    assert local.transfer.payload_bytes == local.phases.transfer_ms == local.phases.prefill_queue_ms == 0
    assert local.phases.prefill_ms > 0
    assert local.phases.start_ms + local.phases.prefill_ms == pytest.approx(local.phases.first_token_ms)


def test_a_prompt_that_is_cached_but_for_its_last_token_makes_no_call(
    tiny_llama: TinyLlama, engine_processes: EngineProcesses
) -> None:
    prompt = random_prompt(2 * BLOCK_TOKENS + 1)
    with pair_of(engine_processes, tiny_llama.config()) as pair:
        for cached, calls in ((0, 1), (2 * BLOCK_TOKENS, 1)):
            answer = pair.decode.generate(prompt, max_tokens=20, logprobs=0)
            tiny_llama.require_greedy(prompt, answer)
            assert answer.prompt_info.cached_tokens == cached
            assert pair.prefill.settled().counters.transfers == calls
        assert answer.prompt_info.transfer.payload_bytes == 0


def test_a_prompt_of_whole_blocks_is_never_wholly_cached(
    tiny_llama: TinyLlama, engine_processes: EngineProcesses
) -> None:
    prompt = random_prompt(4 * BLOCK_TOKENS)
    with pair_of(engine_processes, tiny_llama.config()) as pair:
        for cached in (0, 3 * BLOCK_TOKENS):
            answer = pair.decode.generate(prompt, max_tokens=20, logprobs=0)
            tiny_llama.require_greedy(prompt, answer)
            assert answer.prompt_info.cached_tokens == cached
            sent = answer.prompt_info.transfer.payload_bytes
            assert sent == (len(prompt) - 1 - cached) * BYTES_PER_TOKEN


def test_the_prefill_replica_has_a_prefix_cache_of_its_own(
    tiny_llama: TinyLlama, engine_processes: EngineProcesses
) -> None:
    prompt = random_prompt(300)
    config = tiny_llama.config(prefix_caching=False)
    with pair_of(engine_processes, config, prefix_caching=True) as pair:
        # It never sees the last of 300 tokens, and may use all of the others.
        for cached in (0, 18 * BLOCK_TOKENS):
            answer = pair.decode.generate(prompt, max_tokens=20, logprobs=0)
            tiny_llama.require_greedy(prompt, answer)
            assert answer.prompt_info.cached_tokens == 0
            assert answer.prompt_info.prefill_cached_tokens == cached
            assert answer.prompt_info.transfer.payload_bytes == 299 * BYTES_PER_TOKEN


@pytest.mark.parametrize("mode", MODES)
def test_prefixes_are_not_shared_across_salts(
    tiny_llama: TinyLlama, engine_processes: EngineProcesses, mode: str
) -> None:
    prompt = random_prompt(100)
    with generating(mode, engine_processes, tiny_llama.config()) as client:
        cached = [
            (info.cached_tokens, info.prefill_cached_tokens)
            for salt in ("", "a", "b", "a", "")
            for info in [client.generate(prompt, cache_salt=salt).prompt_info]
        ]
    again = (96, 96 if mode == "disaggregated" else 0)
    assert cached == [(0, 0), (0, 0), (0, 0), again, again]


def test_a_prompt_of_one_token_makes_no_call(tiny_llama: TinyLlama, engine_processes: EngineProcesses) -> None:
    with pair_of(engine_processes, tiny_llama.config()) as pair:
        answer = pair.decode.generate([77], max_tokens=30, logprobs=0)
        tiny_llama.require_greedy([77], answer)
        assert answer.prompt_info.transfer == wire.Transfer()
        assert pair.prefill.settled().counters.transfers == 0
        counters = pair.decode.settled().counters
        assert counters.transfers == counters.local_prefills == counters.transfers_failed == 0


def test_a_short_suffix_is_prefilled_where_it_is_needed(
    tiny_llama: TinyLlama, engine_processes: EngineProcesses
) -> None:
    """The threshold counts what the prefill replica would have to send."""
    with pair_of(engine_processes, tiny_llama.config(local_prefill_threshold=50)) as pair:
        for length, calls in ((51, 0), (52, 1)):
            prompt = random_prompt(length)
            tiny_llama.require_greedy(prompt, pair.decode.generate(prompt, logprobs=0))
            counters = pair.decode.settled().counters
            assert (counters.transfers, counters.local_prefills) == (calls, 1)


# Choices


@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 150])
def test_choices_are_told_apart_and_each_is_consistent(
    tiny_llama: TinyLlama, engine_processes: EngineProcesses, length: int
) -> None:
    """Every choice's log-probabilities are those of its own text: forks share the prompt's KV and nothing else."""
    prompt = random_prompt(length)

    def ask(client: EngineClient) -> list[Answer]:
        sampled = client.submit(prompt, n=4, **SAMPLED, seed=5, max_tokens=40, logprobs=2)
        greedy = client.submit(prompt, n=3, max_tokens=40, logprobs=2)
        alone = client.submit(prompt, **SAMPLED, seed=5, max_tokens=40, logprobs=2)
        return [sampled.result(), greedy.result(), alone.result()]

    sampled, greedy, alone = in_both_modes(engine_processes, tiny_llama.config(prefix_caching=False), ask)
    tiny_llama.require_own_logprobs(prompt, sampled)
    tiny_llama.require_greedy(prompt, greedy)
    assert len({tuple(choice.tokens) for choice in sampled.choices}) == 4
    assert alone.tokens == sampled.choices[0].tokens
    # The prompt is sent once, however many choices are made of it.
    assert sampled.prompt_info.transfer.payload_bytes == (length - 1) * BYTES_PER_TOKEN


# Sampling


def test_a_seed_decides_the_text_whatever_else_runs(tiny_llama: TinyLlama, engine_processes: EngineProcesses) -> None:
    prompts = [random_prompt(length) for length in (10, 60, 200)]
    # Few, because sums are rounded as the batch has it: of many draws one falls on the edge between two tokens.
    settings = SAMPLED | {"top_p": 0.95, "min_p": 0.01, "max_tokens": 20}

    def ask(client: EngineClient) -> list[Answer]:
        together = [client.submit(prompt, seed=seed, **settings) for prompt in prompts for seed in (1, 2)]
        answers = [pending.result() for pending in together]
        assert [client.generate(prompts[1], seed=1, **settings).tokens] == [answers[2].tokens]
        return answers

    answers = in_both_modes(engine_processes, tiny_llama.config(), ask)
    assert len({tuple(answer.tokens) for answer in answers}) == len(answers)


def test_a_resumed_request_goes_on_with_the_same_text(tiny_llama: TinyLlama, engine_processes: EngineProcesses) -> None:
    """Position, penalties and limits count from the prompt, not from what was given again."""
    prompt = random_prompt(70)
    settings = SAMPLED | {"seed": 9, "max_tokens": 40, "frequency_penalty": 0.5, "presence_penalty": 0.5}

    def ask(client: EngineClient) -> list[Answer]:
        whole = client.generate(prompt, **settings)
        resumed = client.generate(prompt + whole.tokens[:15], prompt_len=len(prompt), **settings)
        assert resumed.tokens == whole.tokens[15:]
        assert resumed.choices[0].finish_reason == wire.FINISH_REASON_LENGTH
        return [whole]

    in_both_modes(engine_processes, tiny_llama.config(), ask)


Adjust = Callable[[list[float], Sequence[int], Sequence[int]], None]
"""Changes logits in place, given prompt and generated tokens."""


def slow_greedy(model: TinyLlama, prompt: Sequence[int], count: int, adjust: Adjust) -> list[int]:
    """Greedy decoding by the book: the whole text again for every token, and plain Python on the logits."""
    generated: list[int] = []
    while len(generated) < count:
        logits = model.reference.forward([*prompt, *generated])[-1].tolist()
        adjust(logits, prompt, generated)
        generated.append(max(range(len(logits)), key=logits.__getitem__))
    return generated


def presence_and_frequency(logits: list[float], prompt: Sequence[int], generated: Sequence[int]) -> None:
    del prompt
    for token, count in Counter(generated).items():
        logits[token] -= 0.7 + 0.4 * count


def repetition(logits: list[float], prompt: Sequence[int], generated: Sequence[int]) -> None:
    for token in {*prompt, *generated}:
        logits[token] = logits[token] / 1.5 if logits[token] > 0 else logits[token] * 1.5


def bias(logits: list[float], prompt: Sequence[int], generated: Sequence[int]) -> None:
    del prompt, generated
    logits[30] += 6.5
    logits[31] -= 100.0
    logits[32] += 6.0


@pytest.mark.parametrize(
    ("adjust", "settings"),
    [
        (presence_and_frequency, {"presence_penalty": 0.7, "frequency_penalty": 0.4}),
        (repetition, {"repetition_penalty": 1.5}),
        (bias, {"logit_bias": {30: 6.5, 31: -100.0, 32: 6.0}}),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_logits_are_adjusted_as_documented(
    tiny_llama: TinyLlama, engine_processes: EngineProcesses, adjust: Adjust, settings: dict[str, Any]
) -> None:
    # Few distinct tokens, so that the most likely ones are among those that are penalised.
    prompt = [token % 40 + 4 for token in random_prompt(60)]
    expected = slow_greedy(tiny_llama, prompt, 40, adjust)
    assert expected != slow_greedy(tiny_llama, prompt, 40, lambda logits, prompt, generated: None)
    (answer,) = in_both_modes(
        engine_processes, tiny_llama.config(), lambda client: [client.generate(prompt, max_tokens=40, **settings)]
    )
    assert answer.tokens == expected


# Ends


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("length", [1, 40])
def test_the_first_token_can_be_the_last(
    tiny_llama: TinyLlama, engine_processes: EngineProcesses, mode: str, length: int
) -> None:
    prompt = random_prompt(length)
    with generating(mode, engine_processes, tiny_llama.config()) as client:
        one = client.generate(prompt, max_tokens=1, logprobs=3)
        tiny_llama.require_greedy(prompt, one)
        assert one.choices[0].finish_reason == wire.FINISH_REASON_LENGTH
        assert one.choices[0].stop_token_id is None

        ended = client.generate(prompt, max_tokens=10, logit_bias={EOS: 1000.0}, ignore_eos=False, n=2)
        for choice in ended.choices:
            assert choice.tokens == [EOS]
            assert choice.finish_reason == wire.FINISH_REASON_STOP
            assert choice.stop_token_id == EOS

        stopped = client.generate(prompt, max_tokens=10, stop_token_ids=[one.tokens[0]])
        assert stopped.tokens == one.tokens
        assert stopped.choices[0].stop_token_id == one.tokens[0]


@pytest.mark.parametrize("mode", MODES)
def test_ends_are_banned_before_min_tokens(tiny_llama: TinyLlama, engine_processes: EngineProcesses, mode: str) -> None:
    prompt = random_prompt(20)

    def ban(logits: list[float], prompt: Sequence[int], generated: Sequence[int]) -> None:
        del prompt, generated
        for token in (1, 3, 50):
            logits[token] = -math.inf

    with generating(mode, engine_processes, tiny_llama.config()) as client:
        answer = client.generate(
            prompt, max_tokens=20, min_tokens=7, ignore_eos=False, stop_token_ids=[50], logit_bias={EOS: 1000.0}
        )
        assert answer.tokens == [*slow_greedy(tiny_llama, prompt, 7, ban), EOS]
        assert answer.choices[0].stop_token_id == EOS
        ignored = client.generate(prompt, max_tokens=20, ignore_eos=True, logit_bias={EOS: 1000.0})
        assert ignored.tokens == [EOS] * 20
        assert ignored.choices[0].finish_reason == wire.FINISH_REASON_LENGTH


@pytest.mark.parametrize("mode", MODES)
def test_a_text_ends_where_the_context_ends(
    tiny_llama: TinyLlama, engine_processes: EngineProcesses, mode: str
) -> None:
    prompt = random_prompt(90)
    with generating(mode, engine_processes, tiny_llama.config(max_model_len=100)) as client:
        answer = client.generate(prompt, max_tokens=500, logprobs=0)
        tiny_llama.require_greedy(prompt, answer)
        assert len(answer.tokens) == 10
        assert answer.choices[0].finish_reason == wire.FINISH_REASON_LENGTH


# Log-probabilities of prompts


def require_prompt_logprobs(model: TinyLlama, prompt: Sequence[int], info: wire.PromptInfo) -> None:
    logprobs = torch.log_softmax(model.reference.forward(prompt), dim=-1)
    assert len(info.prompt_logprobs) == len(prompt) - 1
    for index, described in enumerate(info.prompt_logprobs):
        require_described(described, prompt[index + 1], logprobs[index], f"prompt token {index + 1}")


@pytest.mark.parametrize("mode", MODES)
def test_prompt_logprobs(tiny_llama: TinyLlama, engine_processes: EngineProcesses, mode: str) -> None:
    """They need logits of the whole prompt, so nothing is taken from a cache or from a prefill replica."""
    with generating(mode, engine_processes, tiny_llama.config(max_batched_tokens=128)) as client:
        for length in (1, 2, 128, 129, 300):
            prompt = random_prompt(length)
            for max_tokens in (20, 0):
                answer = client.generate(prompt, prompt_logprobs=3, logprobs=2, max_tokens=max_tokens, n=2)
                require_prompt_logprobs(tiny_llama, prompt, answer.prompt_info)
                assert answer.prompt_info.cached_tokens == 0
                assert [len(choice.tokens) for choice in answer.choices] == [max_tokens] * 2
                if max_tokens:
                    tiny_llama.require_greedy(prompt, answer)
        assert client.settled().counters.transfers == 0


# Pressure


@pytest.mark.parametrize("mode", MODES)
def test_preemption_changes_no_text(tiny_llama: TinyLlama, engine_processes: EngineProcesses, mode: str) -> None:
    """Six texts of up to ten blocks in a cache of 24."""
    prompts = [random_prompt(length) for length in (20, 33, 47, 64, 65, 80)]
    settings = SAMPLED | {"seed": 3, "max_tokens": 80, "logprobs": 1}
    with generating(mode, engine_processes, tiny_llama.config(blocks=600)) as client:
        expected = [client.generate(prompt, **settings).tokens for prompt in prompts]
    with generating(mode, engine_processes, tiny_llama.config(blocks=24)) as client:
        pending = [client.submit(prompt, **settings) for prompt in prompts]
        answers = [p.result() for p in pending]
        assert client.settled().counters.preemptions > 0
    for prompt, answer, tokens in zip(prompts, answers, expected, strict=True):
        assert answer.tokens == tokens
        tiny_llama.require_own_logprobs(prompt, answer)


@pytest.mark.parametrize("mode", MODES)
def test_choices_survive_preemption(tiny_llama: TinyLlama, engine_processes: EngineProcesses, mode: str) -> None:
    """Several choices of one request may wait, and be received, at the same time."""
    prompt = random_prompt(50)
    settings = SAMPLED | {"n": 6, "seed": 4, "max_tokens": 90, "logprobs": 1}
    with generating(mode, engine_processes, tiny_llama.config(prefix_caching=False)) as client:
        expected = client.generate(prompt, **settings)
    with generating(mode, engine_processes, tiny_llama.config(prefix_caching=False, blocks=25)) as client:
        answer = client.generate(prompt, **settings)
        assert client.settled().counters.preemptions > 1
    assert [choice.tokens for choice in answer.choices] == [choice.tokens for choice in expected.choices]
    tiny_llama.require_own_logprobs(prompt, answer)


@pytest.mark.parametrize("mode", MODES)
def test_prompt_logprobs_survive_preemption(
    tiny_llama: TinyLlama, engine_processes: EngineProcesses, mode: str
) -> None:
    prompts = [random_prompt(length) for length in (60, 61, 170)]
    with generating(mode, engine_processes, tiny_llama.config(blocks=20, max_batched_tokens=16)) as client:
        first = [client.submit(prompt, max_tokens=100, logprobs=0) for prompt in prompts[:2]]
        for pending in first:
            pending.wait_for_tokens(1)
        last = client.submit(prompts[2], max_tokens=5, logprobs=0, prompt_logprobs=1)
        for prompt, pending in zip(prompts, [*first, last], strict=True):
            tiny_llama.require_greedy(prompt, pending.result())
        require_prompt_logprobs(tiny_llama, prompts[2], last.result().prompt_info)


@pytest.mark.parametrize("mode", MODES)
def test_many_requests_of_which_a_quarter_is_cancelled(
    tiny_llama: TinyLlama, engine_processes: EngineProcesses, mode: str
) -> None:
    lengths = [5 + 29 * index % 400 for index in range(64)]
    prompts = [random_prompt(length, seed) for seed, length in enumerate(lengths)]
    with generating(mode, engine_processes, tiny_llama.config(blocks=400, max_batched_tokens=256)) as client:
        pending = [client.submit(prompt, max_tokens=24, logprobs=0) for prompt in prompts]
        for index in range(1, 64, 4):
            if index % 8 == 1:
                pending[index].wait_for_tokens(5)
            pending[index].abort()
        for index, prompt in enumerate(prompts):
            if index % 4 != 1:
                answer = pending[index].result()
                tiny_llama.require_greedy(prompt, answer)
                assert len(answer.tokens) == 24
        counters = client.settled().counters
        assert counters.requests_failed == 0
        # A text may end before its cancellation arrives.
        assert counters.requests_finished + counters.requests_aborted == 64
        assert counters.requests_finished >= 48
