"""What a transfer comparison leaves behind: report.json for programs, report.md for people, and plots.

A benchmark makes a ``TransferReport`` when its last run has ended; ``write`` is the end of it.
"""

import json
import math
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
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from cluster.bench.load import Distribution
from cluster.bench.transfer import TransferRun

_MEBIBYTE = 1 << 20
_KILO = 1000
_PANELS_A_ROW = 3


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
            f"{run.sharing}, {run.transport}, {run.ranks}, {run.prompt_tokens} tokens: {message}"
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
        columns = _FILE_COLUMNS
        lines = [
            "# KV transfer by deployment",
            "",
            f"`{environment.command}`",
            "",
            f"Model {environment.model}, {environment.cpus} CPUs ({environment.machine}), Python {environment.python}, "
            f"{environment.packages}; {environment.measured}.",
            "",
            "Payload is what the prefill replicas sent as KV, the lower bound the fewest bytes that any connector could"
            " send for the same prompts: a KV head that several decode ranks hold counts once for each of them. Wire is"
            " what the kernel counted on the KV connections. Bytes are sums over a run's requests. Ranks are those of a"
            " prefill and of a decode replica. A transfer lasts from the call to the prefill replica until the KV is"
            " complete, so it contains the prefill. A sharing rule that a checkpoint was not trained with makes its"
            " text meaningless, its bytes not.",
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

    def table(self) -> RenderableType:
        """Return the medians for a terminal of 80 columns; the files hold the rest.

        A column with one value throughout is a line below the table instead.
        """
        cells = {title: [cell(run) for run in self.runs] for title, cell in _TERMINAL_COLUMNS}
        same = {title: values[0] for title, values in cells.items() if len(self.runs) > 1 and len(set(values)) == 1}
        varying = {title: values for title, values in cells.items() if title not in same}
        table = Table(box=SIMPLE_HEAD, padding=0, show_edge=False)
        for title in varying:
            heading = title.replace(" ", "\n")
            table.add_column(heading, justify="left" if title == "sharing" else "right", overflow="fold")
        for row in zip(*varying.values(), strict=True):
            table.add_row(*row)
        count = self.runs[0].requests
        requests = "1 request" if count == 1 else f"{count:,} requests"
        above = f"KV transfer by deployment: bytes of {requests}, medians of times"
        below = "In every row: " + ", ".join(f"{title} {value}" for title, value in same.items())
        return Group(Text(above, style="italic"), table, *([Text(below, style="italic")] if same else []))


def _wire_ratio(run: TransferRun) -> str:
    return f"{run.wire_bytes / run.payload_bytes:.4f}" if run.payload_bytes else "–"


def _saved_share(run: TransferRun) -> str:
    return f"{run.bytes_saved / run.unshared_bytes:.0%}" if run.unshared_bytes else "–"


def _short_bytes(count: int) -> str:
    """Three significant digits: ``1.47 GB``."""
    if count < _KILO:
        return f"{count} B"
    # What rounds to four digits belongs to the next unit.
    power = next((power for power in (1, 2, 3) if count < 999.5 * _KILO**power), 4)
    return f"{_three_digits(count / _KILO**power)} {'_kMGT'[power]}B"


def _median(distribution: Distribution) -> str:
    return "–" if distribution.p50 is None else _three_digits(distribution.p50)


def _three_digits(value: float) -> str:
    """At least three significant digits, and no digit of the whole part is lost."""
    whole = int(float(f"{value:.3g}"))
    return f"{value:.{max(0, 3 - len(str(whole)))}f}"


def percentiles(distribution: Distribution) -> str:
    """Return the three percentiles as a table shows them."""
    if distribution.p50 is None or distribution.p90 is None or distribution.p99 is None:
        return "–"
    return f"{distribution.p50:.1f} / {distribution.p90:.1f} / {distribution.p99:.1f}"


_Columns = Sequence[tuple[str, Callable[[TransferRun], str]]]

_FILE_COLUMNS: _Columns = (
    ("sharing", lambda run: run.sharing),
    ("transport", lambda run: run.transport),
    ("ranks", lambda run: str(run.ranks)),
    ("prompt tokens", lambda run: str(run.prompt_tokens)),
    ("requests", lambda run: str(run.requests)),
    ("payload", lambda run: f"{run.payload_bytes:,}"),
    ("lower bound", lambda run: f"{run.lower_bound_bytes:,}"),
    ("equal", lambda run: "yes" if run.payload_bytes == run.lower_bound_bytes else "no"),
    ("saved", lambda run: f"{run.bytes_saved:,}"),
    ("wire", lambda run: f"{run.wire_bytes:,}"),
    ("wire / payload", _wire_ratio),
    ("transfer ms p50 / p90 / p99", lambda run: percentiles(run.transfer_ms)),
    ("TTFT ms p50 / p90 / p99", lambda run: percentiles(run.ttft_ms)),
    ("ITL ms p50 / p90 / p99", lambda run: percentiles(run.itl_ms)),
    ("output tokens/s", lambda run: f"{run.output_tokens_per_s:.1f}"),
    ("errors", lambda run: str(run.errors)),
)

# A title's words are below each other, so that columns are as narrow as their values.
_TERMINAL_COLUMNS: _Columns = (
    ("sharing", lambda run: run.sharing),
    ("via", lambda run: run.transport),
    ("ranks", lambda run: str(run.ranks)),
    ("prompt tokens", lambda run: str(run.prompt_tokens)),
    ("KV sent", lambda run: _short_bytes(run.payload_bytes)),
    ("lower bound", lambda run: "= sent" if run.payload_bytes == run.lower_bound_bytes else "≠ sent"),
    ("saved", _saved_share),
    ("wire /sent", _wire_ratio),
    ("moved ms", lambda run: _median(run.transfer_ms)),
    ("TTFT ms", lambda run: _median(run.ttft_ms)),
    ("ITL ms", lambda run: _median(run.itl_ms)),
    ("errors", lambda run: str(run.errors)),
)


def _plot_bytes(runs: Sequence[TransferRun], path: Path) -> Path:
    """Draw the payload per request from zero, each bar with its value and the lower bound as a line across it."""

    def draw(axes: Axes, bar: _Bar) -> None:
        run = bar.run
        drawn = axes.bar(
            bar.position, run.payload_bytes / run.requests / _MEBIBYTE, bar.width, color=bar.color, label=bar.label
        )
        axes.bar_label(drawn, fmt="%.3g", fontsize=8, padding=2)
        bound = run.lower_bound_bytes / run.requests / _MEBIBYTE
        ends = (bar.position - bar.width / 2, bar.position + bar.width / 2)
        axes.hlines(bound, *ends, colors="black", linewidth=1.5)

    return _plot(runs, "KV sent per request (black: lower bound)", "MiB", draw, path)


def _plot_times(
    runs: Sequence[TransferRun], title: str, measured: Callable[[TransferRun], Distribution], path: Path
) -> Path:
    """Draw a time's median, with a whisker up to the 99th percentile."""

    def draw(axes: Axes, bar: _Bar) -> None:
        times = measured(bar.run)
        if times.p50 is not None and times.p99 is not None:
            axes.bar(bar.position, times.p50, bar.width, color=bar.color, label=bar.label)
            axes.vlines(bar.position, times.p50, times.p99, colors="black", linewidth=1)

    return _plot(runs, title, "ms (bar: p50, whisker: p99)", draw, path)


@dataclass(frozen=True, slots=True)
class _Bar:
    """One run's place in a panel. ``label`` is empty but for the first bar of a sharing rule."""

    run: TransferRun
    position: float
    width: float
    color: str
    label: str


def _plot(runs: Sequence[TransferRun], title: str, unit: str, draw: Callable[[Axes, _Bar], None], path: Path) -> Path:
    """Draw a panel per transport and ranks, in it bars per prompt length, a bar per sharing rule; one scale for all."""
    panels: dict[str, list[TransferRun]] = {}
    for run in runs:
        panels.setdefault(f"{run.transport}, ranks {run.ranks}", []).append(run)
    rows = math.ceil(len(panels) / _PANELS_A_ROW)
    columns = math.ceil(len(panels) / rows)
    # A figure without pyplot has no window and no global state; it draws with Agg.
    figure = Figure(figsize=(max(7, 4.5 * columns), 1 + 3 * rows), layout="constrained")
    figure.suptitle(title)
    every_axes = figure.subplots(rows, columns, sharey=True, squeeze=False).flatten()
    for axes, (name, shown) in zip(every_axes, panels.items(), strict=False):
        axes.set_title(name, fontsize="medium")
        axes.set_xlabel("prompt tokens")
        # Room for the figure above the highest bar.
        axes.margins(y=0.1)
        axes.grid(axis="y", alpha=0.3)
        axes.set_axisbelow(True)
        for bar in _bars(shown):
            draw(axes, bar)
        lengths = sorted({run.prompt_tokens for run in shown})
        axes.set_xticks(range(len(lengths)), [str(length) for length in lengths])
    for axes in every_axes[::columns]:
        axes.set_ylabel(unit)
    for axes in every_axes[len(panels) :]:
        axes.set_axis_off()
    if every_axes[0].get_legend_handles_labels()[0]:
        every_axes[0].legend(title="KV sharing")
    figure.savefig(path, dpi=150)
    return path


def _bars(runs: Sequence[TransferRun]) -> Iterator[_Bar]:
    """The bars of one panel."""
    lengths = sorted({run.prompt_tokens for run in runs})
    rules = list(dict.fromkeys(run.sharing for run in runs))
    width = 0.8 / len(rules)
    for run in runs:
        rule = rules.index(run.sharing)
        yield _Bar(
            run,
            position=lengths.index(run.prompt_tokens) + (rule - (len(rules) - 1) / 2) * width,
            width=width,
            color=f"C{rule}",
            label=run.sharing if run.prompt_tokens == runs[0].prompt_tokens else "",
        )
