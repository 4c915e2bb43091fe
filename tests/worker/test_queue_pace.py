import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.queue_pace import FIRST_GUESS, LONGEST_WAIT, QueuePace


@given(rate=st.integers(1, 50), ahead=st.integers(1, 100), step=st.sampled_from([0.05, 0.5, 1.0]))
def test_a_steady_pace_is_measured(rate: int, ahead: int, step: float) -> None:
    pace = QueuePace()
    owed = 0.0
    for number in range(int(200 / step)):
        owed += rate * step
        pace.observe(int(owed), waiting=True, now=number * step)
        owed -= int(owed)
    assert pace.wait(ahead) == pytest.approx(ahead / rate, rel=0.15)


def test_a_changed_pace_is_believed_after_a_while() -> None:
    pace = QueuePace()
    for second in range(100):
        pace.observe(10, waiting=True, now=float(second))
    for second in range(100, 200):
        pace.observe(1, waiting=True, now=float(second))
    assert pace.wait(10) == pytest.approx(10.0, rel=0.1)


def test_time_without_a_queue_says_nothing() -> None:
    pace = QueuePace()
    for hour in range(50):
        begin = hour * 3600.0
        pace.observe(0, waiting=True, now=begin)
        pace.observe(3, waiting=True, now=begin + 1.0)
        pace.observe(3, waiting=False, now=begin + 2.0)
        pace.observe(1, waiting=False, now=begin + 3.0)
    assert pace.wait(6) == pytest.approx(2.0, rel=0.05)


def test_before_anything_is_measured_nobody_is_told_a_number() -> None:
    pace = QueuePace()
    assert pace.wait(5) is None
    assert pace.retry_after(5) == FIRST_GUESS
    pace.observe(4, waiting=True, now=100.0)
    assert pace.wait(5) is None


def test_a_queue_that_stands_still_takes_longer_and_longer_but_not_for_ever() -> None:
    pace = QueuePace()
    pace.observe(0, waiting=True, now=0.0)
    waits = []
    for second in range(1, 30):
        pace.observe(0, waiting=True, now=float(second))
        waits.append(pace.wait(4))
    assert waits == sorted(waits)
    assert waits[0] == 4.0
    assert waits[-1] > 40.0
    assert pace.wait(10**6) == LONGEST_WAIT
    assert pace.wait(0) == 0.0
