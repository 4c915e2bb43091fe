"""Bytes that really crossed the KV sockets, as the kernel counts them.

One counter per prefill server. It looks at this process's own TCP connections whose local port is the server's, and
reads ``tcp_info`` of each (Linux; elsewhere it stays 0). Bytes of both directions count: payload, framing and requests.
What TCP sent again does not: on a busy machine the kernel repeats segments that were never lost.
"""

import os
import socket
import struct
import sys
import threading

# Offsets in struct tcp_info of linux/tcp.h: tcpi_bytes_received, tcpi_bytes_sent, tcpi_bytes_retrans.
_RECEIVED_OFFSET = 128
_SENT_OFFSET = 200
_REPEATED_OFFSET = 208
_INFO_BYTES = 216


class SocketBytes:
    """Monotonic count over all connections that ever used ``port``, as far as ``read`` saw them."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._seen: dict[tuple[int, object], int] = {}
        self._lock = threading.Lock()

    def read(self) -> int:
        """Bytes so far. A connection that opened and closed between two reads is not counted."""
        if not sys.platform.startswith("linux"):
            return 0
        with self._lock:
            for inode, peer, total in _connections(self._port):
                self._seen[inode, peer] = total
            return sum(self._seen.values())


def _connections(port: int) -> list[tuple[int, object, int]]:
    """(inode, peer, bytes) of every connection of this process on ``port``."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            # A duplicate, so that closing our object never closes the connection.
            duplicate = os.dup(int(name))
        except OSError:
            continue
        with socket.socket(fileno=duplicate) as connection:
            try:
                if connection.getsockname()[1] != port:
                    continue
                peer = connection.getpeername()
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
                inode = os.fstat(duplicate).st_ino
            except (OSError, IndexError, TypeError):
                continue
            if len(info) == _INFO_BYTES:
                offsets = (_RECEIVED_OFFSET, _SENT_OFFSET, _REPEATED_OFFSET)
                received, sent, repeated = (struct.unpack_from("=Q", info, at)[0] for at in offsets)
                found.append((inode, peer, received + sent - repeated))
    return found
