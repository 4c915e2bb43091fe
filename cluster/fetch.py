"""Downloading a model with a progress bar, for the commands that a person waits for."""

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from cluster.model_store import SMOLLM2, ModelFiles, fetch_smollm2, resolve_model


def fetch_model(model: str, console: Console) -> ModelFiles:
    """Bring a model and its tokenizer onto this machine, unless they are there already.

    Without a terminal every stage is one line.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        task = bars.add_task(f"{model}: fetching", total=None)
        shown: set[str] = set()

        def report(stage: str, done: int, total: int) -> None:
            bars.update(task, description=f"{model}: {stage}", completed=done, total=total or None)
            if not console.is_terminal and stage not in shown:
                shown.add(stage)
                console.print(f"{model}: {stage}", markup=False, highlight=False)

        if model == SMOLLM2:
            fetch_smollm2(report)
            bars.update(task, description=f"{model}: preparing its tokenizer", total=None)
        return resolve_model(model)
