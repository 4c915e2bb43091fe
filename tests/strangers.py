"""People who find a port: they send anything, or nothing, and stay as long as they can."""

import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress

import grpc
import psutil

HALF_OPEN_PER_PORT = 10
HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
METHODS = ("/crosskv.engine.v1.Engine/Session", "/crosskv.kv.v1.KVTransfer/Prefill", "/crosskv.ranks.v1.Ranks/Join")


Address = tuple[str, int]


def listening_at(processes: Sequence[psutil.Process]) -> list[Address]:
    """Where processes listen."""
    found = {
        (connection.laddr.ip, connection.laddr.port)
        for process in processes
        for connection in process.net_connections(kind="tcp")
        if connection.status == psutil.CONN_LISTEN
    }
    return sorted(found)


def _noise(numbers: random.Random) -> bytes:
    noise = numbers.randbytes(numbers.choice((1, 9, 300, 20_000)))
    return numbers.choice(
        (
            noise,
            HTTP2 + noise,
            # A gRPC message that claims four gigabytes, and frames that claim all that fits into 24 bits.
            HTTP2 + SETTINGS + b"\x00\x00\x05\x00\x00\x00\x00\x00\x01" + b"\x00\xff\xff\xff\xff" + noise,
            HTTP2 + SETTINGS + b"\xff\xff\xff\x00\x00\x00\x00\x00\x01" + noise,
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + noise,
            b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999999\r\n\r\n" + noise,
            struct.pack("<Q", 1 << 62) + noise,
        )
    )


def _visit(address: Address, numbers: random.Random) -> None:
    with socket.create_connection(address, timeout=2) as connection:
        connection.sendall(_noise(numbers))
        if numbers.random() < 0.3:  # leave without a goodbye
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        elif numbers.random() < 0.3:
            connection.settimeout(0.2)
            connection.recv(4096)


def _call(address: Address, numbers: random.Random) -> None:
    host = f"[{address[0]}]" if ":" in address[0] else address[0]
    with grpc.insecure_channel(f"{host}:{address[1]}", options=(("grpc.use_local_subchannel_pool", 1),)) as channel:
        call = channel.stream_stream(numbers.choice(METHODS))
        next(call(iter([numbers.randbytes(100)]), timeout=1))


@contextmanager
def bothered(addresses: Sequence[Address], seed: int = 0) -> Iterator[Callable[[], int]]:
    """Strangers at every address while the block runs. Gives a function that says how many visits there were."""
    stop = threading.Event()
    visits = [0, 0]

    def bother(index: int, act: Callable[[Address, random.Random], None]) -> None:
        numbers = random.Random(seed + index)
        while not stop.is_set():
            for address in addresses:
                with suppress(OSError, grpc.RpcError):
                    act(address, numbers)
                visits[index] += 1
            time.sleep(0.05)

    with ExitStack() as stack:
        for address in addresses:
            for number in range(HALF_OPEN_PER_PORT):
                connection = stack.enter_context(socket.create_connection(address, timeout=5))
                connection.sendall((b"", HTTP2, b"GET / HT", HTTP2 + SETTINGS)[number % 4])
        threads = [threading.Thread(target=bother, args=(i, act)) for i, act in enumerate((_visit, _call))]
        for thread in threads:
            thread.start()
        try:
            yield lambda: sum(visits)
        finally:
            stop.set()
            for thread in threads:
                thread.join()
