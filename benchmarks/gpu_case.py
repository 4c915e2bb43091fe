"""One call of a Triton kernel as ``benchmarks.gpu`` runs it: with its reference, and with whatever else can compute it.

Made on its device, run and measured, and dropped before the next is made.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from kernels.tuning import Gpu

Call = Callable[[], torch.Tensor]
Other = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Case:
    """One call of one size.

    ``exact`` is the reference, in float32 where the kernel calculates. ``others`` are what else could compute it, by
    name. ``moved`` is the fewest bytes that any way must read and write, ``operations`` the fewest additions and
    multiplications.
    """

    name: str
    size: str
    kernel: Call
    exact: Call
    moved: int
    operations: int = 0
    others: Mapping[str, Other] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Place:
    """Where cases are made, and whether in sizes that an interpreter can do."""

    device: torch.device
    dtype: torch.dtype
    small: bool = False

    def random(self, *shape: int) -> torch.Tensor:
        """Normal numbers, of the place's type."""
        return torch.randn(*shape, device=self.device).to(self.dtype)

    @property
    def gpu(self) -> Gpu:
        """What tuning tables depend on."""
        return Gpu.of(self.device)


def size_of(*tensors: torch.Tensor) -> int:
    """Bytes."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
