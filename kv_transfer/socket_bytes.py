"""Bytes that really crossed the KV sockets, as the kernel counts them.

One counter per prefill server. It looks at this process's own TCP connections whose local port is the server's, and at
those that begin or end at a watched port, and reads ``tcp_info`` of each (Linux; elsewhere it stays 0). Bytes of both
directions count: payload, framing and requests.
What TCP sent again does not: on a busy machine the kernel repeats segments that were never lost.
"""

import os
import socket
import struct
import sys
import threading
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from urllib.parse import unquote

# Offsets in struct tcp_info of linux/tcp.h: tcpi_bytes_received, tcpi_bytes_sent, tcpi_bytes_retrans.
_RECEIVED_OFFSET = 128
_SENT_OFFSET = 200
_REPEATED_OFFSET = 208
_INFO_BYTES = 216


class SocketBytes:
    """Monotonic count over all connections that ever used ``port`` or a watched one, as far as ``read`` saw them."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._watched: list[int] = []
        self._left_out: set[tuple[str, int]] = set()
        self._seen: dict[tuple[int, object], int] = {}
        self._lock = threading.Lock()

    def watch(self, ports: AbstractSet[int]) -> None:
        """Count what crosses connections that begin or end at these ports, until ``unwatch``."""
        with self._lock:
            self._watched += ports

    def unwatch(self, ports: AbstractSet[int]) -> None:
        """Look once more, then no longer."""
        self.read()
        with self._lock:
            for port in ports:
                self._watched.remove(port)

    def leave_out(self, peer: str) -> None:
        """Do not count, from now on, the connection with ``peer``, in gRPC's words: it carries no KV."""
        host, _, port = unquote(peer).partition(":")[2].rpartition(":")
        with self._lock:
            self._left_out.add((_plain(host.strip("[]")), int(port)))

    def read(self) -> int:
        """Bytes so far. A connection that opened and closed between two reads is not counted."""
        with self._lock:
            left_out = set()
            for connection in _sockets():
                try:
                    local, peer = connection.getsockname()[1], connection.getpeername()
                    if local != self._port and not {local, peer[1]} & set(self._watched):
                        continue
                    if (known := (_plain(peer[0]), peer[1])) in self._left_out:
                        left_out.add(known)
                        continue
                    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
                    inode = os.fstat(connection.fileno()).st_ino
                except (OSError, IndexError, TypeError):
                    continue
                if len(info) == _INFO_BYTES:
                    offsets = (_RECEIVED_OFFSET, _SENT_OFFSET, _REPEATED_OFFSET)
                    received, sent, repeated = (struct.unpack_from("=Q", info, at)[0] for at in offsets)
                    self._seen[inode, peer] = received + sent - repeated
            # Those that are gone may have their port given to another connection.
            self._left_out = left_out
            return sum(self._seen.values())


def _plain(host: str) -> str:
    """A listener for both families knows an IPv4 peer as ::ffff: and its address."""
    return host.removeprefix("::ffff:")


def listening_ports() -> set[int]:
    """TCP ports that this process listens on (Linux; elsewhere none)."""
    ports = set()
    for listener in _sockets():
        try:
            if listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                ports.add(listener.getsockname()[1])
        except (OSError, IndexError, TypeError):
            continue
    return ports


def _sockets() -> Iterator[socket.socket]:
    """Every socket of this process, as duplicates, so that closing our object never closes the connection."""
    if not sys.platform.startswith("linux"):
        return
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            duplicate = os.dup(int(name))
        except OSError:
            continue
        with socket.socket(fileno=duplicate) as found:
            yield found
