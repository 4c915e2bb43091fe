"""Time of one engine step: decode by batch and context, prefill by length, and what each is made of.

    python -m benchmarks.engine [--model smollm2] [--threads N] [--dtype float32] [--kv-sharing RULE] [--growth]

Every step is computed by the engine's own model runner, prompts in steps as large as an engine's, and by turns the
step's products with weights on rows of random numbers, by the same kernels. Figures are medians in milliseconds. Shares
of linear layers and attention are of further steps, launched kernel by kernel, in which the time within them is taken;
the rest is norms, rotary positions, activations, planning and Python. ``--growth`` adds decode steps over batches and
contexts one by one, and the scheduler's time for planning and committing a step of 8 requests while 10 to 1,000 others
wait. Prints tables and writes ``bench-results/engine.json``, with ``--growth`` also ``engine.svg``.
"""

import argparse
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from unittest.mock import patch

import matplotlib
import numpy as np
import torch
from matplotlib import pyplot

from cluster.bench.report import Environment
from cluster.model_store import resolve_model
from worker.config import EngineConfig, Role
from worker.layers.attention import Attention
from worker.layers.matrix import Matrix
from worker.model_runner import ModelRunner
from worker.models.decoder import Decoder
from worker.ranks.commands import SequenceRows
from worker.sampling_params import SamplingParams
from worker.scheduler import NO_PREFILL, Scheduler
from worker.sequence import RequestId, Sequence

BATCHES, CONTEXTS = (1, 8, 32), (256, 2000)
PROMPTS = (512, 2000)
STEP_TOKENS = 1024
GROWING_BATCHES = (1, 2, 4, 8, 16, 32, 64)
GROWING_CONTEXTS = (128, 256, 512, 1000, 2000, 4000, 8000)
BATCH, CONTEXT = 8, 256
WAITING = (10, 100, 1000)
REPEATS = 9
SHARE_REPEATS = 3
BLOCK = 16
RESULTS = Path("bench-results")

Steps = list[list[SequenceRows]]
"""What is computed together, one after another."""


@dataclass
class Parts:
    """Seconds within linear layers and within attention since ``taken`` was entered."""

    linear: float = 0.0
    attention: float = 0.0

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Take the time of every call within."""
        with ExitStack() as stack:
            for owner, method, part in (
                (Matrix, "__call__", "linear"),
                (Attention, "write", "attention"),
                (Attention, "attend", "attention"),
            ):
                stack.enter_context(patch.object(owner, method, self._timed(getattr(owner, method), part)))
            yield

    def _timed(self, call: Callable[..., object], part: str) -> Callable[..., object]:
        def timed(*arguments: object) -> object:
            begin = time.perf_counter()
            result = call(*arguments)
            setattr(self, part, getattr(self, part) + time.perf_counter() - begin)
            return result

        return timed


@dataclass(frozen=True, slots=True)
class Measured:
    """One row of the table: milliseconds of the step and of its products alone; shares of the step."""

    phase: str
    batch: int
    tokens: int
    step: float
    products: float
    linear: float
    attention: float

    @property
    def rest(self) -> float:
        """Norms, rotary positions, activations, planning, Python."""
        return 1.0 - self.linear - self.attention

    def row(self) -> str:
        """A line of the table."""
        return (
            f"{self.phase:9}{self.batch:>6}{self.tokens:>8}{self.step:>11.1f}{self.products:>13.1f}"
            f"{self.step / self.products:>8.2f}{self.linear:>10.0%}{self.attention:>11.0%}{self.rest:>7.0%}"
        )


HEADING = f"{'phase':9}{'batch':>6}{'tokens':>8}{'step ms':>11}{'products ms':>13}{'ratio':>8}" + (
    f"{'linears':>10}{'attention':>11}{'rest':>7}"
)


def milliseconds(*actions: Callable[[], object], repeats: int) -> list[float]:
    """Each one's median; they take turns, and the first round is not measured."""
    times: list[list[float]] = [[] for _ in actions]
    for _ in range(repeats + 1):
        for action, found in zip(actions, times, strict=True):
            begin = time.perf_counter()
            action()
            found.append(1e3 * (time.perf_counter() - begin))
    return [statistics.median(found[1:]) for found in times]


def decode_steps(batch: int, context: int) -> Steps:
    """The last token of ``batch`` sequences of ``context`` tokens, each with blocks of its own."""
    blocks = -(-context // BLOCK)
    return [
        [
            SequenceRows(
                token_ids=np.array([100 + index]),
                first=context - 1,
                logit_rows=1,
                tables=(np.arange(index * blocks, (index + 1) * blocks),),
            )
            for index in range(batch)
        ]
    ]


def prompt_steps(tokens: int, *, has_head: bool = True) -> Steps:
    """A prompt in steps as large as an engine's; logits of the last token."""
    ids = np.random.default_rng(0).integers(100, 40_000, tokens)
    table = (np.arange(-(-tokens // BLOCK)),)
    return [
        [SequenceRows(ids[first : first + STEP_TOKENS], first, int(has_head and first + STEP_TOKENS >= tokens), table)]
        for first in range(0, tokens, STEP_TOKENS)
    ]


def compute(runner: ModelRunner, steps: Steps) -> None:
    """All steps."""
    for rows in steps:
        runner.execute(rows)


def products(model: Decoder, steps: Steps) -> Callable[[], None]:
    """Every product with weights of the steps, on random rows."""
    last_owner, *sharing = model.from_last_owner
    dtype = model.embedding.weight.dtype
    counts = [(sum(s.rows for s in rows), sum(s.logit_rows for s in rows)) for rows in steps]
    most = max(rows for rows, _ in counts)
    hidden = torch.randn(most, model.hidden_size).to(dtype)
    attended = torch.randn(most, last_owner.attention.heads * last_owner.attention.head_dim).to(dtype)

    def run() -> None:
        for rows, wanted in counts:
            for layer in model.before_last_owner:
                layer.qkv(hidden[:rows])
                layer.output(attended[:rows])
                layer.feed_forward(hidden[:rows])
            last_owner.qkv(hidden[:rows])
            if wanted:
                for layer in sharing:
                    layer.qkv(hidden[:wanted])
                for layer in (last_owner, *sharing):
                    layer.output(attended[:wanted])
                    layer.feed_forward(hidden[:wanted])
                model.head(hidden[:wanted])

    return run


def measure(runner: ModelRunner, phase: str, batch: int, tokens: int) -> Measured:
    """One row of the table."""
    assert isinstance(runner.model, Decoder), "this benchmark knows the plain decoder's layers"
    steps = decode_steps(batch, tokens) if phase == "decode" else prompt_steps(tokens)
    repeats = REPEATS if phase == "decode" else SHARE_REPEATS
    whole_step = partial(compute, runner, steps)
    step, alone = milliseconds(whole_step, products(runner.model, steps), repeats=repeats)
    parts = Parts()
    # A recorded step has no parts.
    with patch.object(runner, "_graphs", None), parts.taken():
        begin = time.perf_counter()
        for _ in range(SHARE_REPEATS):
            whole_step()
        whole = time.perf_counter() - begin
    return Measured(phase, batch, tokens, step, alone, parts.linear / whole, parts.attention / whole)


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
    return milliseconds(step, repeats=100)[0]


def main() -> None:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--kv-sharing", default="model")
    parser.add_argument("--growth", action="store_true", help="over more batches and contexts, and the scheduler")
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
        max_batched_tokens=STEP_TOKENS,
        max_running_requests=BATCH,
        max_waiting_requests=2 * max(WAITING),
        prefix_caching=False,
    )
    runner = ModelRunner(config)
    cases = [("decode", batch, context) for context in CONTEXTS for batch in BATCHES]
    cases += [("prefill", 1, tokens) for tokens in PROMPTS]
    if arguments.growth:
        cases += [("decode", batch, CONTEXT) for batch in GROWING_BATCHES if batch not in BATCHES]
        cases += [("decode", BATCH, context) for context in GROWING_CONTEXTS if context not in CONTEXTS]
    print(f"{arguments.model}, {arguments.dtype}, {arguments.threads} threads, kv-sharing {arguments.kv_sharing}")
    print(HEADING)
    measured: list[Measured] = []
    with torch.inference_mode():
        for phase, batch, tokens in cases:
            if tokens > runner.max_model_len or batch * -(-tokens // BLOCK) > runner.num_blocks:
                print(f"{phase:9}{batch:>6}{tokens:>8}  longer than the model or its cache")
                continue
            measured.append(measure(runner, phase, batch, tokens))
            print(measured[-1].row(), flush=True)
    planning = {}
    if arguments.growth:
        planning = {waiting: scheduler_milliseconds(runner, config, waiting) for waiting in WAITING}
        for waiting, found in planning.items():
            print(f"scheduler, {BATCH} running, {waiting:>5} waiting: {found:.3f} ms a step")
    RESULTS.mkdir(exist_ok=True)
    environment = Environment.here(shlex.join(["python", "-m", "benchmarks.engine", *sys.argv[1:]]), arguments.model)
    written = {
        "environment": asdict(environment),
        "steps": [asdict(one) for one in measured],
        "scheduler": planning,
    }
    (RESULTS / "engine.json").write_text(json.dumps(written, indent=2) + "\n")
    if arguments.growth:
        _plot(measured, planning)


def _plot(measured: list[Measured], planning: dict[int, float]) -> None:
    matplotlib.use("svg")
    figure, (by_batch, by_context, by_queue) = pyplot.subplots(1, 3, figsize=(13, 3.5), constrained_layout=True)
    decodes = [one for one in measured if one.phase == "decode"]
    for axes, name, points in (
        (by_batch, "requests in the batch", {m.batch: m for m in decodes if m.tokens == CONTEXT}),
        (by_context, "tokens of context", {m.tokens: m for m in decodes if m.batch == BATCH}),
    ):
        shown = dict(sorted(points.items()))
        axes.plot(list(shown), [m.step for m in shown.values()], marker="o", label="step")
        axes.plot(list(shown), [m.products for m in shown.values()], marker="o", label="its products alone")
        axes.set_xlabel(name)
        axes.set_ylabel("milliseconds")
        axes.set_ylim(bottom=0)
        axes.legend()
    by_queue.plot(list(planning), list(planning.values()), marker="o")
    by_queue.set_xscale("log")
    by_queue.set_xlabel("requests that wait")
    by_queue.set_ylabel("scheduler, milliseconds a step")
    by_queue.set_ylim(bottom=0)
    figure.savefig(RESULTS / "engine.svg")


if __name__ == "__main__":
    main()
