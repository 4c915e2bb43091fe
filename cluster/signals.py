"""SIGINT and SIGTERM end a command the same way: whatever it started is stopped before the process ends."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
SEEN_SECONDS = 10.0
"""How long Python may take to see a signal."""


@contextmanager
def interruptible(progress: Callable[[str], None]) -> Iterator[Callable[[str], None]]:
    """Turn both signals into ``KeyboardInterrupt`` until the block ends; yields ``progress`` to use inside it.

    Ray puts handlers of its own in place when it starts, so every step of the progress sets ours anew. If Python does
    not get to see a SIGINT, because the main thread is in foreign code that waits for what the same signal has ended,
    the process ends with 1: what Ray has started ends with whoever started it.
    """

    stopping = False
    is_seen = threading.Event()

    def set_handlers(handler: Callable[[int, FrameType | None], None] | signal.Handlers) -> None:
        for number in _SIGNALS:
            signal.signal(number, handler)

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal stopping
        stopping = True
        is_seen.set()
        # A second signal would leave half of what is being stopped behind.
        set_handlers(signal.SIG_IGN)
        progress("stopping")
        raise KeyboardInterrupt

    def step(text: str) -> None:
        if not stopping:
            set_handlers(interrupt)
        progress(text)

    before = [(number, signal.getsignal(number)) for number in _SIGNALS]
    set_handlers(interrupt)
    try:
        with _ended_if_unseen(is_seen, progress):
            yield step
    except SystemExit:
        # Ray's handler, until the next step.
        raise KeyboardInterrupt from None
    finally:
        for number, handler in before:
            signal.signal(number, handler)


@contextmanager
def _ended_if_unseen(is_seen: threading.Event, progress: Callable[[str], None]) -> Iterator[None]:
    """End the process if a SIGINT arrives and ``is_seen`` is not set in time. For the main thread."""

    def watch() -> None:
        while numbers := os.read(arrivals, 64):
            if signal.SIGINT in numbers and not is_seen.wait(SEEN_SECONDS):
                progress("stopping: Ray does not answer")
                os._exit(1)
        os.close(arrivals)

    arrivals, arrived = os.pipe()
    os.set_blocking(arrived, False)
    before = signal.set_wakeup_fd(arrived, warn_on_full_buffer=False)
    threading.Thread(target=watch, name="signals", daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(arrived)
