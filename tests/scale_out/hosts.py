"""Machines for a test: processes with a network, process ids and mounts of their own, on one switch, in one computer.

They are Linux namespaces without names, so making them takes root, and the kernel removes them with their first
process. That dies with its context, and with the test's own process however that ends: nothing of a host stays behind.
A process id namespace is not for show: Ray finds the node that a driver belongs to among the processes that it sees.
"""

import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

# For measurements between networks (RFC 2544): nobody's real addresses. Concurrent sessions differ in the third byte.
NETWORK = f"198.18.{os.getpid() % 256}"


@dataclass(frozen=True, slots=True)
class Host:
    """``first`` is the process whose end is the host's. Its cable ends at ``port`` of the ``switch``'s namespaces."""

    address: str
    first: int
    switch: int
    port: str

    def command(self, *command: str, directory: Path) -> list[str]:
        """``command`` as a process of this host, in ``directory``."""
        return ["nsenter", f"--target={self.first}", "--net", "--pid", "--mount", f"--wd={directory}", "--", *command]

    def cut(self) -> None:
        """Unplug it: nothing arrives here, nothing leaves, and nobody is told."""
        _ip(self.switch, "link", "set", self.port, "down")

    def restore(self) -> None:
        """Plug it in again."""
        _ip(self.switch, "link", "set", self.port, "up")


@contextmanager
def hosts(count: int) -> Iterator[tuple[Host, ...]]:
    """That many, which reach each other and are reached from outside at ``address``."""
    assert os.geteuid() == 0, "network namespaces take root: sudo make test-scale-out"
    with ExitStack() as stack:
        switch, *others = [stack.enter_context(_namespaces()) for _ in range(count + 1)]
        _ip(switch, "link", "add", "switch", "type", "bridge")
        _ip(switch, "link", "set", "switch", "up")
        outside = f"ck{os.getpid()}"
        _plug(switch, 0, outside, os.getpid(), f"{NETWORK}.1")
        for number, first in enumerate(others, start=1):
            _plug(switch, number, "eth0", first, f"{NETWORK}.{number + 1}")
            _ip(first, "link", "set", "lo", "up")
        yield tuple(
            Host(f"{NETWORK}.{number + 1}", first, switch, f"port{number}")
            for number, first in enumerate(others, start=1)
        )


@contextmanager
def _namespaces() -> Iterator[int]:
    """New namespaces and the id of their first process, which waits, and reaps what loses its parent."""
    command = (
        *("setpriv", "--pdeathsig=KILL", "unshare", "--net", "--pid", "--mount-proc", "--fork", "--kill-child"),
        *("sh", "-c", "echo; sleep infinity & wait"),
    )
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline(), "unshare has failed"
            first = psutil.Process(process.pid).children()[0]
            yield first.pid
        finally:
            process.kill()
        # It ends after all others.
        first.wait(20)


def _plug(switch: int, port: int, interface: str, inside: int, address: str) -> None:
    """A cable from a port of the switch to a new interface of the namespaces of process ``inside``."""
    peer = ("peer", "name", interface, "netns", str(inside))
    _ip(switch, "link", "add", f"port{port}", "type", "veth", *peer)
    _ip(switch, "link", "set", f"port{port}", "master", "switch", "up")
    _ip(inside, "address", "add", f"{address}/24", "dev", interface)
    _ip(inside, "link", "set", interface, "up")


def _ip(inside: int, *arguments: str) -> None:
    subprocess.run(("nsenter", f"--target={inside}", "--net", "--", "ip", *arguments), check=True)
