"""The command line: ``crosskv``, also ``python -m cluster.cli``.

Each command builds what it needs, runs it, and prints; the work lies in other modules, which are imported when a
command runs, so that ``--help`` needs none of them. An expected error ends a command with one red line and exit code 2.
"""

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from cluster.bench.cli import bench
from cluster.config import ClusterConfig
from cluster.errors import CrosskvError
from cluster.options import with_cluster_options

app = typer.Typer(
    name="crosskv",
    help="LLM serving with disaggregated prefill and cross-layer KV sharing.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    # Plain help wraps; rich tables cut flag names off at 80 columns.
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(bench, name="bench")

BaseUrl = Annotated[str, typer.Option("--base-url", help="Where the server answers, without /v1.")]
ApiKey = Annotated[
    str | None,
    typer.Option(
        "--api-key",
        envvar=["CROSSKV_API_KEY", "OPENAI_API_KEY"],
        help="The server's API key. A variable is safer: others can read command lines.",
    ),
]
Ca = Annotated[Path | None, typer.Option("--ca", help="PEM file of whom to trust with https. Default: the system's.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_LOCAL_SERVER = "http://127.0.0.1:8000"


@app.command()
def fetch(
    model: Annotated[str, typer.Argument(help="smollm2, or a Hugging Face hub id.")] = "smollm2",
    tokenizer: Annotated[bool, typer.Option("--tokenizer", help="Print where its tokenizer lies instead.")] = False,
) -> None:
    """Download a model, verify it, and print where it lies."""
    from cluster.fetch import fetch_model  # noqa: PLC0415

    files = fetch_model(model, Console(stderr=True))
    print(files.tokenizer if tokenizer else files.weights)


@app.command()
@with_cluster_options()
def serve(
    config: ClusterConfig,
    model_argument: Annotated[str | None, typer.Argument(metavar="MODEL", help="The same as --model.")] = None,
) -> None:
    """Start a cluster and serve until interrupted."""
    from cluster.model_store import require_model_name  # noqa: PLC0415
    from cluster.ports import require_free_port  # noqa: PLC0415

    # Before the imports of the rest, which take seconds.
    require_model_name(config.model)
    if config.ray_address is None:
        require_free_port(config.host, config.port)
    from cluster.serve import serve_until_stopped  # noqa: PLC0415

    serve_until_stopped(config, Console(stderr=True))


@app.command()
def chat(
    question: Annotated[str | None, typer.Argument(help="Ask this one question. Default: a conversation.")] = None,
    base_url: BaseUrl = _LOCAL_SERVER,
    api_key: ApiKey = None,
    ca: Ca = None,
    model: Annotated[str | None, typer.Option(help="Default: the first that the server offers.")] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 512,
    temperature: Annotated[float | None, typer.Option(min=0.0, help="Default: the server's own.")] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same answer.")] = None,
) -> None:
    """Talk to a running server; answers appear as they are generated."""
    from cluster.chat import Conversation, converse  # noqa: PLC0415
    from cluster.client import ApiClient  # noqa: PLC0415

    with ApiClient(base_url, api_key, ca=ca) as client:
        conversation = Conversation(
            client,
            model or client.model_name(),
            system=system,
            max_tokens=max_tokens,
            temperature=temperature,
            seed=seed,
        )
        console = Console()
        if question is None:
            converse(conversation, console)
        else:
            conversation.ask(question, console)


@app.command()
def status(
    base_url: BaseUrl = _LOCAL_SERVER,
    api_key: ApiKey = None,
    ca: Ca = None,
    watch: Annotated[bool, typer.Option("--watch", help="Refresh every second.")] = False,
    as_json: Json = False,
) -> None:
    """Show a running cluster's replicas, queues, blocks and transferred bytes."""
    from cluster.client import ApiClient  # noqa: PLC0415
    from cluster.status import status_json, status_tables, watch_status  # noqa: PLC0415

    if watch and as_json:
        raise typer.BadParameter("--watch and --json exclude each other")
    with ApiClient(base_url, api_key, ca=ca) as client:
        if watch:
            watch_status(client.status, base_url, Console())
        elif as_json:
            print(status_json(client.status()))
        else:
            Console().print(status_tables(client.status(), base_url))


@app.command()
def trace(
    request_id: Annotated[
        str | None,
        typer.Argument(help="The answer's id, which is also its header X-Request-Id. Default: the last that arrived."),
    ] = None,
    base_url: BaseUrl = _LOCAL_SERVER,
    api_key: ApiKey = None,
    ca: Ca = None,
    as_json: Json = False,
) -> None:
    """Show when one request waited, was computed, sent and generated, and where. Servers remember the last ones."""
    from cluster.client import ApiClient  # noqa: PLC0415
    from cluster.trace import trace_json, trace_view  # noqa: PLC0415

    with ApiClient(base_url, api_key, ca=ca) as client:
        record = client.last_request() if request_id is None else client.request(request_id)
    if as_json:
        print(trace_json(record))
    else:
        Console().print(trace_view(record))


@app.command()
def inspect(
    model: Annotated[
        str, typer.Argument(help="A directory with config.json, a config.json, a .gguf file, smollm2, or a hub id.")
    ],
    kv_sharing: Annotated[str, typer.Option(help="model, none, every:N, after:N, or a JSON file.")] = "model",
    memory: Annotated[str, typer.Option(help="KV memory, such as 40GiB.")] = "1GiB",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    block_size: Annotated[int, typer.Option(help="Tokens per KV block.")] = 16,
    request_tokens: Annotated[
        int | None, typer.Option(min=1, help="Count requests of this length. Default: the longest that is served.")
    ] = None,
    tensor_parallel_size: Annotated[
        int | None, typer.Option(help="Ranks of a replica. Memory and bytes are then one rank's. Default: 1.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show which layers own KV, how much fits, what a prefill replica does. Needs no weights, only config.json."""
    # The same checks as for a cluster, and the same messages.
    config = ClusterConfig.load(
        model=model,
        kv_sharing=kv_sharing,
        dtype=dtype,
        block_size=block_size,
        tensor_parallel_size=tensor_parallel_size,
    )
    try:
        kv_cache_memory = ClusterConfig.load(model=model, kv_cache_memory=memory).kv_cache_memory
    except CrosskvError as error:
        raise CrosskvError(str(error).replace("--kv-cache-memory", "--memory")) from None
    from cluster.inspect_model import inspect_model  # noqa: PLC0415
    from cluster.inspect_prefill import inspect_prefill  # noqa: PLC0415

    config = config.replace(kv_cache_memory=kv_cache_memory)
    summary = inspect_model(config, sharing_name=kv_sharing, request_tokens=request_tokens)
    prefill = inspect_prefill(config, summary.request_tokens)
    if as_json:
        print(json.dumps(asdict(summary) | asdict(prefill), indent=2))
    else:
        Console().print(summary.render(), prefill.render())


@app.command()
def models() -> None:
    """List the architectures that can be served."""
    from worker.models.registry import ARCHITECTURES  # noqa: PLC0415

    for name in sorted(ARCHITECTURES):
        print(name)


@app.command()
def demo(
    model: Annotated[str, typer.Option(help="The model to ask.")] = "smollm2",
    question: Annotated[
        str, typer.Option(help="What to ask it.")
    ] = "What is the capital of France, and why is it famous?",
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the comparison to this file.")] = None,
) -> None:
    """Start a cluster, ask a question with and without KV sharing, compare the bytes, and stop everything again."""
    from cluster.demo import run_demo  # noqa: PLC0415

    run_demo(model, question, json_file, Console())


@app.command("drain-node")
def drain_node(
    node_ip_address: Annotated[str, typer.Option(help="The node, by its address in the Ray cluster.")],
    seconds: Annotated[float, typer.Option(min=1, help="When the node will end.")] = 100.0,
    ray_address: Annotated[
        str | None,
        typer.Option(envvar="RAY_ADDRESS", help="host:port of the Ray cluster. Default: the one on this machine."),
    ] = None,
) -> None:
    """Wait until replicas on a Ray node have finished what they have and ended, their successors started elsewhere."""
    import asyncio  # noqa: PLC0415

    from cluster.node_drain import drain_node, ray_cluster  # noqa: PLC0415

    asyncio.run(drain_node(ray_cluster(ray_address), node_ip_address, seconds))


def main() -> None:
    """Run the command line."""
    errors = Console(stderr=True)
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(130)
    except (CrosskvError, ValueError, OSError) as error:
        # Rooms below raise subclasses of ValueError for what a user can mend.
        if os.environ.get("CROSSKV_DEBUG") == "1":
            raise
        message = " ".join(str(error).split()) or type(error).__name__
        errors.print(f"[bold red]error:[/bold red] [red]{escape(message)}[/red]", soft_wrap=True, highlight=False)
        sys.exit(2)


if __name__ == "__main__":
    main()
