"""Thousands of short requests: whether anything stays behind of them.

    make bench-soak

A local cluster of one prefill and one decode replica serves short requests from 16 clients. Every tenth client leaves
before its answer ends. Memory and descriptors of its processes are looked at after the first fifth, which warms up
allocators, and at the end. Checked: no process has grown by 2% since, no descriptor has stayed open, every block is
free or cached, every other request was answered. Prints what it found, writes ``bench-results/soak.json``, and ends
with 1 if a check fails.
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from pathlib import Path

import httpx
from rich.console import Console

from benchmarks.footprint import Footprint, footprints, growth
from cluster.config import ClusterConfig
from cluster.ports import free_port
from cluster.running_cluster import running_cluster
from tests.tiny_checkpoints import write_tiny

CLIENTS = 16
GROWTH = 0.02
LEAVING = 0.1
WARM_UP = 0.2
SETTLE_SECONDS = 10.0
RESULTS = Path("bench-results/soak.json")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--model", help="Default: a tiny model with random weights.")
    arguments = parser.parse_args()
    console = Console()
    with tempfile.TemporaryDirectory() as scratch:
        config = ClusterConfig(
            model=arguments.model or str(write_tiny("llama", Path(scratch))),
            served_model_name="model",
            port=free_port("127.0.0.1"),
            kv_cache_memory="4MiB",
            dtype="float32",
        )
        with running_cluster(config, console.print) as cluster:
            warm_up = int(arguments.requests * WARM_UP)
            asyncio.run(soak(cluster.base_url, range(warm_up)))
            before = settled(cluster.base_url)
            began = time.perf_counter()
            asyncio.run(soak(cluster.base_url, range(warm_up, arguments.requests)))
            seconds = time.perf_counter() - began
            grown = growth(before, settled(cluster.base_url))
    console.print(f"{arguments.requests - warm_up} requests in {seconds:.0f} s after {warm_up} to warm up")
    problems = []
    for name, (memory, descriptors) in grown.items():
        console.print(f"{name}: {memory:+.2%} of memory, {descriptors:+d} descriptors")
        if memory > GROWTH:
            problems.append(f"{name} grew by {memory:.1%}")
        if descriptors > 0:
            problems.append(f"{name} has {descriptors} descriptors more")
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps({"requests": arguments.requests, "seconds": seconds, "growth": grown}) + "\n")
    for problem in problems:
        console.print(f"[red]{problem}[/red]")
    sys.exit(bool(problems))


async def soak(base_url: str, numbers: range) -> None:
    """Send the requests with these numbers; raises for one that is not answered."""
    remaining = iter(numbers)

    async def client() -> None:
        async with httpx.AsyncClient(base_url=base_url, timeout=60) as http:
            for number in remaining:
                await _one(http, random.Random(number))

    async with asyncio.TaskGroup() as clients:
        for _ in range(CLIENTS):
            clients.create_task(client())


async def _one(http: httpx.AsyncClient, numbers: random.Random) -> None:
    leaves = numbers.random() < LEAVING
    body = {
        "prompt": [numbers.randrange(4, 512) for _ in range(numbers.randint(1, 40))],
        "max_tokens": 400 if leaves else numbers.randint(1, 8),
        "ignore_eos": True,
        "stream": leaves,
    }
    async with http.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        if leaves:
            await anext(response.aiter_lines())
        else:
            await response.aread()


def settled(base_url: str) -> dict[int, Footprint]:
    """Processes' footprints once nothing runs and idle connections are closed; every block must be free or cached."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while any(status["held_blocks"] for status in httpx.get(f"{base_url}/cluster").json()):
        if time.monotonic() > deadline:
            raise RuntimeError("blocks are still held")
        time.sleep(0.1)
    time.sleep(SETTLE_SECONDS)
    return footprints()


if __name__ == "__main__":
    main()
