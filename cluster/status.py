"""``crosskv status``: one moment of a cluster as a table or as JSON, or one moment after the other."""

import json
import time
from collections.abc import Callable, Sequence

from google.protobuf.json_format import MessageToDict
from rich.console import Console
from rich.filesize import decimal
from rich.live import Live
from rich.table import Table

from worker.wire.engine_pb2 import StatusReply


def status_table(replies: Sequence[StatusReply], base_url: str) -> Table:
    """Render every replica's queues, blocks and transferred bytes, prefill first."""
    table = Table(title=f"crosskv at {base_url}", title_justify="left")
    table.add_column("replica")
    for title in ("running", "waiting", "receiving", "blocks free", "cached", "held", "total"):
        table.add_column(title, justify="right")
    for title in ("KV layers", "prompt tokens", "generated", "prefix hits", "KV sent", "lower bound", "on the wire"):
        table.add_column(title, justify="right")
    for reply in sorted(replies, key=lambda reply: (reply.role != "prefill", reply.role, reply.replica_id)):
        load, counters = reply.load, reply.counters
        hits = f"{counters.prefix_hits / counters.prefix_queries:.0%}" if counters.prefix_queries else "–"
        table.add_row(
            f"{reply.role} {reply.replica_id}",
            str(load.running_requests),
            str(load.waiting_requests),
            str(load.receiving_requests),
            str(load.free_blocks),
            str(load.cached_blocks),
            str(reply.held_blocks),
            str(load.total_blocks),
            f"{reply.owner_layers} of {reply.total_layers}",
            f"{counters.prompt_tokens:,}",
            f"{counters.generated_tokens:,}",
            hits,
            decimal(counters.payload_bytes),
            decimal(counters.lower_bound_bytes),
            decimal(counters.wire_bytes),
        )
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
    with Live(status_table(fetch(), base_url), console=console, auto_refresh=False) as live:
        while True:
            time.sleep(1)
            live.update(status_table(fetch(), base_url), refresh=True)
