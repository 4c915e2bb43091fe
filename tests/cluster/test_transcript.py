"""What is asked for after a loss, against a model of an engine that is a function of seed, choice and tokens."""

import hashlib

from hypothesis import given
from hypothesis import strategies as st

from cluster.transcript import Transcript
from worker.wire.engine_pb2 import (
    FINISH_REASON_LENGTH,
    FINISH_REASON_STOP,
    FINISH_REASON_UNSPECIFIED,
    Output,
    Sampling,
    Submit,
)

STOP = 0


def next_token(seed: int, choice: int, tokens: list[int]) -> int:
    return hashlib.sha256(repr((seed, choice, tokens)).encode()).digest()[0] % 16


def steps(submit: Submit) -> list[list[Output]]:
    """What an engine sends for a submission, step by step."""
    sampling = submit.sampling
    choices = {submit.choice + index: list(submit.token_ids) for index in range(submit.n)}
    sent = []
    while choices:
        step = []
        for choice, tokens in list(choices.items()):
            tokens.append(next_token(sampling.seed, choice, tokens))
            generated = len(tokens) - submit.prompt_len
            reason = FINISH_REASON_UNSPECIFIED
            if tokens[-1] == STOP and generated >= sampling.min_tokens:
                reason = FINISH_REASON_STOP
            elif generated >= sampling.max_tokens:
                reason = FINISH_REASON_LENGTH
            if reason != FINISH_REASON_UNSPECIFIED:
                del choices[choice]
            step.append(
                Output(request_id=submit.request_id, choice=choice, token_ids=tokens[-1:], finish_reason=reason)
            )
        sent.append(step)
    return sent


def texts(outputs: list[Output]) -> dict[int, tuple[list[int], list[int]]]:
    """Tokens and ends of every choice."""
    found: dict[int, tuple[list[int], list[int]]] = {}
    for output in outputs:
        tokens, ends = found.setdefault(output.choice, ([], []))
        tokens += output.token_ids
        if output.finish_reason != FINISH_REASON_UNSPECIFIED:
            ends.append(output.finish_reason)
    return found


submits = st.builds(
    Submit,
    request_id=st.just("r"),
    token_ids=st.just([5, 6, 7]),
    prompt_len=st.just(3),
    n=st.integers(1, 4),
    cache_salt=st.sampled_from(["", "salt"]),
    sampling=st.builds(
        Sampling,
        seed=st.integers(0, 2**64 - 1),
        max_tokens=st.integers(1, 8),
        min_tokens=st.integers(0, 4),
        logprobs=st.none() | st.just(2),
        prompt_logprobs=st.none() | st.just(1),
    ),
)


@given(submits, st.lists(st.lists(st.integers(0, 6), min_size=4, max_size=4), max_size=4))
def test_losses_change_nothing_of_what_the_client_gets(submit: Submit, lost_after: list[list[int]]) -> None:
    """Every submission of every attempt gets to send a number of steps before its replica is lost."""
    undisturbed = texts([output for step in steps(submit) for output in step])
    transcript, received, names = Transcript(submit), [], set()
    for attempt in [*lost_after, [100] * 4]:
        if transcript.open_choices == 0:
            break
        asked = transcript.submissions(timeout_ms=1234)
        assert transcript.begun == bool(received)
        wanted = submit.sampling.HasField("prompt_logprobs") and not received
        for one, sends in zip(asked, attempt, strict=False):
            assert one.request_id not in names
            names.add(one.request_id)
            assert (one.timeout_ms, one.cache_salt, one.prompt_len) == (1234, submit.cache_salt, submit.prompt_len)
            assert one.sampling.HasField("logprobs") == submit.sampling.HasField("logprobs")
            assert one.sampling.HasField("prompt_logprobs") == wanted
            outputs = [output for step in steps(one)[:sends] for output in step]
            transcript.take(outputs)
            received += outputs
    assert transcript.open_choices == 0
    assert texts(received) == undisturbed


def test_the_first_submission_is_the_request_itself() -> None:
    submit = Submit(request_id="r", token_ids=[1, 2], prompt_len=2, n=3, sampling=Sampling(prompt_logprobs=0))
    (first,) = Transcript(submit).submissions(5)
    submit.timeout_ms = 5
    assert first == submit
