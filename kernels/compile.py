"""``python -m kernels.compile [PATTERN]``: every Triton kernel compiled for A100 and H100 without a GPU.

The kernels' public functions are called with tensors as models have them. What they would launch is recorded and
compiled instead. The table has registers and spilled bytes per thread and shared memory per block, as ``ptxas`` and
Triton report them. A kernel that spills or wants more shared memory than a block may have fails the command.
"""

import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels import fused_pointwise, page_copies
from kernels.attention.latent import Selection
from kernels.attention.paged import PagedAttention
from kernels.attention.paged_latent import PagedLatentAttention
from kernels.attention.segments import Segment
from kernels.delta_rule import DeltaRows
from kernels.fused_delta_rule import FusedDeltaRule
from kernels.fused_sampling import draw_tokens
from kernels.grouped_experts import GroupedExperts
from kernels.launch import INTERPRETED, Argument, Launch, recorded_launches
from kernels.pages import PageShape, Slots
from kernels.sampling import RowFilters
from kernels.tuning import A100, H100, Gpu

SHARED_LIMIT: Final = {80: 163 << 10, 90: 227 << 10}
"""Bytes of shared memory that a block may have, by compute capability (CUDA C++ Programming Guide, table of limits)."""

TYPE_NAMES: Final = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
}

DIVISIBILITY: Final = 16
"""Triton makes faster code for what is a multiple of this."""

CPU: Final = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Case:
    """A call as a model makes it, for a GPU of one kind."""

    name: str
    call: Callable[[Gpu], None]


@dataclass(frozen=True, slots=True)
class Usage:
    """What one kernel takes on one architecture."""

    case: str
    kernel: str
    architecture: int
    warps: int
    registers: int
    shared: int
    spilled: int

    @property
    def fits(self) -> bool:
        """Whether it runs without spills."""
        return self.spilled == 0 and self.shared <= SHARED_LIMIT[self.architecture]


def compile_launch(case: str, launch: Launch, architecture: int) -> Usage:
    """Compile what a launch would have run."""
    function = launch.kernel.function
    signature: dict[str, str] = dict.fromkeys(function.arg_names, "constexpr")
    constants: dict[str, object] = dict(launch.constants)
    attributes: dict[tuple[int], list[list[object]]] = {}
    for index, (name, argument) in enumerate(zip(function.arg_names, launch.arguments, strict=False)):
        is_settled = name not in launch.kernel.varying
        if is_settled and isinstance(argument, int) and argument == 1:
            constants[name] = 1
            continue
        signature[name] = _type_name(argument)
        if is_settled and _is_divisible(argument):
            attributes[index,] = [["tt.divisibility", DIVISIBILITY]]
    compiled = triton.compile(
        ASTSource(function, signature, constants, attributes),
        target=GPUTarget("cuda", architecture, 32),
        options={"num_warps": launch.warps, "num_stages": launch.stages},
    )
    registers, spilled = _assemble(compiled.asm["ptx"], compiled.metadata.target.arch)
    return Usage(
        case, launch.kernel.name, architecture, launch.warps, registers, int(compiled.metadata.shared), spilled
    )


def _type_name(argument: Argument) -> str:
    if isinstance(argument, torch.Tensor):
        return "*" + TYPE_NAMES[argument.dtype]
    if isinstance(argument, float):
        return "fp32"
    return "i32" if -(1 << 31) <= argument < 1 << 31 else "i64"


def _is_divisible(argument: Argument) -> bool:
    if isinstance(argument, torch.Tensor):
        return argument.data_ptr() % DIVISIBILITY == 0
    return isinstance(argument, int) and argument % DIVISIBILITY == 0


def _assemble(ptx: str, architecture: int) -> tuple[int, int]:
    """Registers, and bytes spilled or kept in local memory, of a thread."""
    with tempfile.TemporaryDirectory() as directory:
        source = Path(directory, "kernel.ptx")
        source.write_text(ptx)
        # The one that Triton uses; sm_90 is compiled with the features of that architecture alone.
        target = f"sm_{architecture}{'a' if architecture == H100.architecture else ''}"
        done = subprocess.run(  # noqa: S603 - Triton's own assembler
            [
                triton.knobs.nvidia.ptxas.path,
                "-v",
                f"--gpu-name={target}",
                str(source),
                "-o",
                f"{directory}/kernel.cubin",
            ],
            capture_output=True,
            text=True,
            check=True,
        )
    registers = [int(number) for number in re.findall(r"Used (\d+) registers", done.stderr)]
    local = re.findall(r"(\d+) bytes (?:stack frame|spill stores|spill loads)", done.stderr)
    return max(registers), sum(map(int, local))


def _writes(dtype: torch.dtype, sizes: tuple[int, int, int, int]) -> Callable[[Gpu], None]:
    def call(gpu: Gpu) -> None:
        del gpu
        cache = torch.empty(3, *sizes, dtype=dtype)
        slots = Slots(torch.zeros(8, dtype=torch.int64), torch.zeros(8, dtype=torch.int64))
        page_copies.write_slots(cache, slots, cache.new_empty(8, *sizes[:2], sizes[3]))

    return call


def _transfers(dtype: torch.dtype, sizes: tuple[int, int, int, int]) -> Callable[[Gpu], None]:
    def call(gpu: Gpu) -> None:
        del gpu
        caches = [torch.empty(16, *sizes, dtype=dtype) for _ in range(3)]
        payload = [torch.empty(*sizes[:2], 64, sizes[3], dtype=dtype) for _ in range(3)]
        page_copies.gather_tokens(caches, np.arange(16), 0, 64, payload)
        page_copies.scatter_tokens(caches, np.arange(16), 0, 64, payload)

    return call


def _attention(
    dtype: torch.dtype,
    sizes: tuple[int, int, int, int],
    group: int,
    window: int | None = None,
    sinks: int = 0,
) -> Callable[[Gpu], None]:
    def call(gpu: Gpu) -> None:
        cache = torch.empty(600, *sizes, dtype=dtype)
        segments = [Segment(0, 1, 8192, np.zeros(512, np.int64)), Segment(1, 48, 8192, np.zeros(512, np.int64))]
        attention = PagedAttention(gpu)
        plan = attention.plan(segments, PageShape.of(cache), window, CPU, sinks=sinks)
        attention.attend(cache.new_empty(49, group * sizes[1], sizes[3]), cache, plan, 0.125)

    return call


def _latents(dtype: torch.dtype, heads: int, *, is_sparse: bool) -> Callable[[Gpu], None]:
    def call(gpu: Gpu) -> None:
        cache = torch.empty(600, 1, 1, 64, 576, dtype=dtype)
        segments = [Segment(0, 1, 8192, np.zeros(128, np.int64)), Segment(1, 48, 8192, np.zeros(128, np.int64))]
        attention = PagedLatentAttention(gpu)
        plan = attention.plan(segments, PageShape.of(cache), CPU)
        selection = Selection(torch.zeros(49, 2048, dtype=torch.int64)) if is_sparse else None
        query = cache.new_empty(49, heads, 576)
        attention.attend(query, cache, plan, latent_dim=512, scale=0.125, selection=selection)

    return call


def _index(dtype: torch.dtype) -> Callable[[Gpu], None]:
    def call(gpu: Gpu) -> None:
        cache = torch.empty(300, 1, 1, 64, 128, dtype=dtype)
        segments = [Segment(0, 1, 8192, np.zeros(128, np.int64)), Segment(1, 48, 8192, np.zeros(128, np.int64))]
        attention = PagedLatentAttention(gpu)
        plan = attention.plan(segments, PageShape.of(cache), CPU)
        attention.select_tokens(cache.new_empty(49, 64, 128), torch.empty(49, 64), cache, plan, 2048)

    return call


def _experts(dtype: torch.dtype, rows: int) -> Callable[[Gpu], None]:
    def call(gpu: Gpu) -> None:
        hidden = torch.empty(rows, 2048, dtype=dtype)
        gate_up, down = hidden.new_empty(1, 1).expand(128, 1536, 2048), hidden.new_empty(1, 1).expand(128, 2048, 768)
        chosen = torch.arange(8).expand(rows, 8)
        GroupedExperts(gpu)(hidden, gate_up, down, chosen, torch.empty(rows, 8), lambda inner: inner[:, :768])

    return call


def _delta_rule(gpu: Gpu) -> None:
    key, value, scalars = torch.empty(100, 16, 128), torch.empty(100, 32, 128), torch.empty(100, 32)
    rows, state = DeltaRows(key, key, value, scalars, scalars), torch.empty(100, 32, 128, 128)
    FusedDeltaRule(gpu).delta_rule_row(rows, state)
    FusedDeltaRule(gpu).delta_rule_chunk(rows, state[0])


def _draws(gpu: Gpu) -> None:
    del gpu
    draw_tokens(torch.empty(64, 151936), [RowFilters(40, 0.9, 0.1)] * 64, np.zeros(64))


def _pointwise(dtype: torch.dtype, width: int) -> Callable[[Gpu], None]:
    def call(gpu: Gpu) -> None:
        del gpu
        hidden, weight = torch.empty(4, width, dtype=dtype), torch.empty(width, dtype=dtype)
        fused_pointwise.rms_norm(hidden, weight, 1e-5)
        fused_pointwise.add_rms_norm(hidden, torch.empty_like(hidden), weight, 1e-5)
        heads, angles = hidden.view(4, width // 128, 128), torch.empty(4, 1, 64, dtype=dtype)
        fused_pointwise.apply_rotary(heads, angles, angles)
        fused_pointwise.apply_rotary_interleaved(heads, angles, angles)
        gate_up = torch.empty(4, 8 * width, dtype=dtype)
        fused_pointwise.silu_and_multiply(gate_up)
        fused_pointwise.gelu_and_multiply(gate_up)

    return call


def cases() -> Iterator[Case]:
    """Every kernel, with the sizes of models that are in use."""
    for dtype in (torch.bfloat16, torch.float32):
        short = TYPE_NAMES[dtype]
        yield Case(f"write {short} 8x128", _writes(dtype, (2, 8, 16, 128)))
        yield Case(f"transfer {short} 8x128", _transfers(dtype, (2, 8, 16, 128)))
        for head_dim, group in ((64, 3), (80, 1), (128, 4), (128, 8), (256, 8)):
            yield Case(f"attention {short} {head_dim}, group {group}", _attention(dtype, (2, 2, 16, head_dim), group))
        yield Case(f"attention {short} 128, window", _attention(dtype, (2, 2, 16, 128), 4, 4096, 4))
        yield Case(f"attention {short} 256, values 512", _attention(dtype, (3, 1, 16, 256), 4))
        yield Case(f"latents {short}, 128 heads", _latents(dtype, 128, is_sparse=False))
        yield Case(f"selected latents {short}, 16 heads", _latents(dtype, 16, is_sparse=True))
        yield Case(f"index {short}, 64 heads", _index(dtype))
        for rows in (8, 1024, 4096):
            yield Case(f"experts {short}, {rows} rows", _experts(dtype, rows))
        for width in (4096, 7168):
            yield Case(f"pointwise {short} {width}", _pointwise(dtype, width))
    yield Case("attention fp16 128, group 8", _attention(torch.float16, (2, 2, 16, 128), 8))
    yield Case("delta rule 128x128", _delta_rule)
    yield Case("draws of 151936", _draws)
    yield Case("write bf16 latent 576", _writes(torch.bfloat16, (1, 1, 64, 576)))


def main(wanted: str) -> int:
    """Print the table of the calls whose names match a regular expression; 1 if a kernel does not fit."""
    if INTERPRETED:
        print("TRITON_INTERPRET is set: nothing would be compiled. Unset it.", file=sys.stderr)
        return 1
    begin = time.perf_counter()
    used: list[Usage] = []
    print(f"{'call':32} {'kernel':20} {'sm':>3} {'warps':>5} {'registers':>9} {'shared':>7} {'spilled':>7}")
    for case in cases():
        if not re.search(wanted, case.name):
            continue
        for gpu in (A100, H100):
            with recorded_launches() as launches:
                case.call(gpu)
            for launch in launches:
                usage = compile_launch(case.name, launch, gpu.architecture)
                used.append(usage)
                print(
                    f"{usage.case:32} {usage.kernel:20} {usage.architecture:3} {usage.warps:5} {usage.registers:9} "
                    f"{usage.shared:7} {usage.spilled:7}{'' if usage.fits else '  does not fit'}",
                    flush=True,
                )
    failed = sum(not usage.fits for usage in used)
    print(f"{len(used)} kernels in {time.perf_counter() - begin:.0f} s, {failed} do not fit")
    return int(failed > 0 or not used)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else ""))
