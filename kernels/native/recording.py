"""Calls of compiled kernels that are made once from Python and then again and again without it.

A recording is made by going through a computation within it: kernels' calls are kept instead of made, and what they
allocate is memory of an arena, which stays. Played, it makes these calls, with the same addresses, whatever is there by
then. So within it nothing but kernels may compute: what PyTorch would do would find nothing there, and be missing when
it is played.
"""

import ctypes
import math
from collections.abc import Sequence
from contextvars import ContextVar, Token
from types import TracebackType
from typing import Any, Final, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.native.library import library

_LINE: Final = 64


class CannotRecord(RuntimeError):
    """Something else than a kernel would compute; the message names it."""


class Arena:
    """Memory that is given out from its beginning for every recording, and never given back.

    Several recordings may have the same, if none is made or played while another is.
    """

    SLAB: Final = 4 << 20

    def __init__(self) -> None:
        self._slabs: list[torch.Tensor] = []
        self._slab = 0
        self._used = 0

    def begin(self) -> None:
        """Give out everything once more."""
        self._slab = self._used = 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor on the CPU, of any content, which begins at a cache line."""
        count = math.prod(shape) * dtype.itemsize
        size = -(-count // _LINE) * _LINE
        while self._slab < len(self._slabs) and self._used + size > len(self._slabs[self._slab]):
            self._slab, self._used = self._slab + 1, 0
        if self._slab == len(self._slabs):
            # PyTorch's memory begins at a line.
            self._slabs.append(torch.empty(max(size, self.SLAB), dtype=torch.uint8))
        begin, self._used = self._used, self._used + size
        return self._slabs[self._slab][begin : begin + count].view(dtype).view(*shape)


class _Call(ctypes.Structure):
    """One call, as ``recording.cpp`` has it."""

    _fields_ = (("kernel", ctypes.c_void_p), ("arguments", ctypes.c_char_p))


class Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """See the module. What is entered must be left before it is played."""

    def __init__(self, arena: Arena) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._arena = arena
        self._calls: list[tuple[int, bytes]] = []
        self._before: Token[Recording | None] | None = None
        self._played = (_Call * 0)()

    def __enter__(self) -> Self:
        """Kernels' calls of this thread are kept from now on, and not made."""
        self._arena.begin()
        self._before = _here.set(self)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """And now no longer."""
        super().__exit__(kind, error, traceback)  # type: ignore[no-untyped-call]
        assert self._before is not None
        _here.reset(self._before)
        self._played = (_Call * len(self._calls))(*[_Call(*call) for call in self._calls])

    def keep(self, kernel: int, arguments: bytes) -> None:
        """Make this call when it is played."""
        self._calls.append((kernel, arguments))

    def play(self) -> None:
        """Make all calls."""
        library().make_calls(self._played, ctypes.c_long(len(self._played)))

    def __torch_dispatch__(
        self,
        function: torch._ops.OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        """Allocate from the arena; let views be views. Raises ``CannotRecord`` for all else."""
        options = kwargs or {}
        if function is torch.ops.aten.empty.memory_format:
            return self._arena.empty(args[0], options.get("dtype") or torch.get_default_dtype())
        if function is torch.ops.aten.new_empty.default:
            return self._arena.empty(args[1], options.get("dtype") or args[0].dtype)
        if function.is_view:
            return function(*args, **options)
        raise CannotRecord(f"{function} is not a compiled kernel")


_here: ContextVar[Recording | None] = ContextVar("recording", default=None)


def recording_here() -> Recording | None:
    """What this thread records into."""
    return _here.get()
