"""``crosskv status``: one moment of a cluster as a table or as JSON, or one moment after the other."""

import json
import time
from collections.abc import Callable, Sequence

from google.protobuf.json_format import MessageToDict
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.filesize import decimal
from rich.live import Live
from rich.table import Table

from worker.config import Role
from worker.wire.engine_pb2 import StatusReply


def status_tables(replies: Sequence[StatusReply], base_url: str) -> Group:
    """Render every replica's queues and blocks, then its tokens and transferred bytes, prefill first."""
    now = _table(f"crosskv at {base_url}", "running", "waiting", "receiving", "free", "cached", "held", "blocks")
    since = _table("since they started", "KV layers", "prompt", "generated", "hits", "KV sent", "bound", "wire")
    for reply in sorted(replies, key=lambda reply: (reply.role != "prefill", reply.role, reply.replica_id)):
        load, counters = reply.load, reply.counters
        now.add_row(
            reply.replica_id,
            str(load.running_requests),
            str(load.waiting_requests),
            str(load.receiving_requests),
            str(load.free_blocks),
            str(load.cached_blocks),
            str(reply.held_blocks),
            str(load.total_blocks),
        )
        since.add_row(
            reply.replica_id,
            f"{reply.owner_layers}/{reply.total_layers}",
            f"{counters.prompt_tokens:,}",
            f"{counters.generated_tokens:,}",
            f"{counters.prefix_hits / counters.prefix_queries:.0%}" if counters.prefix_queries else "–",
            decimal(counters.payload_bytes),
            # Receivers know what they lacked, senders what their sockets sent.
            decimal(counters.lower_bound_bytes) if reply.role == Role.DECODE.value else "–",
            decimal(counters.wire_bytes) if reply.role == Role.PREFILL.value else "–",
        )
    return Group(now, since)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("replica", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def status_json(replies: Sequence[StatusReply]) -> str:
    """Render every replica's report for programs, fields that are zero included."""
    return json.dumps(
        [
            MessageToDict(reply, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
            for reply in replies
        ],
        indent=2,
    )


def watch_status(fetch: Callable[[], list[StatusReply]], base_url: str, console: Console) -> None:
    """Show the table anew every second until the person interrupts."""
    with Live(status_tables(fetch(), base_url), console=console, auto_refresh=False) as live:
        while True:
            time.sleep(1)
            live.update(status_tables(fetch(), base_url), refresh=True)
