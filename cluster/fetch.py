"""Downloading a model with a progress bar, for the commands that a person waits for."""

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from cluster.model_store import SMOLLM2, ModelFiles, fetch_smollm2, resolve_model


def fetch_model(model: str, console: Console) -> ModelFiles:
    """Bring a model and its tokenizer onto this machine, unless they are there already."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True) as bars:
        if model == SMOLLM2:
            task = bars.add_task(model, total=None)

            def report(stage: str, done: int, total: int) -> None:
                bars.update(task, description=f"{model}: {stage}", completed=done, total=total or None)

            fetch_smollm2(report)
            bars.update(task, description=f"{model}: preparing its tokenizer", total=None)
        else:
            bars.add_task(f"{model}: fetching", total=None)
        return resolve_model(model)
