"""An asynchronous load generator for any OpenAI-compatible server.

A benchmark makes ``LoadRequest``s and one arrival process, ``run_load`` sends them as streaming completions and returns
one ``RequestRecord`` each, and ``summarize`` turns records into a ``LoadSummary``. Nothing outlives the call.
"""

import asyncio
import itertools
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import numpy as np
from pydantic import BaseModel, ValidationError

from cluster.client import ApiFailure, TransferUsage, Usage, error_message
from cluster.event_data import EventData
from cluster.tls import client_context

Prompt = str | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Target:
    """The server under load. ``base_url`` has no ``/v1``; ``parameters`` are added to every request's body."""

    base_url: str
    model: str
    api_key: str | None = None
    timeout: float = 600.0
    parameters: Mapping[str, object] = field(default_factory=dict)
    ca: Path | None = None


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """One completion to ask for: a text or token ids, and how many tokens to generate."""

    prompt: Prompt
    output_tokens: int


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """A fixed number of clients, each of which sends its next request when its last one has ended."""

    concurrency: int


@dataclass(frozen=True, slots=True)
class PoissonArrivals:
    """Requests that arrive at random, whether or not earlier ones have ended."""

    requests_per_second: float
    seed: int = 0


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """What one request experienced; times are seconds.

    ``time_to_first_token`` counts from the moment at which the request was due, so that a client that falls behind
    cannot hide a slow server. ``gaps`` lie between successive chunks that carried a token. ``error`` is None if the
    stream ended as it should.
    """

    time_to_first_token: float | None
    gaps: tuple[float, ...]
    latency: float
    prompt_tokens: int
    output_tokens: int
    transfer: TransferUsage | None
    error: str | None


@dataclass(frozen=True, slots=True)
class Distribution:
    """Mean and percentiles (linear interpolation); all None if there was nothing to measure."""

    mean: float | None
    p50: float | None
    p90: float | None
    p99: float | None
    max: float | None

    @classmethod
    def of(cls, values: Iterable[float]) -> "Distribution":
        """Summarize some values."""
        samples = np.fromiter(values, dtype=np.float64)
        if samples.size == 0:
            return cls(None, None, None, None, None)
        p50, p90, p99 = np.percentile(samples, (50, 90, 99))
        return cls(float(samples.mean()), float(p50), float(p90), float(p99), float(samples.max()))


@dataclass(frozen=True, slots=True)
class LoadSummary:
    """One load's figures; failed requests count only as errors.

    ``itl_ms`` is the time between chunks, ``tpot_ms`` a request's mean time per output token after the first.
    """

    requests: int
    completed: int
    errors: int
    error_messages: tuple[str, ...]
    duration_s: float
    prompt_tokens: int
    output_tokens: int
    requests_per_s: float
    output_tokens_per_s: float
    ttft_ms: Distribution
    itl_ms: Distribution
    tpot_ms: Distribution
    latency_ms: Distribution


class _Choice(BaseModel):
    text: str = ""
    finish_reason: str | None = None


class _Event(BaseModel):
    """What this client reads of a completion chunk or an error."""

    choices: list[_Choice] = []
    usage: Usage | None = None
    error: ApiFailure | None = None


class _StreamError(Exception):
    """The server reported an error, or ended a stream early."""


async def run_load(
    target: Target,
    requests: Sequence[LoadRequest],
    arrivals: ClosedLoop | PoissonArrivals,
    on_finished: Callable[[RequestRecord], None] = lambda record: None,
) -> tuple[list[RequestRecord], float]:
    """Send all requests and return their records, in the requests' order, and the load's duration in seconds."""
    records: list[RequestRecord | None] = [None] * len(requests)
    headers = {} if target.api_key is None else {"Authorization": f"Bearer {target.api_key}"}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(
        base_url=target.base_url,
        headers=headers,
        limits=limits,
        timeout=target.timeout,
        # Certificates take 60 ms to read, in which nothing that streams meanwhile would be received.
        verify=client_context(target.ca) if target.base_url.startswith("https:") else False,
    ) as client:

        async def send(index: int, due: float) -> None:
            record = await _complete(client, target, requests[index], due)
            records[index] = record
            on_finished(record)

        began = time.perf_counter()
        match arrivals:
            case ClosedLoop(concurrency):
                remaining = iter(range(len(requests)))

                async def one_client() -> None:
                    for index in remaining:
                        await send(index, time.perf_counter())

                async with asyncio.TaskGroup() as clients:
                    for _ in range(min(concurrency, len(requests))):
                        clients.create_task(one_client())
            case PoissonArrivals(requests_per_second, seed):
                generator = random.Random(seed)  # noqa: S311 (a load, not a secret)
                due = began
                async with asyncio.TaskGroup() as sent:
                    for index in range(len(requests)):
                        await asyncio.sleep(max(0.0, due - time.perf_counter()))
                        sent.create_task(send(index, due))
                        due += generator.expovariate(requests_per_second)
        duration = time.perf_counter() - began
    return [record for record in records if record is not None], duration


async def _complete(client: httpx.AsyncClient, target: Target, request: LoadRequest, due: float) -> RequestRecord:
    body = {
        "model": target.model,
        "prompt": request.prompt,
        "max_tokens": request.output_tokens,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **target.parameters,
    }
    arrivals: list[float] = []
    usage: Usage | None = None
    error: str | None = None
    try:
        async for event in _events(client, body):
            if any(choice.text or choice.finish_reason is None or not arrivals for choice in event.choices):
                arrivals.append(time.perf_counter())
            usage = event.usage or usage
    except _StreamError as failure:
        error = str(failure)
    except httpx.HTTPError as failure:
        error = f"{type(failure).__name__}: {failure}".rstrip(": ")
    return RequestRecord(
        time_to_first_token=arrivals[0] - due if arrivals else None,
        gaps=tuple(later - earlier for earlier, later in itertools.pairwise(arrivals)),
        latency=time.perf_counter() - due,
        prompt_tokens=usage.prompt_tokens if usage else 0,
        # A server that reports no usage is taken to send one token per chunk.
        output_tokens=usage.completion_tokens if usage else len(arrivals),
        transfer=usage.crosskv if usage else None,
        error=error,
    )


async def _events(client: httpx.AsyncClient, body: Mapping[str, object]) -> AsyncIterator[_Event]:
    """Yield a completion's server-sent events; raise ``_StreamError`` unless it ends with [DONE]."""
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != httpx.codes.OK:
            text = (await response.aread()).decode(errors="replace")
            raise _StreamError(f"HTTP {response.status_code}: {error_message(text)}")
        events = EventData()
        async for piece in response.aiter_bytes():
            for data in events.after(piece):
                if data == "[DONE]":
                    return
                try:
                    event = _Event.model_validate_json(data)
                except ValidationError:
                    raise _StreamError(f"not a completion chunk: {data[:200]}") from None
                if event.error is not None:
                    raise _StreamError(f"error in the stream: {event.error.message}")
                yield event
    raise _StreamError("the stream ended before [DONE]")


def summarize(records: Sequence[RequestRecord], duration: float) -> LoadSummary:
    """Return the figures of one load that took ``duration`` seconds."""
    good = [record for record in records if record.error is None]
    messages = Counter(record.error for record in records if record.error is not None)
    output_tokens = sum(record.output_tokens for record in good)
    return LoadSummary(
        requests=len(records),
        completed=len(good),
        errors=len(records) - len(good),
        error_messages=tuple(f"{count} × {message}" for message, count in messages.most_common()),
        duration_s=duration,
        prompt_tokens=sum(record.prompt_tokens for record in good),
        output_tokens=output_tokens,
        requests_per_s=len(good) / duration,
        output_tokens_per_s=output_tokens / duration,
        ttft_ms=Distribution.of(
            1e3 * record.time_to_first_token for record in good if record.time_to_first_token is not None
        ),
        itl_ms=Distribution.of(1e3 * gap for record in good for gap in record.gaps),
        tpot_ms=Distribution.of(
            1e3 * sum(record.gaps) / (record.output_tokens - 1) for record in good if record.output_tokens > 1
        ),
        latency_ms=Distribution.of(1e3 * record.latency for record in good),
    )
