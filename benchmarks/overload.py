"""More requests than a cluster can serve: what the accepted ones notice, and what the others are told.

    make bench-overload

A local cluster is first driven *at capacity*: as many clients as its decode replica has seats, each with one request
after another. Then requests arrive at random at five times the rate that was served so, however many are refused.
Checked: the 99th percentile of accepted requests' time between tokens is at most 1.5 times that at capacity; every
other request gets 429 with the 99th percentile of its answer within 100 ms; no process grows by 5% between the end of
the first third and the end. Prints a table, writes ``bench-results/overload.json``, and ends with 1 if a check fails.
"""

import argparse
import asyncio
import json
import random
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx
from rich.console import Console
from rich.table import Table

from benchmarks.footprint import footprints, growth
from cluster.bench.load import (
    ClosedLoop,
    Distribution,
    LoadRequest,
    PoissonArrivals,
    RequestRecord,
    Target,
    run_load,
)
from cluster.config import ClusterConfig
from cluster.ports import free_port
from cluster.running_cluster import running_cluster

SEATS, QUEUE = 8, 8
PROMPT_TOKENS, OUTPUT_TOKENS = 64, 48
FIRST_TOKEN, LAST_TOKEN = 1000, 40_000
"""Ordinary tokens of SmolLM2's vocabulary."""
ITL_RATIO, REFUSAL_MS, GROWTH = 1.5, 100.0, 0.05
RESULTS = Path("bench-results/overload.json")


@dataclass(frozen=True, slots=True)
class Measured:
    """One load. Times are milliseconds."""

    seconds: float
    sent: int
    accepted: int
    refused: int
    otherwise: tuple[str, ...]
    inter_token: Distribution
    first_token: Distribution
    refusal: Distribution

    @classmethod
    def of(cls, records: list[RequestRecord], seconds: float) -> "Measured":
        """Sort a load's records."""
        good = [record for record in records if record.error is None]
        refused = [record for record in records if (record.error or "").startswith("HTTP 429")]
        rest = {record.error for record in records if record.error is not None} - {record.error for record in refused}
        return cls(
            seconds=seconds,
            sent=len(records),
            accepted=len(good),
            refused=len(refused),
            otherwise=tuple(sorted(map(str, rest))),
            inter_token=Distribution.of(1e3 * gap for record in good for gap in record.gaps),
            first_token=Distribution.of(1e3 * (record.time_to_first_token or 0.0) for record in good),
            refusal=Distribution.of(1e3 * record.latency for record in refused),
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--seconds", type=float, default=60.0, help="of overload; a third of it at capacity")
    parser.add_argument("--times", type=float, default=5.0, help="the capacity")
    parser.add_argument("--mode", default="disaggregated", choices=["disaggregated", "colocated"])
    arguments = parser.parse_args()
    console = Console(width=120)
    config = ClusterConfig(
        model=arguments.model,
        served_model_name="model",
        mode=arguments.mode,
        port=free_port("127.0.0.1"),
        max_running_requests=SEATS,
        max_waiting_requests=QUEUE,
        kv_cache_memory="256MiB",
        prefix_caching=False,
    )
    with running_cluster(config, console.print) as cluster:
        target = Target(cluster.base_url, "model", parameters={"ignore_eos": True})
        console.print("warming up")
        asyncio.run(run_load(target, requests(3 * SEATS, seed=1), ClosedLoop(SEATS)))
        console.print("at capacity")
        at_capacity = asyncio.run(_for_seconds(target, arguments.seconds / 3))
        rate = at_capacity.accepted / at_capacity.seconds
        console.print(f"{rate:.2f} requests a second; now {arguments.times:g} times as many")
        third, whole = (arguments.times * rate * arguments.seconds * part for part in (1 / 3, 2 / 3))
        first = _overload(target, int(third), arguments.times * rate, seed=2)
        before = footprints()
        rest = _overload(target, int(whole), arguments.times * rate, seed=3)
        grown = growth(before, footprints())
        retry_after = _retry_after(cluster.base_url)
    _print(console, {"at capacity": at_capacity, "overload, first third": first, "overload, then": rest})
    for name, (memory, descriptors) in grown.items():
        console.print(f"{name}: {memory:+.2%} of memory, {descriptors:+d} descriptors")
    console.print(f"Retry-After of a refusal: {retry_after}")
    problems = _problems(at_capacity, rest, grown)
    RESULTS.parent.mkdir(exist_ok=True)
    report = {"capacity": asdict(at_capacity), "first": asdict(first), "overload": asdict(rest), "growth": grown}
    RESULTS.write_text(json.dumps(report, indent=2) + "\n")
    for problem in problems:
        console.print(f"[red]{problem}[/red]")
    sys.exit(bool(problems))


def requests(count: int, seed: int) -> list[LoadRequest]:
    """Prompts that have nothing in common."""
    numbers = random.Random(seed)
    return [
        LoadRequest(tuple(numbers.randrange(FIRST_TOKEN, LAST_TOKEN) for _ in range(PROMPT_TOKENS)), OUTPUT_TOKENS)
        for _ in range(count)
    ]


async def _for_seconds(target: Target, seconds: float) -> Measured:
    """As many clients as seats until the time is over; what ran then still counts."""
    records: list[RequestRecord] = []
    began = time.perf_counter()
    seed = 100
    while time.perf_counter() - began < seconds:
        records += (await run_load(target, requests(4 * SEATS, seed), ClosedLoop(SEATS)))[0]
        seed += 1
    return Measured.of(records, time.perf_counter() - began)


def _overload(target: Target, count: int, rate: float, seed: int) -> Measured:
    return Measured.of(*asyncio.run(run_load(target, requests(count, seed), PoissonArrivals(rate, seed))))


def _retry_after(base_url: str) -> str:
    """Fill the queue once more and read the header."""

    async def ask() -> str:
        body = {"prompt": "a", "max_tokens": OUTPUT_TOKENS, "ignore_eos": True}
        async with httpx.AsyncClient(base_url=base_url, timeout=120) as client:
            answers = await asyncio.gather(*(client.post("/v1/completions", json=body) for _ in range(4 * SEATS)))
        return next((answer.headers["retry-after"] for answer in answers if answer.status_code == 429), "none")

    return asyncio.run(ask())


def _problems(at_capacity: Measured, overload: Measured, grown: dict[str, tuple[float, int]]) -> list[str]:
    problems = [f"neither served nor refused: {message}" for message in overload.otherwise]
    allowed = ITL_RATIO * (at_capacity.inter_token.p99 or 0.0)
    if (overload.inter_token.p99 or 0.0) > allowed:
        problems.append(f"time between tokens: {overload.inter_token.p99:.1f} ms at p99, {allowed:.1f} ms are allowed")
    if not overload.refused or (overload.refusal.p99 or 0.0) > REFUSAL_MS:
        problems.append(f"{overload.refused} refusals took {overload.refusal.p99} ms at p99, not {REFUSAL_MS} ms")
    problems += [f"{name} grew by {memory:.1%}" for name, (memory, _) in grown.items() if memory > GROWTH]
    return problems


def _print(console: Console, loads: dict[str, Measured]) -> None:
    table = Table()
    for column in ("", "seconds", "sent", "accepted", "429", "ITL p50", "ITL p99", "TTFT p50", "429 p50", "429 p99"):
        table.add_column(column, justify="right" if column else "left")
    for name, load in loads.items():
        times = (load.inter_token.p50, load.inter_token.p99, load.first_token.p50, load.refusal.p50, load.refusal.p99)
        table.add_row(
            name,
            f"{load.seconds:.0f}",
            *(str(count) for count in (load.sent, load.accepted, load.refused)),
            *("" if value is None else f"{value:.1f}" for value in times),
        )
    console.print(table)


if __name__ == "__main__":
    main()
