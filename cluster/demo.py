"""``crosskv demo``, what ``make demo`` runs: the whole system on a real model, with and without KV sharing.

A local cluster is started, asked over HTTP, given a layout in which every second layer shares, asked again, and
stopped. What is compared is what each answer's usage reports.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cluster.chat import Conversation
from cluster.client import ApiClient
from cluster.config import ClusterConfig
from cluster.errors import CrosskvError
from cluster.fetch import fetch_model
from cluster.inspect_model import ModelSummary, inspect_model, require_servable
from cluster.ports import free_port
from cluster.progress import Steps
from cluster.running_cluster import running_cluster
from cluster.signals import interruptible

_SHARED = "every:2"
_ANSWER_TOKENS = 80


@dataclass(frozen=True, slots=True)
class LayoutResult:
    """What one layout sent for the question, in bytes, and how long the first token took."""

    kv_sharing: str
    owner_layers: int
    total_layers: int
    prompt_tokens: int
    payload_bytes: int
    lower_bound_bytes: int
    bytes_saved: int
    ttft_ms: float
    answer: str


def run_demo(model: str, question: str, json_file: Path | None, console: Console) -> None:
    """Run the demo; exit with status 1 if the bytes that were sent are not exactly the lower bound."""
    as_declared = _demo_config(model)
    shared = as_declared.replace(kv_sharing=_SHARED)
    fetch_model(model, console)
    with Steps(console) as steps:
        steps("checking the model's configuration")
        summaries = [inspect_model(config) for config in (as_declared, shared)]
        for config, summary in zip((as_declared, shared), summaries, strict=True):
            require_servable(config, summary)
        with interruptible(steps) as step, running_cluster(as_declared, step) as cluster:
            results = [_ask(cluster.base_url, summaries[0], question, console, steps)]
            steps(f"redeploying with --kv-sharing {_SHARED}")
            cluster.redeploy(shared)
            results.append(_ask(cluster.base_url, summaries[1], question, console, steps))
            steps("stopping everything")
    console.print(_comparison(results))
    console.print(
        f"\n{escape(model)} was not trained to share KV between layers, so its text under a forced {_SHARED} means "
        "nothing. The bytes do: a model that was trained that way sends as few."
    )
    if json_file is not None:
        json_file.write_text(json.dumps([asdict(result) for result in results], indent=2, ensure_ascii=False) + "\n")
    for result in results:
        if not 0 < result.payload_bytes == result.lower_bound_bytes:
            console.print(
                f"[red]error: KV sharing {result.kv_sharing}: {result.payload_bytes:,} bytes were sent, "
                f"the lower bound is {result.lower_bound_bytes:,}[/red]"
            )
            raise typer.Exit(1)


def _demo_config(model: str) -> ClusterConfig:
    """Return a small cluster. The prefix cache is off so that both layouts compute and send the whole prompt."""
    config = ClusterConfig.load(model=model, prefix_caching=False, local_prefill_threshold=0)
    defaults: dict[str, object] = {"port": free_port(config.host), "kv_cache_memory": "256MiB"}
    changes = {name: value for name, value in defaults.items() if name not in config.model_fields_set}
    return config.replace(**changes).unguarded()


def _ask(base_url: str, layout: ModelSummary, question: str, console: Console, steps: Steps) -> LayoutResult:
    with ApiClient(base_url) as client:
        steps("warming up")
        name = client.model_name()
        Conversation(client, name, max_tokens=2, temperature=0.0).ask("Hello", Console(quiet=True))
        steps.done()
        console.rule(
            f"KV sharing {layout.kv_sharing}: {layout.owner_layers} of {layout.total_layers} layers own KV",
            align="left",
        )
        console.print(f"[bold cyan]{escape(question)}[/bold cyan]")
        answer = Conversation(client, name, max_tokens=_ANSWER_TOKENS, temperature=0.0).ask(question, console)
    if answer.usage is None or answer.usage.crosskv is None:
        raise CrosskvError(f"{base_url} did not report what it sent (usage.crosskv)")
    sent = answer.usage.crosskv
    return LayoutResult(
        kv_sharing=layout.kv_sharing,
        owner_layers=layout.owner_layers,
        total_layers=layout.total_layers,
        prompt_tokens=answer.usage.prompt_tokens,
        payload_bytes=sent.payload_bytes,
        lower_bound_bytes=sent.lower_bound_bytes,
        bytes_saved=sent.unshared_bytes - sent.payload_bytes,
        ttft_ms=1e3 * answer.time_to_first_token,
        answer=answer.text,
    )


def _comparison(results: Sequence[LayoutResult]) -> Table:
    table = Table(
        title="What the prefill replica sent to the decode replica for one question",
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    table.add_column("sharing", no_wrap=True)
    for title in ("KV layers", "prompt", "KV bytes sent", "lower bound", "bytes saved", "time to\nfirst\ntoken"):
        table.add_column(title, justify="right")
    for result in results:
        table.add_row(
            result.kv_sharing,
            f"{result.owner_layers} of {result.total_layers}",
            str(result.prompt_tokens),
            f"{result.payload_bytes:,}",
            f"{result.lower_bound_bytes:,}",
            f"{result.bytes_saved:,}",
            f"{result.ttft_ms:.0f} ms",
        )
    return table
