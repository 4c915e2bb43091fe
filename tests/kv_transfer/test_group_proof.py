"""Somebody who reaches the port of a process group before the other side does, and knows what Gloo asks for."""

import socket
import struct
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta

import pytest
import torch
from torch._C._distributed_c10d import HashStore, Store

from kv_transfer import pair_group
from kv_transfer.pair_group import GroupLost, GroupSettings, PairGroup
from kv_transfer.socket_bytes import listening_ports
from worker.ranks import process_group
from worker.ranks.process_group import RankLost, TorchRankGroup

CPU = torch.device("cpu")
SECONDS = 30.0
NUMBERS = range(8)
"""Of the connections that Gloo expects."""


class Visited(Store):
    """The store of one member; ``visit`` happens before it learns where the others are."""

    def __init__(self, store: Store, visit: Callable[[], None]) -> None:
        super().__init__()
        self._store = store
        self._visit = visit

    def set(self, key: str, value: bytes) -> None:
        self._store.set(key, bytes(value))  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        self._visit()
        return bytes(self._store.get(key))

    def wait(self, keys: Sequence[str], timeout: timedelta = timedelta(seconds=SECONDS)) -> None:
        self._visit()
        self._store.wait(list(keys), timeout)


class Stranger:
    """Connects to ports once, under every number, and stays."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._visited: set[int] = set()
        self.connections: list[socket.socket] = []

    def visit(self, ports: set[int]) -> None:
        for port in ports - self._visited:
            self._visited.add(port)
            for number in NUMBERS:
                connection = self._stack.enter_context(socket.create_connection(("127.0.0.1", port), SECONDS))
                connection.sendall(struct.pack("<q", number))
                self.connections.append(connection)

    def has_heard(self) -> bool:
        """Whether anybody takes it for a member."""
        heard = False
        for connection in self.connections:
            connection.setblocking(False)
            try:
                heard = heard or bool(connection.recv(1))
            except OSError:
                continue
        return heard


def test_who_takes_a_members_place_is_told_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair_group, "RENDEZVOUS_SECONDS", 2.0)
    store = HashStore()
    with ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        stranger = Stranger(stack)

        def ports() -> set[int]:
            known = [f"ports/{rank}" for rank in range(2) if store.check([f"ports/{rank}"])]
            return {int(port) for key in known for port in bytes(store.get(key)).decode().split(",")}

        def make(rank: int) -> PairGroup:
            visited = Visited(store, lambda: stranger.visit(ports()))
            return PairGroup(GroupSettings("127.0.0.1", CPU), visited, rank)

        for made in [pool.submit(make, rank) for rank in range(2)]:
            with pytest.raises(GroupLost):
                made.result(SECONDS)
        assert stranger.has_heard(), "nobody took it for a member"


def test_no_rank_computes_with_a_strangers_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_group, "PROOF_SECONDS", 2.0)
    store, before = HashStore(), listening_ports()
    with ExitStack() as stack, ThreadPoolExecutor(3) as pool:
        stranger = Stranger(stack)

        def make(rank: int) -> TorchRankGroup:
            visited = Visited(store, lambda: stranger.visit(set(listening_ports() - before)))
            return TorchRankGroup(visited, rank, 3, CPU, "127.0.0.1")

        for made in [pool.submit(make, rank) for rank in range(3)]:
            with pytest.raises(RankLost):
                made.result(SECONDS)
        assert stranger.has_heard(), "nobody took it for a member"
