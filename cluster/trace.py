"""``crosskv trace``: one request's phases, to scale, as people or programs read them."""

import json
from dataclasses import asdict
from datetime import datetime

from rich.bar import Bar
from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from cluster.timeline import Phase, PhaseName, RequestRecord

BAR_WIDTH = 48
"""Of a terminal that is wide enough."""
_EIGHTHS = 8
_COLORS = {
    PhaseName.QUEUE: "bright_black",
    PhaseName.RETRY: "red",
    PhaseName.TRANSFER: "magenta",
    PhaseName.PREFILL: "blue",
    PhaseName.DECODE: "green",
    PhaseName.RESUMPTION: "yellow",
}


def trace_view(record: RequestRecord) -> Group:
    """Render a request: what it was, what moved for it, and a bar per phase."""
    return Group(Text(_summary(record)), Text(_bytes(record)), _bars(record))


def trace_json(record: RequestRecord) -> str:
    """Render it for programs."""
    return json.dumps(asdict(record), indent=2)


def _summary(record: RequestRecord) -> str:
    began = datetime.fromtimestamp(record.began).astimezone().isoformat(sep=" ", timespec="milliseconds")
    ended = str(record.status) if record.http_status in (0, 200) else f"{record.status} ({record.http_status})"
    first = "" if record.first_token_ms is None else f", first token after {_milliseconds(record.first_token_ms)}"
    choices = f" in {record.choices} choices" if record.choices > 1 else ""
    return (
        f"{record.request_id}  {record.route}  {record.model}\n"
        f"{began}  {ended} after {_milliseconds(record.duration_ms)}{first}\n"
        f"{record.prompt_tokens:,} prompt tokens, {record.cached_tokens:,} cached by decode and "
        f"{record.prefill_cached_tokens:,} by prefill; {record.completion_tokens:,} generated{choices}"
    )


def _bytes(record: RequestRecord) -> str:
    if not record.payload_bytes:
        return "no KV was sent"
    retries = f", {decimal(record.retransmitted_bytes)} sent again" if record.retransmitted_bytes else ""
    return f"{decimal(record.payload_bytes)} of KV sent, {decimal(record.unshared_bytes)} without sharing{retries}"


def _bars(record: RequestRecord) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("phase", no_wrap=True)
    table.add_column("", min_width=8, max_width=BAR_WIDTH)
    table.add_column("from", justify="right", no_wrap=True)
    table.add_column("took", justify="right", no_wrap=True)
    table.add_column("where", no_wrap=True)
    table.add_column("KV", justify="right", no_wrap=True)
    several = len({phase.prompt for phase in record.phases}) > 1
    senders = {phase.source for phase in record.phases if phase.source}
    for phase in record.phases:
        name = f"{phase.name} {phase.prompt}" if several else str(phase.name)
        table.add_row(
            # What a prefill replica did is part of the transfer.
            f"  {name}" if phase.replica in senders else name,
            _bar(phase, max(record.duration_ms, phase.end_ms)),
            _milliseconds(phase.begin_ms),
            _milliseconds(phase.end_ms - phase.begin_ms),
            phase.source or phase.replica,
            decimal(phase.payload_bytes) if phase.payload_bytes else "",
        )
    return table


def _bar(phase: Phase, duration_ms: float) -> Bar:
    """Where a phase lies in the whole request; the shortest is still seen."""
    shortest = duration_ms / BAR_WIDTH / _EIGHTHS
    begin = min(phase.begin_ms, duration_ms - shortest)
    end = max(phase.end_ms, begin + shortest)
    return Bar(duration_ms, begin, end, color=_COLORS[phase.name])


def _milliseconds(value: float) -> str:
    return f"{value:,.1f} ms"
