"""What a transfer comparison leaves behind: report.json for programs, report.md for people, and plots.

A benchmark makes a ``TransferReport`` when its last run has ended; ``write`` is the end of it.
"""

import json
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.box import SIMPLE_HEAD
from rich.table import Table

from cluster.bench.load import Distribution
from cluster.bench.transfer import TransferRun

_MEBIBYTE = 1 << 20


@dataclass(frozen=True, slots=True)
class Environment:
    """Where figures were measured; figures without it mean nothing."""

    command: str
    model: str
    measured: str
    machine: str
    cpus: int
    python: str
    packages: str

    @classmethod
    def here(cls, command: str, model: str) -> "Environment":
        """Describe this machine now."""
        return cls(
            command=command,
            model=model,
            measured=datetime.now(UTC).isoformat(timespec="seconds"),
            machine=f"{platform.system()} {platform.machine()}",
            cpus=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
            python=platform.python_version(),
            packages=", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "ray", "grpcio")),
        )


@dataclass(frozen=True, slots=True)
class TransferReport:
    """All runs of one comparison and where they were measured."""

    environment: Environment
    runs: tuple[TransferRun, ...]

    @property
    def errors(self) -> tuple[str, ...]:
        """Everything that went wrong, by run."""
        return tuple(
            f"{run.sharing}, {run.prompt_tokens} tokens: {message}"
            for run in self.runs
            for message in run.error_messages
        )

    def write(self, directory: Path) -> list[Path]:
        """Write report.json, report.md and the plots, and return their paths."""
        directory.mkdir(parents=True, exist_ok=True)
        data = directory / "report.json"
        data.write_text(json.dumps(asdict(self), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        plots = [
            _plot_bytes(self.runs, directory / "kv_bytes.png"),
            _plot_times(self.runs, "time to first token", lambda run: run.ttft_ms, directory / "ttft.png"),
            _plot_times(self.runs, "inter-token latency", lambda run: run.itl_ms, directory / "itl.png"),
            _plot_times(self.runs, "KV transfer", lambda run: run.transfer_ms, directory / "transfer.png"),
        ]
        text = directory / "report.md"
        text.write_text(self.markdown(plots), encoding="utf-8")
        return [data, text, *plots]

    def markdown(self, plots: Sequence[Path]) -> str:
        """Return the report for people."""
        environment = self.environment
        columns = _columns()
        lines = [
            "# KV transfer by layout",
            "",
            f"`{environment.command}`",
            "",
            f"Model {environment.model}, {environment.cpus} CPUs ({environment.machine}), Python {environment.python}, "
            f"{environment.packages}; {environment.measured}.",
            "",
            "Payload is what the prefill replicas sent as KV, the lower bound the fewest bytes that any connector could"
            " send for the same prompts, wire what the kernel counted on the KV connections. Bytes are sums over a"
            " run's requests. A sharing rule that a checkpoint was not trained with makes its text meaningless, its"
            " bytes not.",
            "",
            "| " + " | ".join(title for title, _ in columns) + " |",
            "| " + " | ".join("---" if index == 0 else "---:" for index in range(len(columns))) + " |",
            *("| " + " | ".join(cell(run) for _, cell in columns) + " |" for run in self.runs),
            "",
        ]
        if self.errors:
            lines += ["## Errors", "", *(f"- {error}" for error in self.errors), ""]
        lines += [line for plot in plots for line in (f"![{plot.stem}]({plot.name})", "")]
        return "\n".join(lines)

    def table(self) -> Table:
        """Return the medians for a terminal of 80 columns; the files hold the rest."""
        table = Table(title="KV transfer by layout", title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for title in ("sharing", "prompt", "KV sent", "saved", "wire/sent", "TTFT ms", "ITL ms", "errors"):
            table.add_column(title, justify="left" if title == "sharing" else "right")
        for run in self.runs:
            table.add_row(
                run.sharing,
                str(run.prompt_tokens),
                f"{run.payload_bytes:,}",
                f"{run.bytes_saved:,}",
                _wire_ratio(run),
                _median(run.ttft_ms),
                _median(run.itl_ms),
                str(run.errors),
            )
        return table


def _columns() -> list[tuple[str, Callable[[TransferRun], str]]]:
    return [
        ("sharing", lambda run: run.sharing),
        ("prompt tokens", lambda run: str(run.prompt_tokens)),
        ("requests", lambda run: str(run.requests)),
        ("payload", lambda run: f"{run.payload_bytes:,}"),
        ("lower bound", lambda run: f"{run.lower_bound_bytes:,}"),
        ("saved", lambda run: f"{run.bytes_saved:,}"),
        ("wire", lambda run: f"{run.wire_bytes:,}"),
        ("wire / payload", _wire_ratio),
        ("TTFT ms p50 / p90 / p99", lambda run: percentiles(run.ttft_ms)),
        ("ITL ms p50 / p90 / p99", lambda run: percentiles(run.itl_ms)),
        ("transfer ms p50 / p90 / p99", lambda run: percentiles(run.transfer_ms)),
        ("output tokens/s", lambda run: f"{run.output_tokens_per_s:.1f}"),
        ("errors", lambda run: str(run.errors)),
    ]


def _wire_ratio(run: TransferRun) -> str:
    return f"{run.wire_bytes / run.payload_bytes:.4f}" if run.payload_bytes else "–"


def _median(distribution: Distribution) -> str:
    return "–" if distribution.p50 is None else f"{distribution.p50:.1f}"


def percentiles(distribution: Distribution) -> str:
    """Return the three percentiles as a table shows them."""
    if distribution.p50 is None or distribution.p90 is None or distribution.p99 is None:
        return "–"
    return f"{distribution.p50:.1f} / {distribution.p90:.1f} / {distribution.p99:.1f}"


def _plot_bytes(runs: Sequence[TransferRun], path: Path) -> Path:
    """Draw the payload per request from zero, each bar with its value and the lower bound as a line across it."""
    figure, axes = _figure("KV sent per request (black: lower bound)", "MiB")
    for run, position, width, color in _bars(runs):
        sent = run.payload_bytes / run.requests / _MEBIBYTE
        bar = axes.bar(position, sent, width, color=color, label=_label(run, runs))
        axes.bar_label(bar, fmt="%.3g", fontsize=8, padding=2)
        bound = run.lower_bound_bytes / run.requests / _MEBIBYTE
        axes.hlines(bound, position - width / 2, position + width / 2, colors="black", linewidth=1.5)
    return _save(figure, axes, runs, path)


def _plot_times(
    runs: Sequence[TransferRun], title: str, measured: Callable[[TransferRun], Distribution], path: Path
) -> Path:
    """Draw a time's median, with a whisker up to the 99th percentile."""
    figure, axes = _figure(title, "ms (bar: p50, whisker: p99)")
    for run, position, width, color in _bars(runs):
        times = measured(run)
        if times.p50 is not None and times.p99 is not None:
            axes.bar(position, times.p50, width, color=color, label=_label(run, runs))
            axes.vlines(position, times.p50, times.p99, colors="black", linewidth=1)
    return _save(figure, axes, runs, path)


def _figure(title: str, unit: str) -> tuple[Figure, Axes]:
    # A figure without pyplot has no window and no global state; it draws with Agg.
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title)
    axes.set_ylabel(unit)
    axes.set_xlabel("prompt tokens")
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    return figure, axes


def _bars(runs: Sequence[TransferRun]) -> Iterator[tuple[TransferRun, float, float, str]]:
    """Yield each run with its bar's position, width and colour: one cluster of bars per prompt length."""
    lengths, layouts = _distinct(runs)
    width = 0.8 / len(layouts)
    for run in runs:
        layout = layouts.index(run.sharing)
        yield run, lengths.index(run.prompt_tokens) + (layout - (len(layouts) - 1) / 2) * width, width, f"C{layout}"


def _distinct(runs: Sequence[TransferRun]) -> tuple[list[int], list[str]]:
    return sorted({run.prompt_tokens for run in runs}), list(dict.fromkeys(run.sharing for run in runs))


def _label(run: TransferRun, runs: Sequence[TransferRun]) -> str:
    """Return a layout's name for its first bar and nothing for the others, so that the legend names it once."""
    return run.sharing if run == next(other for other in runs if other.sharing == run.sharing) else ""


def _save(figure: Figure, axes: Axes, runs: Sequence[TransferRun], path: Path) -> Path:
    lengths, _ = _distinct(runs)
    axes.set_xticks(range(len(lengths)), [str(length) for length in lengths])
    if axes.get_legend_handles_labels()[0]:
        axes.legend(title="KV sharing")
    figure.savefig(path, dpi=150)
    return path
