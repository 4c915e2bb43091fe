"""The engine's thread: takes events, computes a step, again. Everything that an engine owns is touched only here.

Started once when a replica is ready; ``stop`` ends it after the current step. ``stalled_for`` lets a health check see a
step that hangs, which neither gRPC nor Ray would notice.
"""

import logging
import threading
import time
from typing import Generic, Protocol, TypeVar

import torch

from worker.cores import Cores
from worker.inbox import Inbox
from worker.wire import engine_pb2 as wire

log = logging.getLogger(__name__)

Event = TypeVar("Event")
Event_contra = TypeVar("Event_contra", contravariant=True)

IDLE_SECONDS = 0.2
"""Longest wait without events: deadlines and load reports are looked at this often."""
BLOCKED_SECONDS = 0.002
"""Wait when there are requests but nothing can be computed: KV or room is awaited."""


class Engine(Protocol[Event_contra]):
    """What the loop drives."""

    @property
    def counters(self) -> wire.Counters:
        """What it counts, of which the loop adds ``busy_seconds``."""
        ...

    @property
    def idle(self) -> bool:
        """Whether it has no request at all."""
        ...

    def handle(self, event: Event_contra, now: float) -> None:
        """Take one event."""
        ...

    def step(self, now: float) -> bool:
        """Compute once; returns whether there was anything to compute."""
        ...

    def stop(self, now: float) -> None:
        """Give up everything."""
        ...


class EngineLoop(Generic[Event]):
    """One thread for one engine, on its ``cores``."""

    def __init__(self, engine: Engine[Event], inbox: Inbox[Event], cores: Cores) -> None:
        self._engine = engine
        self._cores = cores
        self._inbox = inbox
        self._stopping = threading.Event()
        self._beat = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.failure: BaseException | None = None

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self, timeout: float = 10.0) -> None:
        """End after the current step, failing what is left."""
        self._stopping.set()
        self._inbox.wake()
        self._thread.join(timeout)

    @property
    def stalled_for(self) -> float:
        """Seconds since the loop last came round."""
        return time.monotonic() - self._beat

    @property
    def alive(self) -> bool:
        """Whether the thread still runs."""
        return self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._cores.bind()
            with torch.inference_mode():
                self._loop()
        except BaseException as error:
            self.failure = error
            log.exception("the engine has failed")
            raise

    def _loop(self) -> None:
        wait = 0.0
        while not self._stopping.is_set():
            for event in self._inbox.take(wait):
                self._engine.handle(event, time.monotonic())
            self._beat = time.monotonic()
            worked = self._engine.step(self._beat)
            if worked:
                self._engine.counters.busy_seconds += time.monotonic() - self._beat
            wait = 0.0 if worked else IDLE_SECONDS if self._engine.idle else BLOCKED_SECONDS
        self._engine.stop(time.monotonic())
