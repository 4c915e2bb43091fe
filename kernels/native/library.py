"""The compiled kernels: C++ for the processor that this process runs on, made by the machine's own compiler.

Compiled once per processor, compiler and source into the cache directory, a matter of seconds, and loaded by the
first use. A machine without a compiler has the plain PyTorch kernels; nothing else depends on these.
"""

import ctypes
import functools
import hashlib
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Final

from kernels.cache_directory import cache_directory

SOURCES: Final = ("linear.cpp", "unit_linear.cpp", "attention.cpp", "pointwise.cpp", "recording.cpp")
HEADERS: Final = ("vector.h", "matrix_unit.h", "call.h")
FLAGS: Final = (
    "-O3",
    "-march=native",
    "-std=c++17",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fopenmp",
    "-fPIC",
    "-shared",
)
COMPILERS: Final = ("c++", "g++", "clang++")
COMPILE_SECONDS = 120.0


class NoCompiledKernels(RuntimeError):
    """They could not be made; the message says why."""


@functools.cache
def library() -> ctypes.CDLL:
    """The loaded kernels, compiled if they were not yet. Raises ``NoCompiledKernels``."""
    compiler = next((path for path in map(shutil.which, COMPILERS) if path is not None), None)
    if compiler is None:
        raise NoCompiledKernels(f"there is no C++ compiler on PATH ({', '.join(COMPILERS)})")
    path = cache_directory() / "kernels" / f"{_fingerprint(compiler)}.so"
    if not path.exists():
        _compile(compiler, path)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise NoCompiledKernels(f"{path} does not load: {error}") from None


def has_matrix_unit() -> bool:
    """Whether this process may use the processor's matrix unit, which multiplies bfloat16."""
    may_use: int = library()["may_use_matrix_unit"]()
    return may_use != 0


def _fingerprint(compiler: str) -> str:
    """Of everything that the result depends on: source, flags, compiler, and the processor that ``native`` means."""
    version = subprocess.run(  # noqa: S603 - a compiler of PATH
        [compiler, "--version"], capture_output=True, text=True, check=False
    ).stdout
    digest = hashlib.sha256("\0".join((*FLAGS, compiler, version, _processor())).encode())
    for name in (*SOURCES, *HEADERS):
        digest.update((Path(__file__).parent / name).read_bytes())
    return digest.hexdigest()[:32]


def _processor() -> str:
    """Its kind and instructions, as the kernel lists them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    described = ("vendor_id", "cpu family", "model", "flags", "CPU implementer", "CPU part", "Features")
    return "\n".join(sorted({line for line in lines if line.split("\t")[0].split(":")[0].strip() in described}))


def _compile(compiler: str, path: Path) -> None:
    """Write ``path`` at once, since several processes may begin together."""
    here = Path(__file__).parent
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as directory:
            made = Path(directory) / path.name
            command = [compiler, *FLAGS, *(str(here / name) for name in SOURCES), "-o", str(made)]
            done = subprocess.run(  # noqa: S603 - the same compiler, our own sources
                command, capture_output=True, text=True, timeout=COMPILE_SECONDS, check=False
            )
            if done.returncode != 0:
                raise NoCompiledKernels(f"{compiler} failed: {done.stderr.strip()[-500:]}")
            made.replace(path)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoCompiledKernels(f"kernels cannot be compiled into {path.parent}: {error}") from None
