import os
import signal
import sys

import pytest

from cluster.signals import interruptible


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_both_signals_interrupt_even_if_another_handler_took_their_place(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    steps: list[str] = []
    undone: list[str] = []

    def work() -> None:
        with interruptible(steps.append) as step:
            signal.signal(number, signal.SIG_IGN)
            step("starting")
            try:
                os.kill(os.getpid(), number)
            finally:
                # While things are being stopped, further signals change nothing.
                step("undoing")
                os.kill(os.getpid(), signal.SIGTERM)
                os.kill(os.getpid(), signal.SIGINT)
                undone.append("stopped")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert steps == ["starting", "stopping", "undoing"]
    assert undone == ["stopped"]
    assert signal.getsignal(number) == before


def test_a_handler_that_exits_is_an_interruption_too() -> None:
    """Ray's own, between its start and the next step."""
    with pytest.raises(KeyboardInterrupt), interruptible(lambda step: None):
        sys.exit(signal.SIGTERM)
