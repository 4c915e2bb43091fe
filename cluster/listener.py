"""The port of one front end: a socket that several front ends of one machine may share.

Bound when a front end is made, listening when it can answer, and closed without costing anybody a connection. The
kernel deals new connections out over all sockets that listen on the port, at their first packet, and resets what has
come to one that closes and was not accepted. So a socket that is to close takes no first packets any more: their
senders repeat them after a second, and are dealt to those that are left.
"""

import ctypes
import logging
import socket
import struct
import sys
import time

log = logging.getLogger(__name__)

BACKLOG = 2048
CLIENT_SECONDS = 120
"""A client that vanished, or takes nothing for so long, is given up."""
HANDSHAKE_SECONDS = 0.25
"""For handshakes that have begun to end: a round trip."""
ACCEPT_SECONDS = 2.0
_POLL_SECONDS = 0.01
_SO_ATTACH_FILTER = 26
_TCP_INFO_ACCEPT_QUEUE = 24
"""Where the kernel says of a listening socket how many connections nobody has accepted yet."""
_DROP_FIRST_PACKETS = (
    (0x30, 0, 0, 13),  # load the TCP flags
    (0x54, 0, 0, 0x12),  # of which only SYN and ACK
    (0x15, 0, 1, 0x02),  # SYN alone:
    (0x06, 0, 0, 0),  # drop
    (0x06, 0, 0, 0xFFFFFFFF),  # else: pass
)
"""A program for classic BPF, which any process may attach to its own sockets."""


def bind(host: str, port: int) -> socket.socket:
    """Return a bound socket that does not listen yet."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    # Connections inherit these.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, CLIENT_SECONDS * 1000)
    listener.bind((host, port))
    return listener


def turn_away(listener: socket.socket) -> None:
    """Return when nobody is left who would be reset if the socket were closed; somebody must still accept meanwhile.

    Only Linux can. Elsewhere, or where a sandbox forbids it, a connection that is being made may be reset.
    """
    if not sys.platform.startswith("linux"):
        return
    instructions = b"".join(struct.pack("=HBBI", *instruction) for instruction in _DROP_FIRST_PACKETS)
    kept = ctypes.create_string_buffer(instructions, len(instructions))
    program = struct.pack("@HP", len(_DROP_FIRST_PACKETS), ctypes.addressof(kept))
    try:
        listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
    except OSError as error:
        log.warning("connections that are being made while the port closes may be reset: %s", error)
        return
    time.sleep(HANDSHAKE_SECONDS)
    end = time.monotonic() + ACCEPT_SECONDS
    while _not_accepted(listener) and time.monotonic() < end:
        time.sleep(_POLL_SECONDS)


def _not_accepted(listener: socket.socket) -> int:
    """How many connections wait to be accepted."""
    described = listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_ACCEPT_QUEUE + 4)
    (waiting,) = struct.unpack_from("=I", described, _TCP_INFO_ACCEPT_QUEUE)
    return int(waiting)
