"""The decode replicas that a prefill replica sends to, and whether they still run.

Made with the leading rank's server, ended with it. A decode replica asks for the prefill replica's pulse several times
a second (``kv_transfer/pulse.py``), which is its own as well: one that was stopped keeps its connections open, and the
blocks of its prompts would be held until pings go unanswered.
"""

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from kv_transfer.heartbeat import LOOK_SECONDS, SILENCE_SECONDS, Silence
from kv_transfer.outgoing_stream import OutgoingStream

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Receiver:
    silence: Silence | None = None
    streams: set[OutgoingStream] = field(default_factory=set)


class Receivers:
    """See the module. One that does not ask by its name, as an older version does not, is not judged."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._receivers: dict[str, _Receiver] = {}
        self._ended = threading.Event()

    def start(self) -> None:
        """Begin to listen, on a thread of its own."""
        threading.Thread(target=self._listen, name="receivers", daemon=True).start()

    def close(self) -> None:
        """Listen no more."""
        self._ended.set()

    def heard(self, incarnation: str) -> None:
        """A decode replica has asked for the pulse."""
        with self._lock:
            receiver = self._receivers.setdefault(incarnation, _Receiver())
            receiver.silence = receiver.silence or Silence()
            receiver.silence.heard()

    @contextmanager
    def taking(self, incarnation: str, stream: OutgoingStream) -> Iterator[None]:
        """For as long as a decode replica takes what a stream sends: when it falls silent, the stream is cancelled."""
        with self._lock:
            receiver = self._receivers.setdefault(incarnation, _Receiver())
            receiver.streams.add(stream)
        try:
            yield
        finally:
            with self._lock:
                receiver.streams.discard(stream)
                if not receiver.streams and receiver.silence is None:
                    self._receivers.pop(incarnation, None)

    def look(self, now: float) -> None:
        """Give up what silent ones were to be sent. To be called every ``LOOK_SECONDS``."""
        with self._lock:
            judged = [(name, one.silence) for name, one in self._receivers.items() if one.silence is not None]
            silent = [name for name, silence in judged if silence.look(now)]
            gone = [(name, tuple(self._receivers.pop(name).streams)) for name in silent]
        for name, streams in gone:
            if streams:
                log.warning("%s was silent for %s s: %d transfers given up", name, SILENCE_SECONDS, len(streams))
            for stream in streams:
                stream.cancel()

    def _listen(self) -> None:
        while not self._ended.wait(LOOK_SECONDS):
            self.look(time.monotonic())
