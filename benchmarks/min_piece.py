"""What ``--min-piece-size`` should be: time to the first token by the size from which on a layer's KV leaves by itself.

    python -m benchmarks.min_piece [--model smollm2]

One prefill and one decode replica on this machine, one thread each, one client, no prefix cache. Every size is deployed
once in every round, and a prompt of every length asked several times; figures are medians over all rounds, in
milliseconds. A size of one byte sends every layer of every chunk by itself, the largest sends everything at the end.
Prints a table and writes ``bench-results/min_piece.json``.
"""

import argparse
import asyncio
import json
import random
import statistics
from collections import defaultdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from cluster.bench.load import ClosedLoop, LoadRequest, Target, run_load, summarize
from cluster.config import ClusterConfig
from cluster.running_cluster import running_cluster

SIZES = (1, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 1 << 40)
PROMPT_TOKENS = (8, 32, 128, 512)
REPEATS = 12
ROUNDS = 3
RESULTS = Path("bench-results/min_piece.json")


def time_to_first_token(base_url: str, tokens: int, seed: int) -> float:
    """Median over prompts that differ from their first token on."""
    generator = random.Random(seed)
    requests = [
        LoadRequest(tuple(generator.randrange(100, 40_000) for _ in range(tokens)), 1) for _ in range(REPEATS + 1)
    ]
    records, duration = asyncio.run(run_load(Target(base_url, "m"), requests, ClosedLoop(1)))
    summary = summarize(records[1:], duration)
    if summary.errors or summary.ttft_ms.p50 is None:
        raise SystemExit(f"requests failed: {summary.error_messages}")
    return summary.ttft_ms.p50


def main() -> None:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    arguments = parser.parse_args()
    base = ClusterConfig(
        model=arguments.model, served_model_name="m", port=18_401, threads=1, prefix_caching=False, max_model_len=1024
    )
    configs = [base.replace(min_piece_size=size) for size in SIZES] * ROUNDS
    console = Console()
    times: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
    with running_cluster(configs[0], console.print) as cluster:
        for index, config in enumerate(configs):
            if index > 0:
                cluster.redeploy(config)
            for tokens in PROMPT_TOKENS:
                found = time_to_first_token(cluster.base_url, tokens, index)
                times[int(config.min_piece_size), tokens].append(found)
    table = Table("piece of at least", *(f"{tokens} tokens" for tokens in PROMPT_TOKENS))
    for size in SIZES:
        cells = (f"{statistics.median(times[size, tokens]):.1f}" for tokens in PROMPT_TOKENS)
        table.add_row("everything at the end" if size == SIZES[-1] else f"{size:,} bytes", *cells)
    console.print(table)
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps({f"{size} {tokens}": found for (size, tokens), found in times.items()}, indent=2))


if __name__ == "__main__":
    main()
