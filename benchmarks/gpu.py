"""Every Triton kernel on a GPU: results beside the reference's, times beside PyTorch's best and what memory allows.

    python -m benchmarks.gpu [--dtype bfloat16] [--only PATTERN]

Cases are those of ``benchmarks.gpu_cases``: sizes of models that are in use. Of every one the kernel runs once and is
compared with its reference; then it is timed, and so is whatever else can compute it, attention by each of PyTorch's
backends (FlashAttention among them) that takes the case. Times are medians in microseconds, with the second-level cache
overwritten before each run. The floor is the time in which this GPU copies the bytes that must be moved, or multiplies
the matrices that must be multiplied, whichever is longer; both rates are measured first. A difference is the largest
from the reference, as a part of the largest number in it. Prints a table and writes ``bench-results/gpu.json``; ends
with 1 if a difference is larger than rounding explains.
"""

import argparse
import json
import re
import shlex
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from cluster.bench.report import Environment
from kernels.table import OLDEST_ARCHITECTURE, has_triton_kernels

if TYPE_CHECKING:
    from benchmarks.gpu_case import Case

RESULTS = Path("bench-results/gpu.json")
TOLERANCES = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 2e-5}
COPIED_BYTES = 1 << 30
PRODUCT = 8192


@dataclass(frozen=True, slots=True)
class Limits:
    """What this GPU does at best, as measured: bytes read and written, additions and multiplications, per second."""

    bytes_per_s: float
    operations_per_s: float

    @classmethod
    def measured(cls, dtype: torch.dtype) -> "Limits":
        """A copy of a gibibyte, and a large product."""
        source = torch.empty(COPIED_BYTES, dtype=torch.uint8, device="cuda")
        target = torch.empty_like(source)
        matrix = torch.randn(PRODUCT, PRODUCT, device="cuda").to(dtype)
        return cls(
            2e6 * COPIED_BYTES / microseconds(lambda: target.copy_(source)),
            2e6 * PRODUCT**3 / microseconds(lambda: matrix @ matrix),
        )

    def floor(self, case: "Case") -> float:
        """Microseconds."""
        return 1e6 * max(case.moved / self.bytes_per_s, case.operations / self.operations_per_s)


@dataclass(frozen=True, slots=True)
class Compared:
    """What came of a case; microseconds. Of ``others`` those that took it."""

    name: str
    size: str
    difference: float
    kernel: float
    floor: float
    others: dict[str, float]

    def row(self) -> str:
        """A line of the table."""
        others = "  ".join(f"{name} {time:,.1f}" for name, time in self.others.items())
        return (
            f"{self.name:20}{self.size:34}{self.difference:>11.1e}{self.kernel:>11,.1f}{self.floor:>10,.1f}"
            f"{self.floor / self.kernel:>8.0%}  {others}"
        )


HEADING = f"{'kernel':20}{'size':34}{'difference':>11}{'µs':>11}{'floor µs':>10}{'of it':>8}  others, µs"


def microseconds(call: Callable[[], object]) -> float:
    """Median on the GPU."""
    from triton.testing import do_bench  # noqa: PLC0415 - only where there is a GPU

    return 1e3 * float(do_bench(call, return_mode="median"))


def difference(case: "Case") -> float:
    """Of one run from the reference; not a number if the kernel gives none."""
    exact = case.exact().float()
    return float(((case.kernel().float() - exact).abs().max() / exact.abs().max()).item())


def compare(case: "Case", limits: Limits) -> Compared:
    """Result first, then times."""
    found = difference(case)
    others: dict[str, float] = {}
    for name, call in case.others.items():
        try:
            others[name] = microseconds(call)
        except RuntimeError as error:
            # A backend that does not take a mask, a head size or a type says so before it runs.
            print(f"  {case.name}, {case.size}: not by {name}: {str(error).splitlines()[0]}")
    return Compared(case.name, case.size, found, microseconds(case.kernel), limits.floor(case), others)


def why_not() -> str | None:
    """What is missing for Triton's kernels, or None."""
    if not torch.cuda.is_available():
        return "benchmarks.gpu runs Triton's kernels on a CUDA device, and PyTorch finds none on this machine"
    if not has_triton_kernels(torch.device("cuda")):
        oldest = ".".join(map(str, OLDEST_ARCHITECTURE))
        capability = ".".join(map(str, torch.cuda.get_device_capability()))
        return (
            f"benchmarks.gpu found {torch.cuda.get_device_name()} of compute capability {capability}: Triton's kernels "
            f"need Triton, PyTorch for CUDA, and {oldest} or newer"
        )
    return None


def main() -> int:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="bfloat16", choices=[str(dtype).split(".")[1] for dtype in TOLERANCES])
    parser.add_argument("--only", default="", metavar="PATTERN", help="a regular expression for kernels' names")
    arguments = parser.parse_args()
    if (missing := why_not()) is not None:
        print(missing, file=sys.stderr)
        return 2
    from benchmarks.gpu_case import Place  # noqa: PLC0415 - Triton is only where there is a GPU
    from benchmarks.gpu_cases import cases  # noqa: PLC0415

    dtype: torch.dtype = getattr(torch, arguments.dtype)
    torch.manual_seed(0)
    limits = Limits.measured(dtype)
    name = torch.cuda.get_device_name()
    rates = f"{limits.bytes_per_s / 1e9:,.0f} GB/s, {limits.operations_per_s / 1e12:,.0f} TFLOP/s"
    print(f"{name}, {arguments.dtype}: {rates}")
    print(HEADING)
    found: list[Compared] = []
    with torch.inference_mode():
        for case in cases(Place(torch.device("cuda"), dtype)):
            if re.search(arguments.only, case.name):
                found.append(compare(case, limits))
                print(found[-1].row(), flush=True)
    command = shlex.join(["python", "-m", "benchmarks.gpu", *sys.argv[1:]])
    written = {
        "environment": asdict(Environment.here(command, "")),
        "gpu": name,
        "cuda": torch.version.cuda,
        "limits": asdict(limits),
        "kernels": [asdict(one) for one in found],
    }
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(written, indent=2) + "\n")
    wrong = [one for one in found if not one.difference <= TOLERANCES[dtype]]
    for one in wrong:
        print(f"{one.name}, {one.size}: differs by {one.difference:.1e}, more than {TOLERANCES[dtype]:.0e}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
