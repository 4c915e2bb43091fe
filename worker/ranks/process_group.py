"""The ranks of a replica as a torch.distributed process group: NCCL on CUDA devices, Gloo without them.

Made by every rank at once, which meet through a store and prove that they did; it is outside of torch.distributed's own
registry, as the groups that carry KV are. A collective that fails or takes too long leaves it useless, and with it the
replica.
"""

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch._C._distributed_c10d import AllgatherOptions, AllreduceOptions, Store

from kv_transfer.group_proof import require_members

MEET_SECONDS = 300.0
"""Others may still wait for a machine, or import what they need."""
PROOF_SECONDS = 30.0
"""All have met by then."""
COLLECTIVE_SECONDS = 60.0
"""Ranks compute the same step at the same time; one that is so far behind hangs."""


class RankLost(Exception):
    """Another rank of this replica is gone or hangs. Only new processes help."""


class TorchRankGroup:
    """See the module. A ``RankGroup``; ``host`` is the address at which other ranks reach this one."""

    def __init__(self, store: Store, rank: int, size: int, device: torch.device, host: str) -> None:
        """Meet the others. Raises ``RankLost``."""
        self.rank = rank
        self.size = size
        # C++ looks methods of a Python store up in an object that must still be there.
        self._store = store
        try:
            self._group = _nccl(store, rank, size, device) if device.type == "cuda" else _gloo(store, rank, size, host)
        except RuntimeError as error:
            raise RankLost(f"rank {rank} of {size} has not met the others: {error}") from error

    def sum(self, partial: torch.Tensor) -> torch.Tensor:
        """See ``RankGroup``. Raises ``RankLost``."""
        self._wait(self._group.allreduce, [partial], AllreduceOptions())
        return partial

    def gather(self, part: torch.Tensor) -> torch.Tensor | None:
        """See ``RankGroup``. Raises ``RankLost``."""
        parts = [torch.empty_like(part) for _ in range(self.size)]
        self._wait(self._group.allgather, [parts], [part.contiguous()], AllgatherOptions())
        return torch.cat(parts, dim=-1) if self.rank == 0 else None

    def _wait(self, collective: Any, *arguments: Any) -> None:
        try:
            collective(*arguments).wait(timedelta(seconds=COLLECTIVE_SECONDS))
        except RuntimeError as error:
            raise RankLost(f"rank {self.rank} of {self.size} has lost the others: {error}") from error


def _gloo(store: Store, rank: int, size: int, host: str) -> Any:
    gloo: Any = torch.distributed.ProcessGroupGloo
    options = gloo._Options()
    options._threads = 1
    options._timeout = timedelta(seconds=MEET_SECONDS)
    options._devices = [gloo.create_device(hostname=host)]
    group = gloo(store, rank, size, options)
    require_members(group, store, rank, size, PROOF_SECONDS)
    return group


def _nccl(store: Store, rank: int, size: int, device: torch.device) -> Any:
    nccl: Any = torch.distributed.ProcessGroupNCCL
    # Its watchdog would end the process by itself; a wait that times out is to raise instead.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
    os.environ.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")
    torch.cuda.set_device(device)
    return nccl(store, rank, size, nccl.Options())
