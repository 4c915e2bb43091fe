"""The ``crosskv bench`` commands: flags in, a benchmark run, a table out and files beside it."""

import asyncio
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from cluster.config import ClusterConfig
from cluster.errors import CrosskvError
from cluster.options import with_cluster_options

bench = typer.Typer(help="Measure a cluster.", no_args_is_help=True, rich_markup_mode=None)


def _whole_numbers(text: str, flag: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise CrosskvError(f"{flag} {text!r}: must be whole numbers separated by commas, such as 64,512") from None


def _command_line() -> str:
    return shlex.join(["crosskv", *sys.argv[1:]])


@bench.command("transfer")
@with_cluster_options(without=("mode", "kv_sharing", "prefix_caching", "local_prefill_threshold"))
def transfer(
    config: ClusterConfig,
    sharing: Annotated[
        str, typer.Option(help="Layouts to compare: none, every:N, after:N, model, or JSON files.")
    ] = "none,every:2",
    prompt_tokens: Annotated[str, typer.Option(help="Prompt lengths.")] = "64,512",
    requests: Annotated[int, typer.Option(help="Requests per layout and length.")] = 16,
    concurrency: Annotated[int, typer.Option(help="Requests at a time.")] = 4,
    output_tokens: Annotated[int, typer.Option(help="Tokens to generate per request.")] = 16,
    seed: Annotated[int, typer.Option(help="Prompts are the same for the same seed.")] = 0,
    output: Annotated[Path, typer.Option(help="Directory for report.json, report.md and plots.")] = Path(
        "bench-results/transfer"
    ),
) -> None:
    """Compare what KV layouts send for the same prompts, byte by byte, and how long it takes."""
    from cluster.application import running_cluster  # noqa: PLC0415
    from cluster.bench.report import Environment, TransferReport  # noqa: PLC0415
    from cluster.bench.transfer import TransferPlan, run_transfer_bench  # noqa: PLC0415
    from cluster.inspect_model import inspect_model, require_servable  # noqa: PLC0415
    from cluster.ports import free_port, require_free_port  # noqa: PLC0415
    from cluster.progress import Steps  # noqa: PLC0415
    from cluster.signals import interruptible  # noqa: PLC0415

    plan = TransferPlan(
        sharing=tuple(part.strip() for part in sharing.split(",")),
        prompt_tokens=_whole_numbers(prompt_tokens, "--prompt-tokens"),
        requests=requests,
        concurrency=concurrency,
        output_tokens=output_tokens,
        seed=seed,
    )
    if "port" in config.model_fields_set:
        require_free_port(config.host, config.port)
    else:
        config = config.replace(port=free_port(config.host))
    output.mkdir(parents=True, exist_ok=True)
    console = Console()
    with Steps(console) as steps:
        steps("checking every layout against the model")
        for rule in plan.sharing:
            layout = config.replace(kv_sharing=rule)
            summary = inspect_model(layout)
            longest = max(plan.prompt_tokens) + plan.output_tokens
            require_servable(layout, summary, longest_request=longest)
        with interruptible(steps) as step:
            runs = run_transfer_bench(config, plan, summary.vocab_size, running_cluster, step)
    report = TransferReport(Environment.here(_command_line(), config.model), tuple(runs))
    files = report.write(output)
    console.print(report.table())
    console.print(f"[dim]{', '.join(str(path) for path in files)}[/dim]")
    for error in report.errors:
        console.print(f"[red]error: {error}[/red]")
    if report.errors:
        raise typer.Exit(1)


@bench.command("serve")
def serve(
    base_url: Annotated[str, typer.Option(help="Any OpenAI-compatible server, without /v1.")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="Default: the first that the server offers.")] = None,
    num_prompts: Annotated[int, typer.Option(min=1, help="Requests to send.")] = 100,
    input_len: Annotated[int, typer.Option(min=1, help="Tokens per prompt.")] = 256,
    output_len: Annotated[int, typer.Option(min=1, help="Tokens to generate per request.")] = 64,
    concurrency: Annotated[int | None, typer.Option(min=1, help="Closed loop: requests at a time.")] = None,
    request_rate: Annotated[float | None, typer.Option(min=1e-3, help="Poisson: requests per second.")] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(help="Send this file's lines as prompts, instead of random token ids.")
    ] = None,
    vocabulary: Annotated[int, typer.Option(min=2, help="Random token ids are below this.")] = 32000,
    ignore_eos: Annotated[bool, typer.Option(help="Ask for the full output length (an extension of the API).")] = True,
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="Bearer token.")] = None,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds without an answer.")] = 600.0,
    seed: Annotated[int, typer.Option(help="Prompts and arrivals are the same for the same seed.")] = 0,
    output: Annotated[Path | None, typer.Option(help="Write the figures to this JSON file.")] = None,
) -> None:
    """Put load on a running server: closed loop (--concurrency) or Poisson arrivals (--request-rate)."""
    from cluster.bench.load import ClosedLoop, LoadRequest, PoissonArrivals, Prompt, Target  # noqa: PLC0415
    from cluster.bench.prompts import prompts_from_file, random_prompts  # noqa: PLC0415
    from cluster.bench.report import Environment  # noqa: PLC0415
    from cluster.bench.serve import ServeReport, run_serve_bench  # noqa: PLC0415
    from cluster.client import ApiClient  # noqa: PLC0415

    if concurrency is not None and request_rate is not None:
        raise typer.BadParameter("--concurrency and --request-rate exclude each other")
    arrivals = ClosedLoop(concurrency or 8) if request_rate is None else PoissonArrivals(request_rate, seed)
    # One more for warming up.
    prompts: tuple[Prompt, ...] = (
        random_prompts([input_len], num_prompts + 1, vocabulary, seed)[input_len]
        if prompt_file is None
        else prompts_from_file(prompt_file, num_prompts + 1)
    )
    with ApiClient(base_url, api_key) as client:
        model = model or client.model_name()
    target = Target(base_url, model, api_key, timeout, {"ignore_eos": True} if ignore_eos else {})
    console = Console()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("requests", total=num_prompts)
        summary = asyncio.run(
            run_serve_bench(
                target,
                arrivals,
                [LoadRequest(prompt, output_len) for prompt in prompts],
                lambda record: progress.advance(task),
            )
        )
    report = ServeReport(Environment.here(_command_line(), model), base_url, arrivals, summary)
    console.print(report.table())
    if output is not None:
        report.write(output)
        console.print(f"[dim]{output}[/dim]")
    if summary.errors:
        raise typer.Exit(1)
