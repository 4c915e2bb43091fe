"""Triton's typed edge: how our modules declare kernels and launch them.

Only modules that hold Triton kernels import this one, so a machine without Triton never does. A kernel is declared once
at import. Set ``TRITON_INTERPRET=1`` before anything imports Triton, and kernels run on CPU tensors, slowly, in Python.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final, ParamSpec, TypeVar

import torch
import triton

INTERPRETED: Final[bool] = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether kernels run in Triton's interpreter. It computes wrongly in bfloat16, so kernels widen there."""

SUPPORTED_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)
"""What kernels calculate with; those that only copy take anything."""

WORDS: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By element size, what kernels copy elements as."""

LEAST_PRODUCT: Final = 16
"""Every dimension of a matrix product is at least this long."""

Argument = torch.Tensor | int | float
P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch as it was asked for."""

    kernel: "Kernel"
    arguments: tuple[Argument, ...]
    constants: dict[str, object]
    warps: int
    stages: int


_recorded: ContextVar[list[Launch] | None] = ContextVar("recorded launches", default=None)


@contextmanager
def recorded_launches() -> Iterator[list[Launch]]:
    """Within it this thread launches nothing; what it would have launched is appended to the list."""
    launches: list[Launch] = []
    token = _recorded.set(launches)
    try:
        yield launches
    finally:
        _recorded.reset(token)


class Kernel:
    """A function that runs once per point of a grid.

    Parameters that are ``tl.constexpr`` are its constants: every value is compiled anew. ``tl.tensor`` is an address or
    a number that a model settles, such as a stride: code depends on whether it is a multiple of 16, or 1. An ``int``
    of 32 bits differs from step to step: no code depends on it.
    """

    def __init__(self, function: Callable[..., None]) -> None:
        self.name = function.__name__
        self.varying = frozenset(name for name, kind in function.__annotations__.items() if kind is int)
        self.function: Any = triton.jit(function, do_not_specialize=sorted(self.varying))

    def launch(
        self, grid: tuple[int, ...], *arguments: Argument, warps: int = 4, stages: int = 2, **constants: object
    ) -> None:
        """Run on the current device and stream; an empty grid is no launch."""
        launches = _recorded.get()
        if launches is not None:
            launches.append(Launch(self, arguments, constants, warps, stages))
        elif all(grid):
            self.function[grid](*arguments, num_warps=warps, num_stages=stages, **constants)


def inlined(function: Callable[P, R]) -> Callable[P, R]:
    """A function that kernels call."""
    compiled: Callable[P, R] = triton.jit(function)
    return compiled


def next_power_of_two(number: int) -> int:
    """The least power of two that is at least ``number``: sizes of Triton's tiles are such."""
    return 1 << (number - 1).bit_length()
