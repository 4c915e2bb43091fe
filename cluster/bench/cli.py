"""The ``crosskv bench`` commands: flags in, a benchmark run, a table out and files beside it."""

import asyncio
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from cluster.config import ClusterConfig
from cluster.errors import CrosskvError
from cluster.options import with_cluster_options
from kv_transfer.transport import Transport

if TYPE_CHECKING:
    from cluster.bench.transfer import Deployment, Ranks
    from cluster.inspect_model import ModelSummary

bench = typer.Typer(help="Measure a cluster.", no_args_is_help=True, rich_markup_mode=None)


def _whole_numbers(text: str, flag: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise CrosskvError(f"{flag} {text!r}: must be whole numbers separated by commas, such as 64,512") from None


def _transports(text: str) -> tuple[Transport, ...]:
    try:
        return tuple(Transport(part.strip()) for part in text.split(","))
    except ValueError:
        names = " and ".join(Transport)
        raise CrosskvError(f"--transports {text!r}: must be of {names}, separated by commas") from None


def _ranks(text: str) -> "tuple[Ranks, ...]":
    from cluster.bench.transfer import Ranks  # noqa: PLC0415

    try:
        pairs = [part.split(":") for part in text.split(",")]
        return tuple(Ranks(int(prefill), int(decode)) for prefill, decode in pairs)
    except ValueError:
        raise CrosskvError(
            f"--ranks {text!r}: must be prefill:decode sizes separated by commas, such as 1:1,2:1"
        ) from None


def _require_servable(deployments: "Sequence[Deployment]", longest_request: int) -> "ModelSummary":
    """Check the model under every sharing rule and over all ranks, and return one summary of it."""
    from cluster.inspect_model import inspect_model, require_servable  # noqa: PLC0415

    for deployment in {(each.sharing, each.ranks): each for each in deployments}.values():
        try:
            summary = inspect_model(deployment.config)
            require_servable(deployment.config, summary, longest_request)
        except (CrosskvError, ValueError) as error:
            # Rooms below raise subclasses of ValueError, and name flags that this command sets by itself.
            raise CrosskvError(f"--sharing {deployment.sharing} --ranks {deployment.ranks}: {error}") from error
    return summary


def _command_line() -> str:
    return shlex.join(["crosskv", *sys.argv[1:]])


@bench.command("transfer")
@with_cluster_options(without=("mode", "kv_sharing", "prefix_caching", "local_prefill_threshold"))
def transfer(
    config: ClusterConfig,
    sharing: Annotated[
        str, typer.Option(help="KV layouts to compare: none, every:N, after:N, model, or JSON files.")
    ] = "none,every:2",
    transports: Annotated[
        str | None, typer.Option(help="Transports to compare: grpc, torch. Default: that of --transport.")
    ] = None,
    ranks: Annotated[
        str | None,
        typer.Option(
            help="Tensor-parallel sizes to compare, prefill:decode, as in 1:1,2:1. Default: that of "
            "--prefill-tensor-parallel-size and --tensor-parallel-size."
        ),
    ] = None,
    prompt_tokens: Annotated[str, typer.Option(help="Prompt lengths, sent to every deployment.")] = "64,512",
    requests: Annotated[
        int, typer.Option(help="Requests per deployment and length. 1 is enough for bytes, not for times.")
    ] = 16,
    concurrency: Annotated[int, typer.Option(help="Requests at a time.")] = 4,
    output_tokens: Annotated[int, typer.Option(help="Tokens to generate per request.")] = 16,
    seed: Annotated[int, typer.Option(help="Prompts are the same for the same seed.")] = 0,
    output: Annotated[Path, typer.Option(help="Directory for report.json, report.md and plots.")] = Path(
        "bench-results/transfer"
    ),
) -> None:
    """Compare what a model's deployments send for the same prompts, byte by byte, and how long it takes.

    Every combination of --sharing, --transports and --ranks is deployed in turn and gets all prompts. A deployment
    takes some 15 seconds to start, more if the model is large; the rest is the time of its prompt tokens. A CPU core
    reads about 200 of them a second for SmolLM2, so that the defaults take 3 minutes on two free cores. --requests 1
    is enough to compare bytes, which depend on a prompt's length alone.
    """
    from cluster.bench.report import Environment, TransferReport  # noqa: PLC0415
    from cluster.bench.transfer import Ranks, TransferPlan, run_transfer_bench  # noqa: PLC0415
    from cluster.ports import free_port, require_free_port  # noqa: PLC0415
    from cluster.progress import Steps  # noqa: PLC0415
    from cluster.running_cluster import running_cluster  # noqa: PLC0415
    from cluster.signals import interruptible  # noqa: PLC0415

    plan = TransferPlan(
        sharing=tuple(part.strip() for part in sharing.split(",")),
        transports=(config.transport,) if transports is None else _transports(transports),
        ranks=(Ranks.of(config),) if ranks is None else _ranks(ranks),
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
    deployments = plan.deployments(config)
    output.mkdir(parents=True, exist_ok=True)
    console = Console()
    with Steps(console) as steps:
        steps("checking every deployment against the model")
        summary = _require_servable(deployments, max(plan.prompt_tokens) + plan.output_tokens)
        steps.done()
        console.print(plan.extent())
        with interruptible(steps) as step:
            runs = run_transfer_bench(plan, deployments, summary.vocab_size, running_cluster, step)
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
    api_key: Annotated[
        str | None, typer.Option(envvar=["CROSSKV_API_KEY", "OPENAI_API_KEY"], help="The server's API key.")
    ] = None,
    ca: Annotated[Path | None, typer.Option(help="PEM file of whom to trust. Default: the system's.")] = None,
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
    with ApiClient(base_url, api_key, ca=ca) as client:
        model = model or client.model_name()
    target = Target(base_url, model, api_key, timeout, {"ignore_eos": True} if ignore_eos else {}, ca)
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
