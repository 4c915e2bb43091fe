"""A compiled kernel for one element type. It takes its arguments as words in a row, as ``call.h`` reads them.

Found once for each type and then called from any thread. While a ``Recording`` is made its calls are kept for later.
"""

import ctypes
import functools
import struct
from typing import Final

import torch

from kernels.native.library import NoCompiledKernels, library
from kernels.native.recording import recording_here

TYPES: Final = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
"""What the kernels' elements may be, by what their functions' names end with."""

POINTER, INTEGER, REAL = "P", "q", "f4x"
"""One argument each, of 8 bytes. A pointer to nothing is 0."""


class Kernel:
    """See the module."""

    def __init__(self, name: str, dtype: torch.dtype, *arguments: str) -> None:
        """``arguments`` are their kinds. Raises ``NoCompiledKernels`` if there is none for the type."""
        try:
            self._function = library()[f"{name}_{TYPES[dtype]}"]
        except (AttributeError, KeyError):
            raise NoCompiledKernels(f"no compiled {name} for {dtype}") from None
        self._function.argtypes, self._function.restype = (ctypes.c_char_p,), None
        address = ctypes.cast(self._function, ctypes.c_void_p).value
        assert address is not None
        self._address = address
        self._words = struct.Struct("".join(arguments))

    def __call__(self, *arguments: float) -> None:
        """Addresses, integers and floats."""
        words = self._words.pack(*arguments)
        recording = recording_here()
        if recording is None:
            self._function(words)
        else:
            recording.keep(self._address, words)


@functools.cache
def kernel(name: str, dtype: torch.dtype, *arguments: str) -> Kernel:
    """The only one of its name and type."""
    return Kernel(name, dtype, *arguments)
