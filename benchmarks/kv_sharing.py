"""What sharing KV caches between layers gains: blocks, bytes, a prompt's prefill, a decode step at a long context.

    python -m benchmarks.kv_sharing [--model smollm2] [--threads N] [--dtype float32] [--rules none,every:2,after:14]

Every rule has a whole model and a prefill replica's headless one; rules take turns, once each in every round, and
figures are medians of the rounds in milliseconds. A prompt is computed in steps as large as an engine's, a decode step
is of the context's last token. Blocks are those of the same KV memory, bytes those of a token in a cache and of a
prompt's transfer, of which the decode replica computes the last token itself. Headless prefill and the transfer are
what a disaggregated cluster's first token waits for; whole clusters under load are compared by ``crosskv bench
transfer --sharing``. Prints a table and writes ``bench-results/kv_sharing.json``.
"""

import argparse
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

from benchmarks.engine import BLOCK, STEP_TOKENS, compute, decode_steps, prompt_steps
from cluster.bench.report import Environment
from cluster.model_store import resolve_model
from kv_transfer.plan import lacking, lower_bound
from worker.config import EngineConfig, Role
from worker.model_runner import ModelRunner

CONTEXT = 2000
BATCHES = (1, 8)
ROUNDS = 5
MEMORY = 1 << 30
RESULTS = Path("bench-results/kv_sharing.json")


@dataclass(frozen=True, slots=True)
class Gain:
    """One rule: sizes in bytes, times in milliseconds, decode steps by batch."""

    rule: str
    owners: int
    layers: int
    blocks: int
    token_bytes: int
    transfer_bytes: int
    prefill: float
    headless_prefill: float
    decode: dict[int, float]

    def row(self) -> str:
        """A line of the table."""
        steps = "".join(f"{self.decode[batch]:>13.1f}" for batch in BATCHES)
        return (
            f"{self.rule:9}{f'{self.owners} of {self.layers}':>10}{self.blocks:>9,}{self.token_bytes:>13,}"
            f"{self.transfer_bytes:>14,}{self.prefill:>12,.0f}{self.headless_prefill:>12,.0f}{steps}"
        )


HEADING = (
    f"{'sharing':9}{'owners':>10}{'blocks':>9}{'bytes/token':>13}{'sent, bytes':>14}{'prefill':>12}{'headless':>12}"
    + "".join(f"{f'decode, {batch}':>13}" for batch in BATCHES)
)


class Rule:
    """A rule's two models, and what can be timed with them."""

    def __init__(self, model: Path, rule: str, dtype: str) -> None:
        self.rule = rule
        self.whole = ModelRunner(self._config(model, dtype, Role.COLOCATED))
        self.headless = ModelRunner(self._config(model, dtype, Role.PREFILL))
        prompt = prompt_steps(CONTEXT)
        without_head = prompt_steps(CONTEXT, has_head=False)
        self.ways: dict[str | int, Callable[[], None]] = {
            "prefill": partial(compute, self.whole, prompt),
            "headless": partial(compute, self.headless, without_head),
        }
        for batch in BATCHES:
            self.ways[batch] = partial(compute, self.whole, decode_steps(batch, CONTEXT))

    def _config(self, model: Path, dtype: str, role: Role) -> EngineConfig:
        return EngineConfig(
            model=str(model),
            role=role,
            dtype=dtype,
            kv_sharing=self.rule,
            block_size=BLOCK,
            kv_cache_memory=MEMORY,
            max_model_len=CONTEXT + 1,
            max_batched_tokens=STEP_TOKENS,
        )

    def gain(self, times: dict[str | int, list[float]]) -> Gain:
        """What came of it."""
        layout = self.whole.layout
        median = {way: statistics.median(found) for way, found in times.items()}
        return Gain(
            rule=self.rule,
            owners=self.whole.owner_layers,
            layers=self.whole.attention_layers,
            blocks=self.whole.num_blocks,
            token_bytes=sum(buffer.page_bytes for buffer in self.whole.buffers) // BLOCK,
            transfer_bytes=lower_bound(layout, lacking(layout, CONTEXT, [0] * len(layout.sections))),
            prefill=median["prefill"],
            headless_prefill=median["headless"],
            decode={batch: median[batch] for batch in BATCHES},
        )


def main() -> None:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rules", default="none,every:2,after:14")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    model = resolve_model(arguments.model).weights
    rules = [Rule(model, rule, arguments.dtype) for rule in arguments.rules.split(",")]
    times: dict[str, dict[str | int, list[float]]] = {rule.rule: {way: [] for way in rule.ways} for rule in rules}
    with torch.inference_mode():
        for number in range(arguments.rounds + 1):
            for rule in rules:
                for way, run in rule.ways.items():
                    begin = time.perf_counter()
                    run()
                    if number > 0:
                        times[rule.rule][way].append(1e3 * (time.perf_counter() - begin))
    gains = [rule.gain(times[rule.rule]) for rule in rules]
    print(
        f"{arguments.model}, {arguments.dtype}, {arguments.threads} threads, {CONTEXT:,} tokens; milliseconds, median "
        f"of {arguments.rounds}; blocks of {BLOCK} tokens in {MEMORY >> 20} MiB"
    )
    print(HEADING)
    for gain in gains:
        print(gain.row())
    RESULTS.parent.mkdir(exist_ok=True)
    command = shlex.join(["python", "-m", "benchmarks.kv_sharing", *sys.argv[1:]])
    environment = Environment.here(command, arguments.model)
    written = {"environment": asdict(environment), "rules": [asdict(gain) for gain in gains]}
    RESULTS.write_text(json.dumps(written, indent=2) + "\n")


if __name__ == "__main__":
    main()
