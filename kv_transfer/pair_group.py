"""A torch.distributed process group of two: a prefill replica, rank 0, that sends, and a decode replica, rank 1.

Made on both sides at once, which meet through a store and prove that they did; lives until either side discards it. It
is outside of torch.distributed's own registry, so a process has as many as it has peers. Whoever reaches the ports of
its sockets can disturb it, as with every process group, and who reads the network reads what is sent.

After a send or receive that did not complete, or that timed out, a group is of no use any more: make another one. Gloo
has no way to wake a thread that waits, and does not always notice a peer's death, so waiting is for threads that
nothing depends on.
"""

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import Any

import torch
import torch.distributed
from torch._C._distributed_c10d import Store, Work

from kv_transfer.group_proof import require_members
from kv_transfer.socket_bytes import listening_ports

RENDEZVOUS_SECONDS = 10.0
PREFILL_RANK, DECODE_RANK = 0, 1
_SLOWEST_BYTES_PER_SECOND = 10 << 20
_LARGEST_TAG = 1 << 31
# Listeners are found by comparing: two groups must not be made at the same time.
_making_device = threading.Lock()


class GroupLost(Exception):
    """The pair's group cannot be used, or not any more."""


class Backend(StrEnum):
    """What moves the tensors."""

    GLOO = "gloo"
    NCCL = "nccl"


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """This side of every group: the address that it is reached at, the device that tensors are sent from."""

    host: str
    device: torch.device

    @property
    def backend(self) -> Backend:
        """NCCL moves what is on CUDA devices, Gloo what is not."""
        return Backend.NCCL if self.device.type == "cuda" else Backend.GLOO

    @property
    def name(self) -> str:
        """What the handshake compares."""
        return f"torch/{self.backend.value}"


class PendingTransfer:
    """A send or receive under way; it keeps its tensor alive."""

    def __init__(self, work: Work, tensor: torch.Tensor) -> None:
        self._work = work
        self._tensor = tensor

    def wait(self, seconds: float) -> None:
        """Return when it is complete; raises ``GroupLost``. What is large is given longer than ``seconds``."""
        limit = timedelta(seconds=seconds + self._tensor.nbytes / _SLOWEST_BYTES_PER_SECOND)
        try:
            self._work.wait(limit)
            if self._tensor.is_cuda:
                torch.cuda.current_stream(self._tensor.device).synchronize()
        except RuntimeError as error:
            raise GroupLost(str(error)) from error

    def payload(self) -> memoryview:
        """The bytes of a complete receive."""
        return memoryview(self._tensor.cpu().numpy())  # type: ignore[arg-type]


class PairGroup:
    """One side of a group. Sends and receives are posted in the order of their sequence numbers on both sides."""

    def __init__(self, settings: GroupSettings, store: Store, rank: int) -> None:
        """Meet the other side, for up to ``RENDEZVOUS_SECONDS``. Raises ``GroupLost``."""
        self._device = settings.device
        self._peer = 1 - rank
        # C++ looks methods of a Python store up in an object that must still be there.
        self._store = store
        self.ports: frozenset[int] = frozenset()
        try:
            self._group = (
                self._make_gloo(settings.host, rank) if settings.backend is Backend.GLOO else self._make_nccl(rank)
            )
        except RuntimeError as error:
            raise GroupLost(f"no process group: {error}") from error

    def send(self, payload: memoryview, sequence: int) -> PendingTransfer:
        """Post a send. Nothing moves before the receiver has posted the receive."""
        tensor = torch.frombuffer(payload, dtype=torch.uint8).to(self._device)
        return self._posted(self._group.send, tensor, sequence)

    def receive(self, size: int, sequence: int) -> PendingTransfer:
        """Post a receive of exactly ``size`` bytes: Gloo ends the process if more come, and says nothing of less."""
        return self._posted(self._group.recv, torch.empty(size, dtype=torch.uint8, device=self._device), sequence)

    def _posted(
        self, post: Callable[[list[torch.Tensor], int, int], Work], tensor: torch.Tensor, sequence: int
    ) -> PendingTransfer:
        try:
            return PendingTransfer(post([tensor], self._peer, sequence % _LARGEST_TAG), tensor)
        except RuntimeError as error:
            raise GroupLost(str(error)) from error

    def _make_gloo(self, host: str, rank: int) -> Any:
        gloo: Any = torch.distributed.ProcessGroupGloo
        options = gloo._Options()
        options._threads = 1
        options._timeout = timedelta(seconds=RENDEZVOUS_SECONDS)
        with _making_device:
            before = listening_ports()
            options._devices = [gloo.create_device(hostname=host)]
            own = listening_ports() - before
        # Either side may be the one that connects.
        self._store.set(f"ports/{rank}", ",".join(map(str, own)).encode())  # type: ignore[arg-type]
        self._store.wait([f"ports/{self._peer}"], timedelta(seconds=RENDEZVOUS_SECONDS))
        theirs = bytes(self._store.get(f"ports/{self._peer}")).decode()
        self.ports = frozenset(own | {int(port) for port in theirs.split(",") if port})
        group = gloo(self._store, rank, 2, options)
        require_members(group, self._store, rank, 2, RENDEZVOUS_SECONDS)
        return group

    def _make_nccl(self, rank: int) -> Any:
        nccl: Any = torch.distributed.ProcessGroupNCCL
        # Its watchdog would end the process when a peer is gone; a wait that times out is to raise instead.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
        os.environ.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")
        torch.cuda.set_device(self._device)
        return nccl(self._store, rank, 2, nccl.Options())
