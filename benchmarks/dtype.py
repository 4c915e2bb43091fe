"""Time of linear layers in each dtype on this CPU: the measurement behind ``--dtype auto``.

    python benchmarks/dtype.py

Prints milliseconds for one pass over 30 layers' projections of SmolLM2-135M's shape, and the ratio to float32.
"""

import statistics
import time

import torch
import torch.nn.functional as F

SHAPES = [(960, 576), (576, 576), (3072, 576), (576, 1536)]
LAYERS = 30
REPEATS = 3


def milliseconds(dtype: torch.dtype, rows: int) -> float:
    weights = [torch.randn(shape).to(dtype) for shape in SHAPES * LAYERS]
    inputs = {width: torch.randn(rows, width).to(dtype) for width in (576, 1536)}
    times = []
    for _ in range(REPEATS + 1):
        begin = time.perf_counter()
        for weight in weights:
            F.linear(inputs[weight.shape[1]], weight)
        times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times[1:])


def main() -> None:
    torch.set_num_threads(1)
    print(f"CPU capability {torch.backends.cpu.get_cpu_capability()}, 1 thread, median of {REPEATS}")
    print("rows  dtype       ms      × float32")
    for rows in (1, 8, 64):
        base = milliseconds(torch.float32, rows)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            taken = base if dtype is torch.float32 else milliseconds(dtype, rows)
            print(f"{rows:4}  {str(dtype).removeprefix('torch.'):9} {taken:8.1f}  {taken / base:6.2f}")


if __name__ == "__main__":
    main()
