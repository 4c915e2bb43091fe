"""SIGINT and SIGTERM end a command the same way: whatever it started is stopped before the process ends."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def interruptible(progress: Callable[[str], None]) -> Iterator[Callable[[str], None]]:
    """Turn both signals into ``KeyboardInterrupt`` until the block ends; yields ``progress`` to use inside it.

    Ray puts handlers of its own in place when it starts, so every step of the progress sets ours anew.
    """

    stopping = False

    def set_handlers(handler: Callable[[int, FrameType | None], None] | signal.Handlers) -> None:
        for number in _SIGNALS:
            signal.signal(number, handler)

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal stopping
        stopping = True
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
        yield step
    except SystemExit:
        # Ray's handler, until the next step.
        raise KeyboardInterrupt from None
    finally:
        for number, handler in before:
            signal.signal(number, handler)
