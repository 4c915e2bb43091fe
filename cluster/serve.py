"""``crosskv serve``: one cluster in the foreground, from its start to the signal that ends it."""

import os
import signal
import threading
import time
from contextlib import suppress

from rich.console import Console
from rich.markup import escape

from cluster.config import ClusterConfig
from cluster.fetch import fetch_model
from cluster.openai.api_keys import ApiKeys
from cluster.ports import is_loopback
from cluster.progress import Steps
from cluster.running_cluster import running_cluster
from cluster.signals import interruptible
from kv_transfer.cluster_token import token_here


def serve_until_stopped(config: ClusterConfig, console: Console) -> None:
    """Check everything that can be checked, start the cluster, and stop it again on SIGINT or SIGTERM.

    To be told so while it starts is no failure either.
    """
    if config.ray_address is None:
        _require_usable_files(config)
    fetch_model(config.model, console)
    with (
        Steps(console) as steps,
        suppress(KeyboardInterrupt),
        interruptible(steps) as step,
        running_cluster(config, step) as cluster,
    ):
        steps.done()
        summary = cluster.summary
        limit = min(config.max_model_len or summary.longest_context, summary.longest_request)
        name = config.served_model_name or summary.model
        console.print(
            f"\n[bold]{escape(name)}[/bold] answers at [bold]{cluster.base_url}/v1[/bold]"
            f" ({_replicas(config)}, {summary.owner_layers} of {summary.total_layers} layers own KV,"
            f" {summary.dtype}, up to {limit:,} tokens per request)\n"
            f"  crosskv chat --base-url {cluster.base_url}\n"
            f"  crosskv status --base-url {cluster.base_url}\n"
            f"Ctrl-C stops it; kill -USR1 {os.getpid()} restarts every replica, one after the other.\n"
        )
        if not (config.has_api_keys or is_loopback(config.host)):
            console.print(
                f"[yellow]Everybody who reaches {escape(config.host)} may use it: see --api-key-file.[/yellow]\n"
            )
        restart = threading.Event()
        signal.signal(signal.SIGUSR1, lambda *_: restart.set())
        try:
            while True:
                time.sleep(2)
                cluster.require_alive()
                if restart.is_set():
                    restart.clear()
                    steps("restarting every replica, one after the other")
                    cluster.roll(config)
                    steps.done()
        except KeyboardInterrupt:
            steps("stopping")


def _require_usable_files(config: ClusterConfig) -> None:
    """Read what front ends and replicas will read, if all are on this machine: they could not say what is wrong."""
    ApiKeys((), config.api_key_file)
    token_here(None, config.cluster_token_file)
    if config.tls is not None:
        config.tls.server_context()


def _replicas(config: ClusterConfig) -> str:
    """How many there are of which role, and over how many ranks each is split."""
    parts = []
    for role, count in config.replicas.items():
        ranks, most = config.ranks_of(role), config.most_replicas[role]
        number = str(count) if most == count else f"{count} to {most}"
        parts.append(f"{number} {role.value}" + (f" of {ranks} ranks" if ranks > 1 else ""))
    transport = f", KV over {config.transport.value}" if len(parts) > 1 else ""
    return " + ".join(parts) + transport
