"""The tables of commands and settings in docs/user-guide.md, made from the command line and ``ClusterConfig``.

    python -m tests.docs.option_tables

writes them anew, between their markers.
"""

import re
from collections.abc import Iterator
from enum import Enum
from typing import Any

from pydantic import ByteSize
from typer.main import get_command

from cluster.cli import app
from cluster.config import SECRETS, ClusterConfig, flag_of
from tests.docs.documents import REPOSITORY

COMMAND = "python -m tests.docs.option_tables"
DOCUMENT = REPOSITORY / "docs" / "user-guide.md"

GROUPS: dict[str, tuple[str, ...]] = {
    "model": ("model", "served_model_name", "tool_call_parser", "dtype", "device", "decode_graphs", "max_model_len"),
    "replicas": (
        "mode",
        "prefill_replicas",
        "decode_replicas",
        "tensor_parallel_size",
        "prefill_tensor_parallel_size",
        "front_ends",
        "threads",
        "bind_cores",
        "placement",
        "ray_address",
        "advertised_host",
    ),
    "scaling": (
        "max_prefill_replicas",
        "max_decode_replicas",
        "scale_prefill_at",
        "scale_decode_at",
        "scale_up_seconds",
        "scale_down_seconds",
    ),
    "memory": ("kv_sharing", "kv_cache_memory", "block_size", "prefix_caching", "state_checkpoint_blocks"),
    "batching": ("max_batched_tokens", "max_running_requests", "max_waiting_requests"),
    "transfer": ("transport", "local_prefill_threshold", "max_prefill_streams", "min_piece_size"),
    "times": (
        "request_timeout",
        "queue_timeout",
        "token_timeout",
        "transfer_timeout",
        "step_timeout",
        "drain_seconds",
        "revision",
    ),
    "api": (
        "host",
        "port",
        "max_body_size",
        "max_connections",
        "api_key_file",
        "api_key",
        "tls_certificate",
        "tls_key",
        "prefix_cache_per_key",
        "cluster_token_file",
        "cluster_token",
    ),
}

COMMANDS = "commands"
"""The table that is none of settings."""

_TABLE = re.compile(rf"<!-- begin: {re.escape(COMMAND)} (\w+) -->\n.*?<!-- end -->", re.DOTALL)


def document_with_tables(document: str) -> str:
    """The document with every group's table between its markers."""
    return _TABLE.sub(lambda match: f"<!-- begin: {COMMAND} {match[1]} -->\n{table(match[1])}\n<!-- end -->", document)


def groups_in(document: str) -> list[str]:
    """Those that have markers."""
    return _TABLE.findall(document)


def fields_of(group: str) -> tuple[str, ...]:
    """A group's settings; of the last also those that nobody has put into one."""
    named = {name for names in GROUPS.values() for name in names}
    others = [name for name in ClusterConfig.model_fields if name not in named and group == [*GROUPS][-1]]
    return (*GROUPS[group], *others)


def commands_of(command: Any, name: str) -> Iterator[tuple[str, str]]:
    """Every command's name and what it says of itself first."""
    if hasattr(command, "commands"):
        for inner in command.commands.values():
            yield from commands_of(inner, f"{name} {inner.name}")
    else:
        arguments = [p.metavar or p.name.upper() for p in command.params if p.param_type_name == "argument"]
        yield " ".join([name, *arguments]), " ".join(command.help.split("\n\n")[0].split())


def table(group: str) -> str:
    """Markdown, one row per command or setting."""
    if group == COMMANDS:
        rows = ["| command | what it does |", "| --- | --- |"]
        return "\n".join(
            [*rows, *(f"| `{name}` | {text} |" for name, text in commands_of(get_command(app), "crosskv"))]
        )
    rows = ["| flag | default | meaning |", "| --- | --- | --- |"]
    for name in fields_of(group):
        field = ClusterConfig.model_fields[name]
        flag = f"`CROSSKV_{name.upper()}`, no flag" if name in SECRETS else f"`{flag_of(name)}`"
        if isinstance(field.default, bool):
            flag += f", `--no-{flag_of(name).removeprefix('--')}`"
        default = "" if field.is_required() or field.default is None else f"`{_text(field.default)}`"
        rows.append(f"| {flag} | {default} | {field.description} |")
    return "\n".join(rows)


def _text(default: object) -> str:
    if isinstance(default, bool):
        return "on" if default else "off"
    if isinstance(default, Enum):
        return str(default.value)
    if isinstance(default, ByteSize):
        return default.human_readable().replace(".0", "")
    return str(default) if default != "" else '""'


if __name__ == "__main__":
    DOCUMENT.write_text(document_with_tables(DOCUMENT.read_text()))
