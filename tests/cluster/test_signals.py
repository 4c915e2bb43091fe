import os
import signal
import subprocess
import sys
import time

import psutil
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


STUCK = """
import ctypes
from cluster import signals
signals.SEEN_SECONDS = 0.5
lock = ctypes.create_string_buffer(64)
mutex = ctypes.CDLL(None).pthread_mutex_lock
mutex(lock)
with signals.interruptible(lambda text: print(text, flush=True)) as step:
    step("waiting")
    mutex(lock)
"""
"""The main thread waits in foreign code, as it does in Ray's when Ray has died under it."""


def test_an_interruption_that_python_does_not_see_ends_the_process() -> None:
    with subprocess.Popen([sys.executable, "-c", STUCK], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n"
        main_thread = psutil.Process(process.pid)
        while main_thread.status() != psutil.STATUS_SLEEPING:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        assert process.stdout.read() == "stopping: Ray does not answer\n"
    assert process.returncode == 1
