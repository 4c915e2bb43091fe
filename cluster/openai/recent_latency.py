"""Latency of the last minutes, for those who look now and keep no history: what histograms gained since then.

One per front end, beside its metrics. While the front end runs, ``follow`` remembers every few seconds what the
histograms hold.
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from prometheus_client import Histogram

from cluster.openai.metrics import FrontEndMetrics

WINDOW_SECONDS = 300.0
SAMPLE_SECONDS = 5.0
QUANTILES = (0.5, 0.9, 0.99)


@dataclass(frozen=True, slots=True)
class Buckets:
    """A histogram's counts at one moment: how many values were at most each of ``bounds``, the last being infinite."""

    bounds: tuple[float, ...]
    counts: tuple[float, ...]

    @staticmethod
    def of(histogram: Histogram) -> "Buckets":
        """Return what a histogram holds, its labels added up."""
        at_most: dict[float, float] = {}
        for sample in (sample for metric in histogram.collect() for sample in metric.samples):
            if sample.name.endswith("_bucket"):
                bound = float(sample.labels["le"])
                at_most[bound] = at_most.get(bound, 0.0) + sample.value
        bounds = tuple(sorted(at_most))
        return Buckets(bounds, tuple(at_most[bound] for bound in bounds))

    def since(self, earlier: "Buckets") -> "Buckets":
        """Return the values that came after an earlier moment. One without labels yet had none."""
        before = dict(zip(earlier.bounds, earlier.counts, strict=True))
        return Buckets(
            self.bounds,
            tuple(count - before.get(bound, 0.0) for bound, count in zip(self.bounds, self.counts, strict=True)),
        )

    @property
    def total(self) -> int:
        """How many values there are."""
        return int(self.counts[-1]) if self.counts else 0

    def quantile(self, part: float) -> float | None:
        """Return the value below which ``part`` of all lie, as Prometheus' ``histogram_quantile`` estimates it.

        Within a bucket values count as evenly spread; of those above the highest finite bound only that is known.
        """
        if self.total == 0:
            return None
        rank = part * self.total
        at = next(index for index, count in enumerate(self.counts) if count >= rank)
        if math.isinf(self.bounds[at]):
            return self.bounds[at - 1]
        low, below = (self.bounds[at - 1], self.counts[at - 1]) if at else (0.0, 0.0)
        return low + (self.bounds[at] - low) * (rank - below) / (self.counts[at] - below)


class RecentLatency:
    """See the module."""

    def __init__(self, metrics: FrontEndMetrics, clock: Callable[[], float] = time.monotonic) -> None:
        self._histograms = {
            "time_to_first_token": metrics.time_to_first_token,
            "inter_token_latency": metrics.inter_token_latency,
        }
        self._clock = clock
        self._moments: deque[tuple[float, dict[str, Buckets]]] = deque()
        self.sample()

    async def follow(self) -> None:
        """Remember, until cancelled."""
        while True:
            await asyncio.sleep(SAMPLE_SECONDS)
            self.sample()

    def sample(self) -> None:
        """Remember this moment, and forget those that the window has left, but for the last of them."""
        now = self._clock()
        self._moments.append((now, {name: Buckets.of(one) for name, one in self._histograms.items()}))
        while len(self._moments) > 1 and self._moments[1][0] <= now - WINDOW_SECONDS:
            self._moments.popleft()

    def report(self) -> dict[str, Any]:
        """Return how many seconds it covers and, for each histogram, its count and quantiles in seconds."""
        began, earlier = self._moments[0]
        report: dict[str, Any] = {"seconds": self._clock() - began}
        for name, histogram in self._histograms.items():
            gained = Buckets.of(histogram).since(earlier[name])
            quantiles = {f"p{part * 100:g}": gained.quantile(part) for part in QUANTILES}
            report[name] = {"count": gained.total, **quantiles}
        return report
