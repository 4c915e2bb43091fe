"""Whether a prefill replica still runs: a thread of a decode replica asks again and again.

Made with the connection to a replica's leading rank, ended with it. It has a connection of its own, where no KV is in
the way. A process that was stopped keeps its connections open: its streams would be waited for until their deadline.
"""

import logging
import threading
from collections.abc import Callable

import grpc

from kv_transfer.authentication import open_channel
from kv_transfer.channel_options import PULSE_METHOD
from kv_transfer.cluster_token import ClusterToken

log = logging.getLogger(__name__)

INTERVAL_SECONDS = 0.25
ANSWER_SECONDS = 0.7
MISSES = 2
"""One late answer says nothing on a busy machine. With a second one, a process that was stopped is noticed in 1.7 s."""
ANSWER_BYTES = 1024


class Pulse:
    """``on_silence`` is called on this thread, again and again while the replica does not answer.

    Asking is a sign of life of the decode replica ``incarnation``.
    """

    def __init__(
        self, address: str, token: ClusterToken | None, incarnation: str, on_silence: Callable[[], None]
    ) -> None:
        self.address = address
        self._name = incarnation.encode()
        self.silent = False
        self._on_silence = on_silence
        self._closed = threading.Event()
        self._channel = open_channel(address, token, ANSWER_BYTES)
        self._ask: Callable[..., bytes] = self._channel.unary_unary(PULSE_METHOD)
        threading.Thread(target=self._watch, name="pulse", daemon=True).start()

    def close(self) -> None:
        """Ask no more."""
        self._closed.set()

    def _watch(self) -> None:
        misses = 0
        while not self._closed.wait(INTERVAL_SECONDS):
            try:
                self._ask(self._name, timeout=ANSWER_SECONDS)
            except grpc.RpcError:
                misses += 1
            else:
                misses = 0
            if self.silent != (misses >= MISSES):
                self.silent = not self.silent
                log.warning("%s %s", self.address, "does not answer" if self.silent else "answers again")
            if self.silent:
                self._on_silence()
        self._channel.close()
