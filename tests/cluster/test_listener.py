"""A port that two sockets share, of which one closes while clients connect."""

import select
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from cluster.listener import BACKLOG, HANDSHAKE_SECONDS, bind, turn_away
from cluster.ports import free_port

CLIENTS = 60
SECONDS = 20.0


class FrontEnd:
    """Accepts whatever comes, says its name and hangs up."""

    def __init__(self, name: bytes, port: int) -> None:
        self.name = name
        self.socket = bind("127.0.0.1", port)
        self.socket.listen(BACKLOG)
        self.accepted = 0
        self._busy = threading.Lock()
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        while True:
            select.select([self.socket], [], [])
            with self._busy:
                try:
                    connection, _ = self.socket.accept()
                except OSError:
                    return
            self.accepted += 1
            with connection:
                connection.sendall(self.name)

    @property
    def busy(self) -> threading.Lock:
        """Held, nothing is accepted."""
        return self._busy

    def join(self) -> None:
        """Its socket takes nothing any more."""
        self._thread.join(SECONDS)
        self.socket.close()


@pytest.fixture
def pair() -> Iterator[tuple[FrontEnd, FrontEnd]]:
    port = free_port()
    both = FrontEnd(b"leaves", port), FrontEnd(b"stays", port)
    yield both
    both[1].socket.shutdown(socket.SHUT_RDWR)
    both[1].join()


def connecting(stack: ExitStack, port: int) -> list[socket.socket]:
    """Clients that have begun to connect."""
    clients = []
    for _ in range(CLIENTS):
        client = stack.enter_context(socket.socket())
        client.setblocking(False)
        client.connect_ex(("127.0.0.1", port))
        clients.append(client)
    return clients


def said_to(client: socket.socket) -> bytes:
    """What a client hears; raises ``OSError`` when it is reset."""
    client.settimeout(SECONDS)
    return client.recv(100)


def test_nobody_is_reset_by_a_front_end_that_closes(pair: tuple[FrontEnd, FrontEnd]) -> None:
    leaving, _ = pair
    port = leaving.socket.getsockname()[1]
    with ExitStack() as stack:
        with leaving.busy:
            before = connecting(stack, port)
            closing = threading.Thread(target=turn_away, args=(leaving.socket,))
            closing.start()
            closing.join(2 * HANDSHAKE_SECONDS)
            assert closing.is_alive(), "it waits for those that are not accepted yet"
        closing.join(SECONDS)
        with leaving.busy:
            # Who comes now would be reset with the socket.
            after = connecting(stack, port)
            leaving.socket.shutdown(socket.SHUT_RDWR)
        leaving.join()
        heard = [said_to(client) for client in before]
        assert set(heard) == {b"leaves", b"stays"}
        assert heard.count(b"leaves") == leaving.accepted
        assert [said_to(client) for client in after] == [b"stays"] * CLIENTS
