"""``crosskv serve``: one cluster in the foreground, from its start to the signal that ends it."""

import time

from rich.console import Console
from rich.markup import escape

from cluster.application import running_cluster
from cluster.config import ClusterConfig
from cluster.fetch import fetch_model
from cluster.inspect_model import inspect_model, require_servable
from cluster.ports import require_free_port
from cluster.progress import Steps
from cluster.signals import interruptible


def serve_until_stopped(config: ClusterConfig, console: Console) -> None:
    """Check everything that can be checked, start the cluster, and stop it again on SIGINT or SIGTERM."""
    if config.ray_address is None:
        require_free_port(config.host, config.port)
    fetch_model(config.model, console)
    with Steps(console) as steps:
        steps("checking the model's configuration")
        require_servable(config, inspect_model(config))
        with interruptible(steps) as step, running_cluster(config, step) as cluster:
            steps.done()
            summary = cluster.summary
            console.print(
                f"\n[bold]{escape(summary.model)}[/bold] answers at [bold]{cluster.base_url}/v1[/bold]"
                f" ({config.mode.value}, {summary.owner_layers} of {summary.total_layers} layers own KV,"
                f" {summary.dtype},"
                f" {summary.num_blocks:,} blocks per replica)\n"
                f"  crosskv chat --base-url {cluster.base_url}\n"
                f"  crosskv status --base-url {cluster.base_url}\n"
                "Ctrl-C stops it.\n"
            )
            try:
                while True:
                    time.sleep(2)
                    cluster.require_alive()
            except KeyboardInterrupt:
                steps("stopping")
