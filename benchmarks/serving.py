"""The same load for any OpenAI-compatible server, or for this one and others on the same machine by turns.

    python -m benchmarks.serving --url http://127.0.0.1:8000 [--rounds 3] [--injection RATE]
    python -m benchmarks.serving --model DIR [--compare VENV] [--nixl DIR] [--rounds 3] [--dtype bfloat16]
                                 [--systems NAME,...]

With ``--url`` the load goes to a server that runs, under the first name that it lists as a model; a key is taken from
``OPENAI_API_KEY``. With ``--model`` systems are started one after another, as often as there are rounds, so that only
one is alive at a time and a slow hour is everybody's. ``DIR`` is a checkpoint with safetensors that all can read.
``VENV`` is a virtual environment with vLLM's build for CPUs, which this project does not install; without it only this
server is measured. *colocated* has every core; *disaggregated* is a prefill and a decode replica with one core each;
*one core* is a whole engine on the last core. The load generator runs beside them, as a client on the same machine
does, but at a real-time priority where it may have one: else it waits for busy cores, up to seconds under W3, and
what it times is itself. With ``--nixl`` vLLM's prefill and decode servers with NIXL between them are there as well, as
shipped and with every thread on its server's own core: see ``benchmarks/nixl_pair.py``, also for what ``DIR`` is.

W1 is one client, 128 tokens in and 128 out. W2 eight clients, 256 in, 128 out, 32 requests. W4 one client, 2,000 in,
one out, three times. W3b four clients, each with two requests of 64 in and 256 out; W3 the same while prompts of 1,500
tokens with one output token arrive at even intervals, at 0.8 of what the first system of the first round, whose prefill
has one core, completes one after another; every system gets the same rate, or that of ``--injection`` per second. A
peer that has only one core for prompts and slower ones for them would never come to the end of it, and gets no W3.
Figures are medians of the rounds; memory is the sum of the proportional set sizes of a system's processes after W2.
Prints a table and writes ``bench-results/serving.json``.
"""

import argparse
import asyncio
import json
import os
import random
import shlex
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import httpx
import psutil

from cluster.bench.load import (
    ClosedLoop,
    LoadRequest,
    LoadSummary,
    RequestRecord,
    Target,
    run_load,
    summarize,
)
from cluster.bench.report import Environment

RESULTS = Path("bench-results/serving.json")
STREAMS = 8
INJECTED_TOKENS = 1500
INJECTED_PART = 0.8
PORT = 18_400
START_SECONDS = 420.0
KV_BYTES = 2 << 30
LOAD_PARAMETERS = {"ignore_eos": True, "return_token_ids": True}
"""With its ids every token is a chunk, also one that ends no character: else its time would be the next one's."""
VLLM_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_KVCACHE_SPACE": str(KV_BYTES >> 30),
}


@dataclass(frozen=True, slots=True)
class System:
    """A server to start: its command line, what it adds to the environment, and whether it can take W3's prompts."""

    name: str
    command: tuple[str, ...]
    environment: dict[str, str]
    injects: bool = True


@dataclass(frozen=True, slots=True)
class Started:
    """A system that answers: its process, and the seconds until its first answer."""

    process: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Figures:
    """One round of one system. Times in milliseconds, memory in bytes. None: not started here, or no W3."""

    start_s: float | None
    w1_tokens_per_s: float
    w1_ttft: float
    w2_tokens_per_s: float
    w4_ttft: float
    memory: int | None
    w3b_itl_p99: float
    w3_itl_p99: float | None
    injected: int | None
    injected_ttft: float | None


def systems(model: str, vllm: Path | None, nixl: Path | None, dtype: str) -> list[System]:
    """All that can be started here."""
    cores = sorted(os.sched_getaffinity(0))
    own = (
        *(sys.executable, "-m", "cluster.cli", "serve", model, "--served-model-name", "m", "--dtype", dtype),
        *("--port", str(PORT), "--no-prefix-caching", "--kv-cache-memory", str(KV_BYTES), "--max-model-len", "4096"),
    )
    found = [
        System("crosskv disaggregated", (*own, "--mode", "disaggregated", "--threads", "1"), {}),
        System("crosskv colocated", (*own, "--mode", "colocated", "--threads", str(len(cores))), {}),
    ]
    if vllm is not None:
        command = (
            *(str(vllm / "bin" / "vllm"), "serve", model, "--served-model-name", "m", "--dtype", dtype),
            *("--no-enable-prefix-caching", "--max-model-len", "4096"),
        )
        alone = (*command, "--port", str(PORT))
        every = f"{cores[0]}-{cores[-1]}"
        found += [
            System("vLLM colocated", alone, VLLM_ENVIRONMENT | {"VLLM_CPU_OMP_THREADS_BIND": every}),
            System(
                "vLLM one core", alone, VLLM_ENVIRONMENT | {"VLLM_CPU_OMP_THREADS_BIND": str(cores[-1])}, injects=False
            ),
        ]
        if nixl is not None:
            pair = (sys.executable, "-m", "benchmarks.nixl_pair", "--port", str(PORT), "--nixl", str(nixl))
            found += [
                System("vLLM pair over NIXL", (*pair, "--", *command), VLLM_ENVIRONMENT, injects=False),
                System("vLLM pair re-pinned", (*pair, "--pin", "--", *command), VLLM_ENVIRONMENT, injects=False),
            ]
    return found


@contextmanager
def running(system: System, log: Path) -> Iterator[Started]:
    """Start a system and wait for its first answer. Ends all its processes."""
    log.parent.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    with log.open("w") as output:
        process = subprocess.Popen(
            system.command,
            env=os.environ | system.environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        body = {"model": "m", "prompt": [1, 2, 3], "max_tokens": 1}
        while True:
            if process.poll() is not None:
                raise SystemExit(f"{system.name} ended with {process.returncode}: see {log}")
            if time.perf_counter() - began > START_SECONDS:
                raise SystemExit(f"{system.name} gave no answer within {START_SECONDS:.0f} s: see {log}")
            try:
                if httpx.post(f"http://127.0.0.1:{PORT}/v1/completions", json=body, timeout=60).is_success:
                    break
            except httpx.TransportError:
                time.sleep(0.2)
        yield Started(process.pid, time.perf_counter() - began)
    finally:
        if process.poll() is None:
            processes = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
            process.send_signal(signal.SIGINT)
            _, left = psutil.wait_procs(processes, timeout=60)
            for survivor in left:
                survivor.kill()


def prompts(count: int, tokens: int, output_tokens: int, seed: int) -> list[LoadRequest]:
    """Random prompts of one length, different from their first token on."""
    generator = random.Random(seed)
    return [
        LoadRequest(tuple(generator.randrange(100, 40_000) for _ in range(tokens)), output_tokens) for _ in range(count)
    ]


def load(target: Target, requests: Sequence[LoadRequest], clients: int) -> LoadSummary:
    """A closed loop; every request must succeed."""
    return succeeded(summarize(*asyncio.run(run_load(target, requests, ClosedLoop(clients)))))


def succeeded(summary: LoadSummary) -> LoadSummary:
    """Return what it gets, unless a request failed."""
    if summary.errors:
        raise SystemExit(f"{summary.errors} requests failed: {summary.error_messages}")
    return summary


async def load_with_injection(target: Target, per_second: float, seed: int) -> tuple[LoadSummary, LoadSummary]:
    """W3: four streams, and the prompts that arrive at even intervals until the last stream has ended.

    Every prompt that arrived is waited for, and must succeed.
    """
    injected: list[asyncio.Task[tuple[list[RequestRecord], float]]] = []
    streams = asyncio.create_task(run_load(target, prompts(STREAMS, 64, 256, seed), ClosedLoop(4)))
    while not streams.done():
        prompt = prompts(1, INJECTED_TOKENS, 1, seed + 1 + len(injected))
        injected.append(asyncio.create_task(run_load(target, prompt, ClosedLoop(1))))
        await asyncio.wait([streams], timeout=1 / per_second)
    answers = [record for records, _ in await asyncio.gather(*injected) for record in records]
    records, duration = await streams
    return succeeded(summarize(records, duration)), succeeded(summarize(answers, duration))


def prefill_capacity(target: Target) -> float:
    """Injected prompts that a system completes per second, one after another."""
    summary = load(target, prompts(3, INJECTED_TOKENS, 1, 90), 1)
    return 1e3 / (summary.ttft_ms.p50 or 0.0)


def memory_of(process: int) -> int:
    """Of a process and its descendants; what several of them share counts once."""
    tree = [psutil.Process(process), *psutil.Process(process).children(recursive=True)]
    return sum(one.memory_full_info().pss for one in tree)


def measure(target: Target, *, round_number: int, injection: float | None, started: Started | None = None) -> Figures:
    """One round; without W3 if ``injection`` is None."""
    load(target, prompts(2, 64, 16, 0), 2)
    one = load(target, prompts(1, 128, 128, 10 + round_number), 1)
    eight = load(target, prompts(32, 256, 128, 20 + round_number), 8)
    memory = None if started is None else memory_of(started.process)
    long = load(target, prompts(3, 2000, 1, 30 + round_number), 1)
    quiet = load(target, prompts(STREAMS, 64, 256, 40 + round_number), 4)
    disturbed, injected = None, None
    if injection is not None:
        disturbed, injected = asyncio.run(load_with_injection(target, injection, 1000 * (1 + round_number)))
    return Figures(
        start_s=None if started is None else started.seconds,
        w1_tokens_per_s=one.output_tokens / one.duration_s,
        w1_ttft=one.ttft_ms.p50 or 0.0,
        w2_tokens_per_s=eight.output_tokens_per_s,
        w4_ttft=long.ttft_ms.p50 or 0.0,
        memory=memory,
        w3b_itl_p99=quiet.itl_ms.p99 or 0.0,
        w3_itl_p99=None if disturbed is None else disturbed.itl_ms.p99,
        injected=None if injected is None else injected.requests,
        injected_ttft=None if injected is None else injected.ttft_ms.p50,
    )


def measure_running(url: str, rounds: int, injection: float | None) -> dict[str, list[Figures]]:
    """Rounds of a server that somebody else started."""
    key = os.environ.get("OPENAI_API_KEY")
    try:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        listed = httpx.get(f"{url}/v1/models", headers=headers, timeout=60).raise_for_status().json()
    except httpx.HTTPError as error:
        raise SystemExit(f"--url {url}: {error}") from None
    target = Target(url, listed["data"][0]["id"], api_key=key, parameters=LOAD_PARAMETERS)
    injection = injection or measured_injection(target)
    name = f"{target.model} at {url}"
    return {name: [reported(name, measure(target, round_number=n, injection=injection)) for n in range(rounds)]}


def measure_started(chosen: Sequence[System], rounds: int, injection: float | None) -> dict[str, list[Figures]]:
    """Rounds of systems that are started for it."""
    target = Target(f"http://127.0.0.1:{PORT}", "m", parameters=LOAD_PARAMETERS)
    measured: dict[str, list[Figures]] = {system.name: [] for system in chosen}
    for number in range(rounds):
        for system in chosen:
            log = RESULTS.parent / "logs" / f"{system.name.replace(' ', '-')}-{number}.log"
            with running(system, log) as started:
                injection = injection or measured_injection(target)
                own = injection if system.injects else None
                figures = measure(target, round_number=number, injection=own, started=started)
            measured[system.name].append(reported(system.name, figures))
    return measured


def measured_injection(target: Target) -> float:
    """Prompts per second for W3."""
    injection = INJECTED_PART * prefill_capacity(target)
    print(f"injection: {injection:.3f} prompts per second", flush=True)
    return injection


def reported(name: str, figures: Figures) -> Figures:
    """Print a round, since the next takes minutes."""
    print(name, figures, flush=True)
    return figures


def table(measured: Mapping[str, Sequence[Figures]]) -> str:
    """Medians, a line for each system."""
    names = [field.name for field in fields(Figures)]
    lines = [f"{'':28}" + "".join(f"{name:>17}" for name in names)]
    for system, rounds in measured.items():
        columns = ([asdict(figures)[name] for figures in rounds] for name in names)
        cells = ("–" if None in column else f"{statistics.median(column):,.1f}" for column in columns)
        lines.append(f"{system:28}" + "".join(f"{cell:>17}" for cell in cells))
    return "\n".join(lines)


@contextmanager
def on_time() -> Iterator[None]:
    """Run this process, but no child of it, before all others meanwhile, or say that it may be late."""
    # Who may not have a priority may not undo that children are without it.
    policy, priority = os.sched_getscheduler(0) | os.SCHED_RESET_ON_FORK, os.sched_getparam(0)
    try:
        os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(1))
    except PermissionError as error:
        print(f"the load generator may be late, because it gets no real-time priority: {error}", file=sys.stderr)
    try:
        yield
    finally:
        os.sched_setscheduler(0, policy, priority)


def main() -> None:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("--url", help="a server that runs, without /v1")
    target.add_argument("--model", help="a checkpoint to start servers with")
    parser.add_argument("--compare", type=Path, metavar="VENV", help="where vLLM's build for CPUs is")
    parser.add_argument("--nixl", type=Path, metavar="DIR", help="where NIXL is, for vLLM's pair; only with --compare")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--injection", type=float, help="prompts per second for W3; measured if not given")
    parser.add_argument("--systems", help="names, with commas between; all by default")
    arguments = parser.parse_args()
    if arguments.url is not None:
        with on_time():
            measured = measure_running(arguments.url.rstrip("/"), arguments.rounds, arguments.injection)
    else:
        known = {one.name: one for one in systems(arguments.model, arguments.compare, arguments.nixl, arguments.dtype)}
        names = arguments.systems.split(",") if arguments.systems else list(known)
        if unknown := [name for name in names if name not in known]:
            parser.error(f"--systems {unknown[0]}: there are {', '.join(known)}")
        with on_time():
            measured = measure_started([known[name] for name in names], arguments.rounds, arguments.injection)
    print(table(measured))
    command = shlex.join(["python", "-m", "benchmarks.serving", *sys.argv[1:]])
    environment = Environment.here(command, arguments.model or next(iter(measured)))
    rounds = {name: [asdict(figures) for figures in found] for name, found in measured.items()}
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps({"environment": asdict(environment), "systems": rounds}, indent=2) + "\n")


if __name__ == "__main__":
    main()
