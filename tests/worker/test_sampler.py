from collections.abc import Iterable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from worker.grammar.constraint import Next, mask_of
from worker.sampler import sample, token_logprobs, uniform
from worker.sampling_params import SamplingParams
from worker.scheduler import Draw
from worker.sequence import RequestId, Sequence

FloatArray = npt.NDArray[np.float64]


@dataclass
class Held:
    """Stands for a constraint that knows what may follow."""

    next: Next


def counters(values: Iterable[int]) -> npt.NDArray[np.uint64]:
    return np.array(list(values), dtype=np.uint64)


def draw(
    row: int,
    *,
    prompt: tuple[int, ...] = (0,),
    generated: tuple[int, ...] = (),
    choice: int = 0,
    eos: frozenset[int] = frozenset(),
    **sampling: Any,
) -> Draw:
    sequence = Sequence(
        request_id=RequestId("r"),
        choice=choice,
        tokens=[*prompt, *generated],
        prompt_len=len(prompt),
        sampling=SamplingParams(**{"max_tokens": 100, **sampling}),
        salt="",
        arrival=0.0,
        deadline=0.0,
        eos_token_ids=eos,
    )
    return Draw(row, sequence, choice)


def softmax(logits: FloatArray) -> FloatArray:
    weights = np.exp(logits - logits.max())
    return np.asarray(weights / weights.sum())


def require_frequencies(observed: npt.NDArray[np.int64], probabilities: FloatArray) -> None:
    """Pearson's chi-square test at about one in three million, by Wilson and Hilferty's approximation.

    It needs a few of everything: the rarest outcomes count as one, of which at least 5 are expected.
    """
    assert not observed[probabilities == 0].any()
    order = np.argsort(probabilities)
    expected, counts = probabilities[order] * observed.sum(), observed[order]
    common = int(np.searchsorted(expected.cumsum(), 5.0)) + 1
    expected = np.array([expected[:common].sum(), *expected[common:]])
    counts = np.array([counts[:common].sum(), *counts[common:]])
    freedom = len(expected) - 1
    if freedom == 0:
        return
    statistic = ((counts - expected) ** 2 / expected).sum()
    assert statistic < freedom * (1 - 2 / (9 * freedom) + 5 * (2 / (9 * freedom)) ** 0.5) ** 3


# The numbers behind the tokens


@pytest.mark.parametrize("varied", range(3), ids=["seed", "choice", "position"])
@pytest.mark.parametrize("first", [0, 2**64 - 40_000])
def test_uniform_numbers_are_uniform_whichever_counter_runs(varied: int, first: int) -> None:
    running = counters(range(first, first + 40_000))
    columns = [np.full_like(running, 7)] * 3
    columns[varied] = running
    numbers = uniform(*columns)
    assert ((numbers >= 0) & (numbers < 1)).all()
    assert len(np.unique(numbers)) == len(numbers)
    require_frequencies(np.bincount((numbers * 100).astype(int), minlength=100), np.full(100, 0.01))
    # Neighbours tell nothing about each other.
    pairs = (numbers[:-1] * 10).astype(int) * 10 + (numbers[1:] * 10).astype(int)
    require_frequencies(np.bincount(pairs[::2], minlength=100), np.full(100, 0.01))


def test_uniform_numbers_are_the_same_everywhere() -> None:
    # Changing them changes the text of every seeded request: only on purpose.
    numbers = uniform(counters([0, 1, 2**64 - 1]), counters([0, 2, 5]), counters([0, 3, 10**6]))
    assert numbers.tolist() == [0.13870941014555427, 0.5211329322530508, 0.5129239603420331]


@given(
    counts=st.lists(st.tuples(*[st.integers(0, 2**64 - 1)] * 3), min_size=1, max_size=5),
)
@settings(deadline=None)
def test_a_number_depends_on_its_own_counters_only(counts: list[tuple[int, int, int]]) -> None:
    together = uniform(*(counters(column) for column in zip(*counts, strict=True)))
    alone = [uniform(*(counters([value]) for value in row))[0] for row in counts]
    assert together.tolist() == alone


# Random draws


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_frequencies_are_the_softmax_of_the_logits(temperature: float) -> None:
    logits = np.array([2.0, -1.0, 0.5, 0.5, -3.0, 1.2])
    draws = [draw(0, seed=seed, temperature=temperature) for seed in range(4000)]
    tokens = sample(torch.tensor(logits, dtype=torch.float32)[None], draws)
    require_frequencies(np.bincount(tokens, minlength=6), softmax(logits / temperature))


def test_frequencies_after_filters_are_the_softmax_of_what_is_left() -> None:
    logits = np.log([0.3, 0.05, 0.25, 0.02, 0.2, 0.18])
    draws = [draw(0, seed=seed, top_k=4, top_p=0.85) for seed in range(4000)]
    tokens = sample(torch.tensor(logits, dtype=torch.float32)[None], draws)
    # Of 0.3, 0.25, 0.2, 0.18 the first three make up 0.81, so the fourth is still needed.
    kept = np.array([0.3, 0, 0.25, 0, 0.2, 0.18])
    require_frequencies(np.bincount(tokens, minlength=6), kept / kept.sum())


def naive_support(logits: FloatArray, top_k: int, top_p: float, min_p: float) -> set[int]:
    """Tokens that may be drawn: the most likely k, of these as few as reach p, and none that is too unlikely."""
    order = sorted(range(len(logits)), key=lambda token: -logits[token])[: top_k or len(logits)]
    probabilities = softmax(logits[order])
    kept: set[int] = set()
    mass = 0.0
    for token, probability in zip(order, probabilities, strict=True):
        assume(top_p == 1.0 or abs(mass - top_p) > 1e-4)
        assume(not kept or not min_p or abs(probability / probabilities[0] - min_p) > 1e-4)
        if kept and (mass >= top_p < 1 or probability < min_p * probabilities[0]):
            break
        kept.add(token)
        mass += probability
    return kept


@given(
    logits=st.lists(st.integers(-40, 40), min_size=1, max_size=9, unique=True),
    temperature=st.sampled_from([0.6, 1.0, 1.7]),
    top_k=st.sampled_from([0, 0, 1, 2, 4, 100]),
    top_p=st.sampled_from([1.0, 1.0, 0.95, 0.6, 0.3, 1e-6]),
    min_p=st.sampled_from([0.0, 0.0, 0.02, 0.3, 1.0]),
)
@settings(max_examples=100, deadline=None)
def test_filters_keep_what_they_should(
    logits: list[int], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    scaled = np.array(logits) / 10 / temperature
    support = naive_support(scaled, top_k, top_p, min_p)
    draws = [draw(0, seed=seed, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p) for seed in range(200)]
    tokens = set(sample(torch.tensor(logits, dtype=torch.float32)[None] / 10, draws))
    assert tokens <= support
    left = {token: probability for token, probability in enumerate(softmax(scaled)) if token in support}
    likely = {token for token, probability in left.items() if probability / sum(left.values()) > 0.1}
    assert tokens >= likely  # each is missed with a probability of 1e-9


@given(
    seed=st.integers(0, 999),
    steps=st.sampled_from([3, 40, 4000]),
    spread=st.sampled_from([0.05, 1.0, 6.0]),
    top_k=st.sampled_from([0, 1, 8, 255, 256, 257, 700]),
    top_p=st.sampled_from([1.0, 0.9, 0.3]),
    min_p=st.sampled_from([0.0, 0.0, 0.2]),
)
@settings(max_examples=50, deadline=None)
def test_filters_of_large_vocabularies_keep_what_they_should(
    seed: int, steps: int, spread: float, top_k: int, top_p: float, min_p: float
) -> None:
    """Many or few tokens are left, and many or few are equally likely: then those with lower ids are kept."""
    logits = np.round(np.random.default_rng(seed).normal(size=1000) * spread * steps) / steps
    logits = logits.astype(np.float32).astype(np.float64)
    support = naive_support(logits, top_k, top_p, min_p)
    draws = [draw(0, seed=number, top_k=top_k, top_p=top_p, min_p=min_p) for number in range(1000)]
    tokens = sample(torch.tensor(logits, dtype=torch.float32)[None], draws)
    assert support >= set(tokens)
    # As often from among the likelier as from among the less likely ones, as they should be.
    ordered = sorted(support, key=lambda token: -logits[token])
    left = softmax(logits[ordered])
    # What comes before the last token may round to all there is.
    tenths = dict(zip(ordered, ((left.cumsum() - left) * 10).astype(int).clip(0, 9), strict=True))
    expected = np.bincount([*tenths.values()], weights=left, minlength=10)
    require_frequencies(np.bincount([tenths[token] for token in tokens], minlength=10), expected)


@st.composite
def random_draws(draw_: st.DrawFn) -> list[Draw]:
    """Up to six requests of all kinds, one logits row each."""
    draws = []
    for row in range(draw_(st.integers(2, 6))):
        sampling: dict[str, Any] = {
            "seed": draw_(st.integers(0, 2**64 - 1)),
            "temperature": draw_(st.sampled_from([0.0, 0.7, 1.0, 1.5])),
            "top_k": draw_(st.sampled_from([0, 0, 0, 3])),
            "top_p": draw_(st.sampled_from([1.0, 1.0, 0.8])),
            "min_p": draw_(st.sampled_from([0.0, 0.0, 0.1])),
            "frequency_penalty": draw_(st.sampled_from([0.0, 0.0, 0.7])),
            "repetition_penalty": draw_(st.sampled_from([1.0, 1.0, 1.3])),
        }
        generated = tuple(draw_(st.lists(st.integers(0, 19), max_size=3)))
        draws.append(draw(row, generated=generated, choice=draw_(st.integers(0, 2)), **sampling))
    return draws


@given(draws=random_draws(), seed=st.integers(0, 999))
@settings(max_examples=100, deadline=None)
def test_a_draw_does_not_depend_on_its_batch(draws: list[Draw], seed: int) -> None:
    logits = torch.randn(len(draws), 20, generator=torch.Generator().manual_seed(seed)) * 2
    before = logits.clone()
    together = sample(logits, draws)
    torch.testing.assert_close(logits, before, rtol=0, atol=0)  # log-probabilities are read from them afterwards
    alone = [sample(logits[row : row + 1], [Draw(0, d.sequence, d.choice)])[0] for row, d in enumerate(draws)]
    assert together == alone
    backwards = sample(logits, draws[::-1])
    assert backwards == together[::-1]


def test_choices_of_one_prompt_differ_and_are_drawn_from_one_row() -> None:
    logits = torch.zeros(3, 1000)
    first = draw(2, seed=5)
    draws = [Draw(2, first.sequence, choice) for choice in range(8)]
    tokens = sample(logits, draws)
    assert len(set(tokens)) > 5
    assert sample(logits, draws) == tokens


@given(row=st.integers(0, 3), where=st.integers(0, 999), highest=st.sampled_from([0.0, 1e30, float("inf")]))
def test_logits_that_are_not_numbers_are_refused_wherever_they_are(row: int, where: int, highest: float) -> None:
    logits = torch.randn(4, 1000)
    logits[:, 7] = highest
    draws = [draw(index, temperature=0.0) for index in range(4)]
    assert sample(logits, draws) == logits.argmax(dim=-1).tolist()
    logits[row, where] = float("nan")
    with pytest.raises(FloatingPointError, match="not numbers"):
        sample(logits, draws)


def test_a_step_without_draws() -> None:
    assert sample(torch.zeros(2, 5), []) == []


@pytest.mark.parametrize("extreme", [1e30, 1e4, 0.0])
def test_extreme_logits_and_parameters_still_give_a_token(extreme: float) -> None:
    logits = torch.full((1, 50), -extreme)
    logits[0, 17] = extreme
    logits[0, 20:30] = -torch.inf
    for sampling in ({}, {"temperature": 100.0}, {"temperature": 1e-4}, {"top_p": 1e-9}, {"min_p": 1.0}, {"top_k": 1}):
        (token,) = sample(logits, [draw(0, seed=3, **sampling)])
        assert token == 17 or (extreme in (0.0, 1e4) and token not in range(20, 30))


# What changes the logits


@given(
    logits=st.lists(st.integers(-60, 10), min_size=6, max_size=6),
    prompt=st.lists(st.integers(0, 5), min_size=1, max_size=5),
    generated=st.lists(st.integers(0, 5), max_size=6),
    presence=st.sampled_from([0.0, 0.5, -1.1, 2.0]),
    frequency=st.sampled_from([0.0, 0.3, -0.7]),
    repetition=st.sampled_from([1.0, 1.5, 0.6]),
    bias=st.dictionaries(st.integers(0, 5), st.sampled_from([-100.0, -1.0, 0.7, 100.0]), max_size=3),
)
@settings(max_examples=200, deadline=None)
def test_penalties_and_bias(
    logits: list[int],
    prompt: list[int],
    generated: list[int],
    presence: float,
    frequency: float,
    repetition: float,
    bias: dict[int, float],
) -> None:
    adjusted = [value / 10 for value in logits]
    for token in range(6):
        if token in prompt or token in generated:
            adjusted[token] *= repetition if adjusted[token] < 0 else 1 / repetition
        adjusted[token] -= frequency * generated.count(token) + presence * (token in generated) - bias.get(token, 0)
    best, second = sorted(adjusted)[-1:-3:-1]
    assume(best - second > 1e-3)
    wanted = draw(
        0,
        prompt=tuple(prompt),
        generated=tuple(generated),
        temperature=0.0,
        presence_penalty=presence,
        frequency_penalty=frequency,
        repetition_penalty=repetition,
        logit_bias=MappingProxyType(bias),
    )
    assert sample(torch.tensor([logits], dtype=torch.float32) / 10, [wanted]) == [adjusted.index(best)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("generated", "sampling", "allowed"),
    [
        ((), {"min_tokens": 2}, {0, 1, 4}),
        ((0,), {"min_tokens": 2}, {0, 1, 4}),
        ((0, 0), {"min_tokens": 2}, {0, 1, 2, 3, 4}),
        ((0,), {}, {0, 1, 2, 3, 4}),
        ((0,), {"min_tokens": 2, "ignore_eos": True}, {0, 1, 3, 4}),
        ((0,), {"min_tokens": 2, "logit_bias": MappingProxyType({3: 100.0})}, {0, 1, 4}),
    ],
)
def test_nothing_ends_before_min_tokens(
    temperature: float, generated: tuple[int, ...], sampling: dict[str, Any], allowed: set[int]
) -> None:
    # 3 ends every text of the model, 2 this request's.
    logits = torch.tensor([[0.0, 0.1, 0.2, 0.3, 0.0]])
    draws = [
        draw(
            0,
            generated=generated,
            eos=frozenset({3}),
            stop_token_ids=frozenset({2}),
            temperature=temperature,
            seed=seed,
            **sampling,
        )
        for seed in range(100)
    ]
    if "ignore_eos" in sampling:
        assert 3 not in draws[0].sequence.end_tokens
    tokens = set(sample(logits, draws))
    if temperature:
        assert tokens == allowed
    else:
        assert tokens == {max(allowed, key=lambda token: logits[0, token].item())}


# Log-probabilities


@given(seed=st.integers(0, 999), rows=st.integers(0, 4), top=st.integers(0, 12))
@settings(max_examples=50, deadline=None)
def test_token_logprobs(seed: int, rows: int, top: int) -> None:
    generator = np.random.default_rng(seed)
    logits = generator.normal(size=(rows, 10)).astype(np.float32) * 5
    tokens = generator.integers(0, 10, size=rows).tolist()

    described = token_logprobs(torch.from_numpy(logits), tokens, top)

    assert [entry.token for entry in described] == tokens
    for row, entry in zip(logits.astype(np.float64), described, strict=True):
        logprobs = np.log(softmax(row))
        assert entry.logprob == pytest.approx(logprobs[entry.token], abs=1e-5)
        assert entry.rank == 1 + (row > row[entry.token]).sum()
        best = np.argsort(-row)[:top]
        assert [token for token, _ in entry.top] == best.tolist()
        assert [value for _, value in entry.top] == pytest.approx(logprobs[best].tolist(), abs=1e-5)


# Grammars


@given(
    vocab=st.integers(33, 100),
    rows=st.lists(st.tuples(st.booleans(), st.sets(st.integers(0, 32), min_size=1)), min_size=1, max_size=5),
    temperature=st.sampled_from([0.0, 1.0]),
    seed=st.integers(0, 999),
)
def test_only_tokens_that_a_grammar_allows_are_drawn(
    vocab: int, rows: list[tuple[bool, set[int]]], temperature: float, seed: int
) -> None:
    logits = torch.randn(len(rows), vocab, generator=torch.Generator().manual_seed(seed))
    draws = [draw(row, seed=seed, temperature=temperature) for row in range(len(rows))]
    free = sample(logits, draws)
    for each, (held, allowed) in zip(draws, rows, strict=True):
        if held:
            each.sequence.constraint = Held(Next(mask_of(frozenset(allowed), vocab), complete=False))  # type: ignore[assignment]
    for row, (token, (held, allowed)) in enumerate(zip(sample(logits, draws), rows, strict=True)):
        assert token in allowed if held else token == free[row]
        if held and temperature == 0.0:
            assert token == max(allowed, key=lambda t: float(logits[row, t]))
