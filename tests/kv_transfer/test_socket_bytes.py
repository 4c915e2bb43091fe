import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kv_transfer.socket_bytes import SocketBytes


@contextmanager
def listening(host: str = "127.0.0.1") -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as server:
        yield server


@contextmanager
def connected(server: socket.socket) -> Iterator[tuple[socket.socket, socket.socket]]:
    """The two ends of a connection: the client's and the server's."""
    with socket.create_connection(server.getsockname()[:2]) as client:
        accepted, _ = server.accept()
        with accepted:
            yield client, accepted


def send(source: socket.socket, destination: socket.socket, size: int) -> None:
    source.sendall(bytes(size))
    while size:
        size -= len(destination.recv(size))


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_counts_both_directions_of_the_servers_connections(host: str) -> None:
    with listening(host) as server, listening(host) as other:
        counter = SocketBytes(server.getsockname()[1])
        assert counter.read() == 0
        with connected(server) as (client, accepted), connected(other) as (stranger, accepted_by_other):
            send(client, accepted, 30_000)
            send(accepted, client, 500)
            send(stranger, accepted_by_other, 7_000)
            assert counter.read() == 30_500
            send(accepted, client, 1)
            assert counter.read() == 30_501


def test_keeps_what_closed_connections_carried() -> None:
    with listening() as server:
        counter = SocketBytes(server.getsockname()[1])
        for round_ in range(1, 4):
            with connected(server) as (client, accepted):
                send(client, accepted, 1000)
                assert counter.read() == round_ * 1000
            assert counter.read() == round_ * 1000


@pytest.mark.parametrize(("host", "named"), [("127.0.0.1", "ipv4:127.0.0.1:{}"), ("::1", "ipv6:%5B::1%5D:{}")])
def test_a_connection_that_is_left_out_is_counted_no_further_and_its_port_is_free_for_another(
    host: str, named: str
) -> None:
    with listening(host) as server:
        counter = SocketBytes(server.getsockname()[1])
        with connected(server) as (pulse, pulse_accepted), connected(server) as (client, accepted):
            send(pulse, pulse_accepted, 10)
            assert counter.read() == 10
            counter.leave_out(named.format(pulse.getsockname()[1]))
            send(pulse, pulse_accepted, 5_000)
            send(client, accepted, 700)
            assert counter.read() == 710
            again = pulse.getsockname()
        assert counter.read() == 710
        with socket.socket(server.family) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            client.bind(again[:2])
            client.connect(server.getsockname()[:2])
            accepted, _ = server.accept()
            with accepted:
                send(client, accepted, 20)
                assert counter.read() == 730


def test_looking_leaves_every_descriptor_as_it_was() -> None:
    read_end, write_end = os.pipe()
    unix = socket.socketpair()
    with listening() as server, connected(server) as (client, accepted), unix[0], unix[1]:
        own = [read_end, write_end, *(end.fileno() for end in (*unix, server, client, accepted))]
        before, files = set(os.listdir("/proc/self/fd")), [os.fstat(descriptor) for descriptor in own]
        counter = SocketBytes(server.getsockname()[1])
        for _ in range(50):
            counter.read()
        # What earlier tests left to threads of gRPC may be opened and closed meanwhile.
        assert len(set(os.listdir("/proc/self/fd")) - before) < 50
        assert all(os.path.samestat(os.fstat(descriptor), file) for descriptor, file in zip(own, files, strict=True))
        send(client, accepted, 10)
        send(accepted, client, 10)
        assert counter.read() == 20
    os.close(read_end)
    os.close(write_end)
