"""Phases from scripted reports on a clock of the test's own."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.timeline import Phase, PhaseName, PromptTimeline
from worker.wire.engine_pb2 import Phases, PromptInfo, TokenLogprobs, Transfer


class Script:
    """A timeline whose clock is set by hand, in milliseconds since the request arrived."""

    def __init__(self, asked: float = 0.0, began: float = 100.0) -> None:
        self._began = self.now = began
        self.set(asked)
        self.timeline = PromptTimeline(began, 0, lambda: self.now)

    def set(self, milliseconds: float) -> None:
        self.now = self._began + milliseconds / 1e3

    def place(self, at: float, replica: str) -> None:
        self.set(at)
        self.timeline.placed(replica)

    def report(self, at: float, prefill_replica: str = "", payload_bytes: int = 0, **phases: float) -> None:
        self.set(at)
        transfer = Transfer(prefill_replica=prefill_replica, payload_bytes=payload_bytes)
        self.timeline.reported(PromptInfo(phases=Phases(**phases), transfer=transfer))

    def phases(self, at: float) -> list[tuple[str, float, float, str]]:
        self.set(at)
        return [
            (phase.name.value, round(phase.begin_ms, 3), round(phase.end_ms, 3), phase.replica)
            for phase in self.timeline.phases(self.now)
        ]


def test_a_transfer_with_its_computation_in_it() -> None:
    script = Script(asked=4)
    script.place(5, "d")
    times = {"queue_ms": 20, "start_ms": 20, "transfer_ms": 100, "first_token_ms": 130}
    script.report(160, "p", 777, prefill_queue_ms=15, prefill_ms=70, **times)
    # The replica took 130 ms of the 155 between; the rest is the queue's.
    expected = [
        ("queue", 4, 50, "d"),
        ("transfer", 50, 150, "d"),
        ("queue", 50, 65, "p"),
        ("prefill", 65, 135, "p"),
        ("decode", 150, 300, "d"),
    ]
    assert script.phases(300) == expected
    script.timeline.ended()
    assert script.phases(1000) == expected
    sent = [(phase.source, phase.payload_bytes) for phase in script.timeline.phases(0.0)]
    assert sent == [("", 0), ("p", 777), ("", 0), ("", 0), ("", 0)]


def test_a_local_computation() -> None:
    script = Script()
    script.place(1, "d")
    script.report(100, queue_ms=10, start_ms=40, prefill_ms=50, first_token_ms=90)
    assert script.phases(150) == [
        ("queue", 0, 20, "d"),
        ("retry", 20, 50, "d"),
        ("prefill", 50, 100, "d"),
        ("decode", 100, 150, "d"),
    ]


def test_what_waits_is_in_a_queue() -> None:
    script = Script(asked=2)
    assert script.phases(8) == [("queue", 2, 8, "")]
    script.place(10, "a")
    assert script.phases(20) == [("queue", 2, 20, "a")]
    # The replica sent it away before its first token.
    script.place(30, "b")
    assert script.phases(50) == [("queue", 2, 30, "a"), ("queue", 30, 50, "b")]


def test_a_loss_is_followed_by_a_resumption() -> None:
    script = Script()
    script.place(0, "a")
    script.report(20, queue_ms=5, start_ms=5, prefill_ms=15, first_token_ms=20)
    script.place(100, "b")
    before = [("queue", 0, 5, "a"), ("prefill", 5, 20, "a"), ("decode", 20, 100, "a")]
    assert script.phases(110) == [*before, ("resumption", 100, 110, "b"), ("queue", 100, 110, "b")]
    # Two choices go on, each after a computation of its own.
    for at in (130, 150):
        script.report(at, queue_ms=at - 120, start_ms=at - 120, prefill_ms=10, first_token_ms=at - 110)
    assert script.phases(200) == [
        *before,
        ("resumption", 100, 150, "b"),
        ("queue", 100, 120, "b"),
        ("prefill", 120, 130, "b"),
        ("queue", 100, 140, "b"),
        ("prefill", 140, 150, "b"),
        ("decode", 130, 200, "b"),
    ]


def test_no_token_is_kept() -> None:
    timeline = PromptTimeline(0.0)
    timeline.placed("d")
    logprobs = [TokenLogprobs(token_id=number, logprob=-1.0) for number in range(1000)]
    info = PromptInfo(prompt_logprobs=logprobs, phases=Phases(first_token_ms=1))
    timeline.reported(info)
    (report,) = timeline._placements[0].reports
    assert report.phases.ByteSize() < 20
    assert not hasattr(report, "prompt_logprobs")


times = st.floats(0, 1e4)


@given(st.lists(times, min_size=5, max_size=5), times, st.floats(0, 1), times)
def test_phases_follow_each_other_and_lie_within_the_request(
    durations: list[float], way: float, share: float, decoding: float
) -> None:
    """Whatever a replica measured, in whatever clock: nothing overlaps but a transfer and what happens in it."""
    queue, lost, transfer, rest, asked = durations
    script = Script(asked=asked)
    script.place(asked, "d")
    first_token = queue + lost + transfer + rest
    script.report(
        asked + way + first_token,
        "p",
        queue_ms=queue,
        start_ms=queue + lost,
        transfer_ms=transfer,
        prefill_queue_ms=transfer * share / 2,
        prefill_ms=transfer * share / 2 if transfer else rest,
        first_token_ms=first_token,
    )
    end = asked + way + first_token + decoding
    script.set(end)
    phases = script.timeline.phases(script.now)
    near = 1e-3
    assert phases[0].begin_ms == pytest.approx(asked, abs=near)
    assert phases[-1].end_ms == pytest.approx(end, abs=near)
    elsewhere = [phase for phase in phases if phase.replica == "p" and phase.name is not PhaseName.TRANSFER]
    for phase in elsewhere:
        (around,) = (other for other in phases if other.name is PhaseName.TRANSFER)
        assert around.begin_ms - near <= phase.begin_ms <= phase.end_ms <= around.end_ms + near
    line: list[Phase] = [phase for phase in phases if phase not in elsewhere]
    for before, after in itertools.pairwise(line):
        assert before.end_ms == pytest.approx(after.begin_ms, abs=near)
