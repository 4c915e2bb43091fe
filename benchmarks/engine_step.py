"""Time of one engine step by batch and context, beside that of its matrix products alone.

    python -m benchmarks.engine_step [--model smollm2] [--threads N] [--dtype float32]

A decode step of every (batch, context) is computed by the engine's own model runner, and by turns the step's products
with weights on rows of random numbers, by the same kernels. Figures are medians in milliseconds. The scheduler's time
is that of planning and committing one step of 8 requests while 10 to 1,000 others wait. Prints tables and writes
``bench-results/engine_step.json`` and ``engine_step.svg``.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import matplotlib
import numpy as np
import torch
from matplotlib import pyplot

from cluster.model_store import resolve_model
from worker.config import EngineConfig, Role
from worker.model_runner import ModelRunner
from worker.models.decoder import Decoder, DecoderLayer
from worker.ranks.commands import SequenceRows
from worker.sampling_params import SamplingParams
from worker.scheduler import NO_PREFILL, Scheduler
from worker.sequence import RequestId, Sequence

BATCHES = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (128, 256, 512, 1000, 2000, 4000, 8000)
BATCH, CONTEXT = 8, 256
WAITING = (10, 100, 1000)
REPEATS = 9
BLOCK = 16
RESULTS = Path("bench-results")


def milliseconds(action: Callable[[], object], repeats: int = REPEATS) -> float:
    """Median, after one call that is not measured."""
    action()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        action()
        times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times)


def decode_rows(batch: int, context: int) -> list[SequenceRows]:
    """The last token of ``batch`` sequences of ``context`` tokens, each with blocks of its own."""
    blocks = -(-context // BLOCK)
    return [
        SequenceRows(
            token_ids=np.array([100 + index]),
            first=context - 1,
            logit_rows=1,
            tables=(np.arange(index * blocks, (index + 1) * blocks),),
        )
        for index in range(batch)
    ]


def products(model: Decoder, batch: int) -> Callable[[], None]:
    """Every product with weights of one step, on random rows."""
    layers: list[DecoderLayer] = [*model.before_last_owner, *model.from_last_owner]
    dtype = model.embedding.weight.dtype
    hidden = torch.randn(batch, model.hidden_size).to(dtype)

    def run() -> None:
        for layer in layers:
            layer.qkv(hidden)
            layer.output(attended)
            layer.feed_forward(hidden)
        model.head(hidden)

    attended = torch.randn(batch, layers[0].attention.heads * layers[0].attention.head_dim).to(dtype)
    return run


def scheduler_milliseconds(runner: ModelRunner, config: EngineConfig, waiting: int) -> float:
    """Planning and committing a decode step of ``BATCH`` requests, with ``waiting`` in the queue."""
    scheduler = Scheduler(config, runner.cache_manager(), runner.max_model_len)

    def add(index: int) -> None:
        sequence = Sequence(
            request_id=RequestId(f"r{index}"),
            choice=0,
            tokens=[100 + index % 100] * 32,
            prompt_len=32,
            sampling=SamplingParams(max_tokens=1 << 20, ignore_eos=True),
            salt=str(index),
            arrival=0.0,
            deadline=1e9,
        )
        scheduler.add(sequence)

    def step() -> None:
        plan = scheduler.schedule(1.0, NO_PREFILL)
        scheduler.commit(plan, [100] * len(plan.draws), 1.0)

    for index in range(BATCH):
        add(index)
    while len(scheduler.running) < BATCH or any(s.computed < s.prompt_len for s in scheduler.running):
        step()
    for index in range(waiting):
        add(BATCH + index)
    return milliseconds(step, 100)


def main() -> None:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--kv-sharing", default="model")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    config = EngineConfig(
        model=str(resolve_model(arguments.model).weights),
        role=Role.COLOCATED,
        dtype=arguments.dtype,
        kv_sharing=arguments.kv_sharing,
        block_size=BLOCK,
        # Room for the longest context, and for the scheduler's batch.
        kv_cache_memory=4 << 30,
        max_running_requests=BATCH,
        max_waiting_requests=2 * max(WAITING),
        prefix_caching=False,
    )
    runner = ModelRunner(config)
    model = runner.model
    assert isinstance(model, Decoder), "this benchmark knows the plain decoder's layers"
    cases = [(batch, CONTEXT) for batch in BATCHES] + [(BATCH, context) for context in CONTEXTS if context != CONTEXT]
    measured = {}
    print(f"{arguments.model}, {arguments.dtype}, {arguments.threads} threads, kv-sharing {arguments.kv_sharing}")
    print(f"{'batch':>6}{'context':>9}{'step ms':>10}{'products ms':>13}{'ratio':>8}")
    with torch.inference_mode():
        for batch, context in cases:
            rows = decode_rows(batch, context)
            if batch * len(rows[0].tables[0]) > runner.num_blocks:
                continue
            step = milliseconds(lambda rows=rows: runner.execute(rows))
            alone = milliseconds(products(model, batch))
            measured[batch, context] = step, alone
            print(f"{batch:>6}{context:>9}{step:>10.1f}{alone:>13.1f}{step / alone:>8.2f}", flush=True)
    planning = {waiting: scheduler_milliseconds(runner, config, waiting) for waiting in WAITING}
    for waiting, found in planning.items():
        print(f"scheduler, {BATCH} running, {waiting:>5} waiting: {found:.3f} ms a step")
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "engine_step.json").write_text(
        json.dumps({f"{batch} {context}": found for (batch, context), found in measured.items()}, indent=2)
    )
    _plot(measured)


def _plot(measured: dict[tuple[int, int], tuple[float, float]]) -> None:
    matplotlib.use("svg")
    figure, (by_batch, by_context) = pyplot.subplots(1, 2, figsize=(9, 3.5), constrained_layout=True)
    for axes, name, own in ((by_batch, "requests in the batch", 0), (by_context, "tokens of context", 1)):
        fixed = (BATCH, CONTEXT)[1 - own]
        points = sorted((key[own], found) for key, found in measured.items() if key[1 - own] == fixed)
        axes.plot([x for x, _ in points], [found[0] for _, found in points], marker="o", label="step")
        axes.plot([x for x, _ in points], [found[1] for _, found in points], marker="o", label="its products alone")
        axes.set_xlabel(name)
        axes.set_ylabel("milliseconds")
        axes.set_ylim(bottom=0)
        axes.legend()
    figure.savefig(RESULTS / "engine_step.svg")


if __name__ == "__main__":
    main()
