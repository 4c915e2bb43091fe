import queue
import random
import threading
from collections.abc import Callable

import pytest

from kv_transfer.staging import StagingBudget

SECONDS = 20.0
NEVER = threading.Event()


class Reader:
    """A thread that reserves once; ``result`` waits for its answer."""

    def __init__(self, staging: StagingBudget, size: int, cancelled: threading.Event = NEVER) -> None:
        self._answers: queue.Queue[bool] = queue.Queue()
        reserve: Callable[[], None] = lambda: self._answers.put(staging.reserve(size, cancelled))  # noqa: E731
        threading.Thread(target=reserve, daemon=True).start()

    def result(self) -> bool:
        return self._answers.get(timeout=SECONDS)

    def waits(self) -> bool:
        """Whether there is still no answer, after time enough for one."""
        try:
            self._answers.get(timeout=0.1)
        except queue.Empty:
            return True
        return False


def test_a_reader_waits_until_there_is_room() -> None:
    staging = StagingBudget(100)
    assert staging.reserve(60, NEVER)
    assert staging.reserve(40, NEVER)
    reader = Reader(staging, 50)
    assert reader.waits()
    staging.give_back(40)
    assert reader.waits()
    staging.give_back(60)
    assert reader.result()
    assert staging.used == 50


def test_a_piece_larger_than_the_limit_passes_alone() -> None:
    staging = StagingBudget(100)
    assert staging.reserve(1, NEVER)
    reader = Reader(staging, 500)
    assert reader.waits()
    staging.give_back(1)
    assert reader.result()
    assert staging.used == 500
    small = Reader(staging, 1)
    assert small.waits()
    staging.give_back(500)
    assert small.result()


def test_a_cancelled_reader_stops_waiting_and_takes_nothing() -> None:
    staging = StagingBudget(100)
    assert staging.reserve(100, NEVER)
    cancelled = threading.Event()
    gone, patient = Reader(staging, 10, cancelled), Reader(staging, 20)
    assert gone.waits()
    cancelled.set()
    staging.wake()
    assert not gone.result()
    assert patient.waits()
    assert staging.used == 100
    staging.give_back(100)
    assert patient.result()
    assert not staging.reserve(1, cancelled)
    assert staging.used == 20


@pytest.mark.parametrize("seed", range(3))
def test_many_readers_never_exceed_the_limit_and_all_get_through(seed: int) -> None:
    staging = StagingBudget(100)
    taken: queue.SimpleQueue[int] = queue.SimpleQueue()

    def read(numbers: random.Random) -> None:
        for _ in range(100):
            size = numbers.randint(0, 60)
            assert staging.reserve(size, NEVER)
            taken.put(size)

    threads = [threading.Thread(target=read, args=(random.Random(seed * 10 + i),), daemon=True) for i in range(6)]
    for thread in threads:
        thread.start()
    highest = 0
    for _ in range(600):
        size = taken.get(timeout=SECONDS)
        highest = max(highest, staging.used)
        staging.give_back(size)
    for thread in threads:
        thread.join(SECONDS)
        assert not thread.is_alive()
    assert highest <= 100
    assert staging.used == 0
