"""Time of a prompt's prefill with fewer and fewer of the layers that nothing later depends on.

    make bench-headless-prefill

Three ways to compute the same prompt, in steps as large as an engine's: *every layer* runs on every token and the head
on the last one; *colocated* is this engine with the whole model, which runs what follows the last owner's keys and
values only for the last token; *headless* is a prefill replica's model, which ends there. Models are SmolLM2-135M under
three sharing rules, and a Gemma 3n with random weights, large enough to be timed, whose last layers share KV by design.
The ways take turns, once each in every round; every figure is the median of the rounds, and only ratios within one run
mean anything. CPU time is measured beside wall time, because a machine that does something else as well lengthens only
the latter. Prints a table, beside each measured share the one that ``crosskv inspect`` works out, and writes
``bench-results/headless_prefill.json``.
"""

import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

import numpy as np
import torch
from transformers import Gemma3nForCausalLM, Gemma3nTextConfig

from cluster.config import ClusterConfig
from cluster.inspect_prefill import inspect_prefill
from cluster.model_store import resolve_model
from kernels.pages import IntArray
from worker.config import EngineConfig, Role
from worker.model_runner import ModelRunner
from worker.models.decoder import Decoder
from worker.models.gemma3n import Gemma3n
from worker.models.model import Model
from worker.ranks.commands import SequenceRows

PROMPT_TOKENS = 2000
STEP_TOKENS = 1024
ROUNDS = 5
THREADS = (1, 2)
EVERY_LAYER, COLOCATED, HEADLESS = "every layer", "colocated", "headless"
TARGET_RULE, TARGET_SPEEDUP = "after:14", 1.8
RESULTS = Path("bench-results/headless_prefill.json")

GEMMA3N = Gemma3nTextConfig(
    vocab_size=32_000,
    vocab_size_per_layer_input=32_000,
    hidden_size=512,
    intermediate_size=2048,
    num_hidden_layers=16,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=64,
    sliding_window=512,
    layer_types=[*["sliding_attention"] * 3, "full_attention"] * 4,
    num_kv_shared_layers=8,
    hidden_size_per_layer_input=64,
    laurel_rank=32,
    activation_sparsity_pattern=[0.95] * 5 + [0.0] * 11,
)


@dataclass(frozen=True, slots=True)
class Milliseconds:
    """Wall time, and CPU time of all threads."""

    wall: float
    cpu: float

    @classmethod
    def median(cls, measured: Sequence["Milliseconds"]) -> Self:
        """Of each by itself."""
        return cls(statistics.median(m.wall for m in measured), statistics.median(m.cpu for m in measured))


@dataclass(frozen=True, slots=True)
class Comparison:
    """One model under one rule: medians by way, and what inspect says of the shares of *every layer*.

    A predicted share is that of the linear layers' FLOPs, and with attention, of the mean token of the prompt.
    """

    model: str
    kv_sharing: str
    threads: int
    times: Mapping[str, Milliseconds]
    predicted_share: float
    predicted_share_with_attention: float

    def speedup(self, way: str) -> float:
        """How many times as fast as every layer on every token, by wall time."""
        return self.times[EVERY_LAYER].wall / self.times[way].wall

    def row(self) -> str:
        """A line of the table."""
        times = "".join(f"{self.times[way].wall:13,.0f}" for way in (EVERY_LAYER, COLOCATED, HEADLESS))
        whole, part = self.times[EVERY_LAYER], self.times[HEADLESS]
        shares = (part.wall / whole.wall, part.cpu / whole.cpu, self.predicted_share)
        return (
            f"{self.model:9} {self.kv_sharing:9} {self.threads:7} {times}{self.speedup(COLOCATED):10.2f}"
            f"{self.speedup(HEADLESS):10.2f}"
            + "".join(f"{share:10.1%}" for share in shares)
            + f"{self.predicted_share_with_attention:16.1%}"
        )


class LastRow:
    """Passes only the last row on to what follows the last layer."""

    def __init__(self, inner: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._inner = inner

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """``[rows, ...]`` to what the last of them gives."""
        return self._inner(rows[-1:])


class Prompt:
    """A prompt that one model computes again and again, in the same blocks."""

    def __init__(self, model: Path, kv_sharing: str, role: Role) -> None:
        config = EngineConfig(
            model=str(model),
            role=role,
            kv_sharing=kv_sharing,
            kv_cache_memory=512 << 20,
            max_model_len=PROMPT_TOKENS + 2,
            max_batched_tokens=STEP_TOKENS,
        )
        self.runner = ModelRunner(config)
        self._has_head = role is not Role.PREFILL
        self._tokens = np.random.default_rng(0).integers(4, self.runner.model.vocab_size, PROMPT_TOKENS)
        self._tables: list[IntArray] = []
        first = 0
        for group in self.runner.cache.groups:
            count = -(-PROMPT_TOKENS // group.block_size)
            self._tables.append(np.arange(first, first + count))
            first += count
        assert first <= self.runner.num_blocks
        if self._has_head:
            _cut_before_head(self.runner.model)

    @torch.inference_mode()
    def compute(self, *, every_layer: bool = False) -> Milliseconds:
        """Time it. With ``every_layer`` the layers that nothing depends on run for all rows, not for the last."""
        begin, begin_cpu = time.perf_counter(), time.process_time()
        for first in range(0, PROMPT_TOKENS, STEP_TOKENS):
            tokens = self._tokens[first : first + STEP_TOKENS]
            last = self._has_head and first + len(tokens) == PROMPT_TOKENS
            wanted = len(tokens) if every_layer else int(last)
            self.runner.execute([SequenceRows(tokens, first, wanted, tuple(self._tables))])
        return Milliseconds(1e3 * (time.perf_counter() - begin), 1e3 * (time.process_time() - begin_cpu))


def _cut_before_head(built: Model) -> None:
    """Even where every row passes the last layer, have the head answer only the last."""
    assert isinstance(built, Decoder | Gemma3n)
    built.norm = LastRow(built.norm)  # type: ignore[assignment]
    if isinstance(built, Gemma3n):
        assert built.merger is not None
        built.merger = LastRow(built.merger)  # type: ignore[assignment]


def compare(name: str, model: Path, kv_sharing: str) -> list[Comparison]:
    """Time the three ways with every number of threads."""
    whole, headless = Prompt(model, kv_sharing, Role.COLOCATED), Prompt(model, kv_sharing, Role.PREFILL)
    ways: Mapping[str, Callable[[], Milliseconds]] = {
        EVERY_LAYER: lambda: whole.compute(every_layer=True),
        COLOCATED: whole.compute,
        HEADLESS: headless.compute,
    }
    config = ClusterConfig.load(model=str(model), kv_sharing=kv_sharing)
    # The mean token of a prompt sees half of it.
    inspected = inspect_prefill(config, PROMPT_TOKENS // 2)
    part = inspected.prefill_flops_per_token + inspected.prefill_attention_flops
    comparisons = []
    for threads in THREADS:
        torch.set_num_threads(threads)
        times: dict[str, list[Milliseconds]] = {way: [] for way in ways}
        for _ in range(ROUNDS + 1):
            for way, run in ways.items():
                times[way].append(run())
        comparisons.append(
            Comparison(
                name,
                kv_sharing,
                threads,
                {way: Milliseconds.median(measured[1:]) for way, measured in times.items()},
                inspected.prefill_flops_share,
                part / (inspected.flops_per_token + inspected.attention_flops),
            )
        )
        print(comparisons[-1].row(), flush=True)
    return comparisons


def main() -> None:
    """Measure, print, write."""
    print(f"{PROMPT_TOKENS:,} tokens in steps of {STEP_TOKENS:,}, {os.cpu_count()} CPUs ({platform.machine()}), ms,")
    print(
        f"median of {ROUNDS}; shares of headless in every layer: wall time, CPU time, inspect, inspect with attention"
    )
    print(
        f"{'model':9} {'sharing':9} {'threads':7} {EVERY_LAYER:>13}{COLOCATED:>13}{HEADLESS:>13}"
        f"{'× coloc.':>10}{'× headl.':>10}{'wall':>10}{'CPU':>10}{'inspect':>10}{'with attention':>16}"
    )
    smollm2 = resolve_model("smollm2").weights
    comparisons = [c for rule in (TARGET_RULE, "every:2", "none") for c in compare("SmolLM2", smollm2, rule)]
    with tempfile.TemporaryDirectory() as directory:
        torch.manual_seed(0)
        Gemma3nForCausalLM(GEMMA3N).save_pretrained(directory)
        comparisons += compare("Gemma 3n", Path(directory), "model")
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps([asdict(comparison) for comparison in comparisons], indent=2) + "\n")
    for c in comparisons:
        if c.kv_sharing == TARGET_RULE:
            reached = "reached" if c.speedup(HEADLESS) >= TARGET_SPEEDUP else "missed"
            print(
                f"{c.kv_sharing}, threads {c.threads}: {c.speedup(HEADLESS):.2f} × (target {TARGET_SPEEDUP}: {reached})"
            )


if __name__ == "__main__":
    main()
