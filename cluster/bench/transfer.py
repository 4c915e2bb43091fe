"""The load test that compares what different deployments of one model send.

``run_transfer_bench`` deploys each combination of sharing rule, transport and ranks in turn, sends all of them the same
prompts, and returns one ``TransferRun`` per deployment and prompt length. Prompts are random tokens that differ from
the first one on, and the prefix cache is off, so that every prompt is computed and sent whole.
"""

import asyncio
import itertools
import platform
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

from cluster.bench.load import (
    ClosedLoop,
    Distribution,
    LoadRequest,
    RequestRecord,
    Target,
    run_load,
    summarize,
)
from cluster.bench.prompts import random_prompts
from cluster.client import ApiClient
from cluster.config import ClusterConfig, ConfigError, Mode
from cluster.errors import CrosskvError
from kv_transfer.transport import Transport
from worker.config import Role

Progress = Callable[[str], None]

# Only Linux counts bytes per connection; elsewhere replicas report 0, and there is nothing to check.
_KERNEL_COUNTS = platform.system() == "Linux"
_STABLE_SECONDS = 0.4
_POLL_SECONDS = 0.1
_POLL_LIMIT_SECONDS = 15.0


class Cluster(Protocol):
    """A running cluster that can be given another configuration."""

    @property
    def base_url(self) -> str:
        """Where its API answers."""
        ...

    def redeploy(self, config: ClusterConfig) -> None:
        """Replace every replica and wait until the new ones are ready."""
        ...


class StartCluster(Protocol):
    """Starts a cluster with ``config`` that has room for each of ``later`` in its place, and stops it again."""

    def __call__(
        self, config: ClusterConfig, progress: Progress, later: Sequence[ClusterConfig]
    ) -> AbstractContextManager[Cluster]:
        """Return when it can answer."""
        ...


@dataclass(frozen=True, slots=True)
class Ranks:
    """Over how many ranks each prefill and each decode replica is split."""

    prefill: int
    decode: int

    @classmethod
    def of(cls, config: ClusterConfig) -> "Ranks":
        """Those of a configuration."""
        return cls(config.ranks_of(Role.PREFILL), config.ranks_of(Role.DECODE))

    def __str__(self) -> str:
        return f"{self.prefill}:{self.decode}"


@dataclass(frozen=True, slots=True)
class Deployment:
    """One combination, and the configuration that it means."""

    sharing: str
    transport: Transport
    ranks: Ranks
    config: ClusterConfig

    def __str__(self) -> str:
        return f"{self.sharing}, {self.transport}, {self.ranks}"


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """What to compare: every combination of ``sharing``, ``transports`` and ``ranks``.

    Each gets ``requests`` prompts of each length, ``concurrency`` at a time, and before them one more to warm up.
    """

    sharing: tuple[str, ...]
    transports: tuple[Transport, ...]
    ranks: tuple[Ranks, ...]
    prompt_tokens: tuple[int, ...]
    requests: int
    concurrency: int
    output_tokens: int
    seed: int = 0

    def __post_init__(self) -> None:
        for flag, values in (
            ("--sharing", self.sharing),
            ("--transports", self.transports),
            ("--ranks", self.ranks),
            ("--prompt-tokens", self.prompt_tokens),
        ):
            if not values:
                raise CrosskvError(f"{flag} needs at least one value")
            if len(set(values)) < len(values):
                raise CrosskvError(f"{flag} {','.join(map(str, values))}: holds a value twice; name each once")
        if min(self.prompt_tokens) < 2:
            raise CrosskvError(
                f"--prompt-tokens {min(self.prompt_tokens)}: a prompt of fewer than 2 tokens sends no KV; use 2 or more"
            )
        for flag, value in (
            ("--requests", self.requests),
            ("--concurrency", self.concurrency),
            ("--output-tokens", self.output_tokens),
        ):
            if value < 1:
                raise CrosskvError(f"{flag} {value}: must be at least 1")

    def extent(self) -> str:
        """How many deployments and requests there will be, in words."""
        deployments = len(self.sharing) * len(self.transports) * len(self.ranks)
        each = len(self.prompt_tokens) * (1 + self.requests)
        tokens = sum(self.prompt_tokens) * (1 + self.requests)
        return (
            f"{deployments:,} deployments, each for {each:,} requests ({len(self.prompt_tokens)} of them to warm up) "
            f"of {tokens:,} prompt tokens in all"
        )

    def deployments(self, config: ClusterConfig) -> tuple[Deployment, ...]:
        """Every combination, by sharing rule first. Of ``config`` they replace what decides which bytes are sent.

        Raises ``CrosskvError``, which names the item, for a combination that no cluster can have.
        """
        # A prompt that waits long for a slow machine is still to be sent, not to be computed on the other side.
        patience = max(config.transfer_timeout, config.request_timeout)
        config = config.replace(
            mode=Mode.DISAGGREGATED,
            prefix_caching=False,
            local_prefill_threshold=0,
            transfer_timeout=patience,
            queue_timeout=patience,
        )
        deployments = []
        for sharing, transport, ranks in itertools.product(self.sharing, self.transports, self.ranks):
            shared = _changed(config, f"--sharing {sharing}", kv_sharing=sharing)
            split = _changed(
                shared,
                f"--ranks {ranks}",
                prefill_tensor_parallel_size=ranks.prefill,
                tensor_parallel_size=ranks.decode,
            )
            deployments.append(Deployment(sharing, transport, ranks, split.replace(transport=transport).unguarded()))
        return tuple(deployments)


@dataclass(frozen=True, slots=True)
class TransferRun:
    """One deployment under one prompt length.

    Bytes are sums over all requests and over all ranks that received them, ``wire_bytes`` what the kernel counted.
    ``bytes_saved`` compares with the same requests in a model without sharing. ``transfer_ms`` is what the decode
    replica reports, from the call to the prefill replica until the KV is complete.
    """

    sharing: str
    transport: Transport
    ranks: Ranks
    prompt_tokens: int
    requests: int
    concurrency: int
    payload_bytes: int
    lower_bound_bytes: int
    unshared_bytes: int
    bytes_saved: int
    wire_bytes: int
    ttft_ms: Distribution
    itl_ms: Distribution
    transfer_ms: Distribution
    output_tokens_per_s: float
    duration_s: float
    errors: int
    error_messages: tuple[str, ...] = field(default=())


def run_transfer_bench(
    plan: TransferPlan, deployments: Sequence[Deployment], vocabulary: int, start: StartCluster, progress: Progress
) -> list[TransferRun]:
    """Deploy each in turn and measure all prompt lengths on it."""
    # One more of each length for warming up.
    prompts = random_prompts(plan.prompt_tokens, plan.requests + 1, vocabulary, plan.seed)
    first, *others = deployments
    runs = []
    with start(first.config, progress, [other.config for other in others]) as cluster:
        for number, deployment in enumerate(deployments, start=1):
            if deployment is not first:
                progress(f"deployment {number} of {len(deployments)}: {deployment}")
                cluster.redeploy(deployment.config)
            with ApiClient(cluster.base_url) as client:
                target = Target(cluster.base_url, client.model_name(), parameters={"ignore_eos": True})
                for length in plan.prompt_tokens:
                    progress(f"{deployment}: {1 + plan.requests} prompts of {length} tokens")
                    runs.append(_measure(client, target, plan, deployment, prompts[length]))
    return runs


def _changed(config: ClusterConfig, item: str, **changes: object) -> ClusterConfig:
    try:
        return ClusterConfig.load(**(config.model_dump() | changes))
    except ConfigError as error:
        raise CrosskvError(f"{item}: {error}") from None


def _measure(
    client: ApiClient,
    target: Target,
    plan: TransferPlan,
    deployment: Deployment,
    prompts: Sequence[tuple[int, ...]],
) -> TransferRun:
    warm_up, *measured = [LoadRequest(prompt, plan.output_tokens) for prompt in prompts]
    asyncio.run(run_load(target, [warm_up], ClosedLoop(1)))
    wire_before = _settled_wire_bytes(client, at_least=0)
    records, duration = asyncio.run(run_load(target, measured, ClosedLoop(plan.concurrency)))
    transfers = [record.transfer for record in records if record.error is None and record.transfer is not None]
    payload = sum(transfer.payload_bytes for transfer in transfers)
    unshared = sum(transfer.unshared_bytes for transfer in transfers)
    wire = _settled_wire_bytes(client, at_least=wire_before + payload) - wire_before
    summary = summarize(records, duration)
    violations = [message for record in records for message in _violations(record)]
    if _KERNEL_COUNTS and wire < payload:
        violations.append(
            f"the kernel counted {wire:,} bytes on the KV connections, fewer than the payload {payload:,}"
        )
    return TransferRun(
        sharing=deployment.sharing,
        transport=deployment.transport,
        ranks=deployment.ranks,
        prompt_tokens=len(prompts[0]),
        requests=len(records),
        concurrency=plan.concurrency,
        payload_bytes=payload,
        lower_bound_bytes=sum(transfer.lower_bound_bytes for transfer in transfers),
        unshared_bytes=unshared,
        bytes_saved=unshared - payload,
        wire_bytes=wire,
        ttft_ms=summary.ttft_ms,
        itl_ms=summary.itl_ms,
        transfer_ms=Distribution.of(transfer.transfer_ms for transfer in transfers),
        output_tokens_per_s=summary.output_tokens_per_s,
        duration_s=duration,
        errors=summary.errors + len(violations),
        error_messages=(*summary.error_messages, *violations),
    )


def _violations(record: RequestRecord) -> list[str]:
    """Return how one successful request broke the promise that exactly the lower bound is sent."""
    if record.error is not None:
        return []
    if record.transfer is None:
        return ["a response without usage.crosskv"]
    sent, bound = record.transfer.payload_bytes, record.transfer.lower_bound_bytes
    if sent == 0:
        return [f"no KV was sent for a prompt of {record.prompt_tokens} tokens (lower bound {bound:,} bytes)"]
    if sent != bound:
        return [f"{sent:,} payload bytes sent, lower bound {bound:,}"]
    return []


def _settled_wire_bytes(client: ApiClient, at_least: int) -> int:
    """Return the prefill replicas' wire bytes once they have reached ``at_least`` and stopped growing.

    The replicas read the kernel's counters now and then, so a reading right after the last request may be old. A
    reading that never gets there is returned as it is: the report then shows the gap.
    """
    deadline = time.monotonic() + _POLL_LIMIT_SECONDS
    last, since = -1, 0.0
    while True:
        replies = client.status()
        value = sum(reply.counters.wire_bytes for reply in replies if reply.role == "prefill")
        now = time.monotonic()
        if value != last:
            last, since = value, now
        settled = (value >= at_least or not _KERNEL_COUNTS) and now - since >= _STABLE_SECONDS
        if settled or now > deadline:
            return value
        time.sleep(_POLL_SECONDS)
