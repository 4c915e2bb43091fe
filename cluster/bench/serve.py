"""A load test of any OpenAI-compatible server that is already running."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.table import Table

from cluster.bench.load import (
    ClosedLoop,
    Distribution,
    LoadRequest,
    LoadSummary,
    PoissonArrivals,
    RequestRecord,
    Target,
    run_load,
    summarize,
)
from cluster.bench.report import Environment, percentiles


@dataclass(frozen=True, slots=True)
class ServeReport:
    """One load and what the server made of it."""

    environment: Environment
    base_url: str
    arrivals: ClosedLoop | PoissonArrivals
    summary: LoadSummary

    def write(self, path: Path) -> None:
        """Write everything as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

    def table(self) -> Table:
        """Return the figures for a terminal."""
        summary = self.summary
        table = Table(title=f"{self.environment.model} at {self.base_url}", title_justify="left", show_header=False)
        table.add_column()
        table.add_column(justify="right")
        for name, value in (
            ("requests completed", f"{summary.completed} of {summary.requests}"),
            ("duration", f"{summary.duration_s:.2f} s"),
            ("requests per second", f"{summary.requests_per_s:.2f}"),
            ("prompt tokens", f"{summary.prompt_tokens:,}"),
            ("output tokens", f"{summary.output_tokens:,}"),
            ("output tokens per second", f"{summary.output_tokens_per_s:.1f}"),
        ):
            table.add_row(name, value)
        times: tuple[tuple[str, Distribution], ...] = (
            ("time to first token, ms (p50 / p90 / p99)", summary.ttft_ms),
            ("inter-token latency, ms", summary.itl_ms),
            ("time per output token, ms", summary.tpot_ms),
            ("request latency, ms", summary.latency_ms),
        )
        for name, distribution in times:
            table.add_row(name, percentiles(distribution))
        for message in summary.error_messages:
            table.add_row("[red]error[/red]", message)
        return table


async def run_serve_bench(
    target: Target,
    arrivals: ClosedLoop | PoissonArrivals,
    requests: Sequence[LoadRequest],
    on_finished: Callable[[RequestRecord], None],
) -> LoadSummary:
    """Warm the server up with the first request, unmeasured, then send all others."""
    warm_up, *measured = requests
    await run_load(target, [warm_up], ClosedLoop(1))
    records, duration = await run_load(target, measured, arrivals, on_finished)
    return summarize(records, duration)
