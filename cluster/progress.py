"""Long steps as a person sees them: one line per finished step with its time, a spinner for the one that runs.

A command opens ``Steps`` around its work and hands it down as a plain callable; whoever starts a step names it.
"""

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.markup import escape
from rich.status import Status


class Steps:
    """Call it with the name of each step as it begins; the step ends with the next call, or with ``done``.

    Without a terminal every step is a line when it begins, so that a log shows where a run stands.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._spinner: Status | None = None
        self._step: str | None = None
        self._began = 0.0

    def __call__(self, step: str) -> None:
        """Begin a step."""
        if step == self._step:
            return
        self.done()
        self._step, self._began = step, time.monotonic()
        if self._console.is_terminal:
            self._spinner = self._console.status(escape(step))
            self._spinner.start()
        else:
            self._console.print(escape(step))

    def done(self) -> None:
        """End the step that runs, if any, so that a command may print."""
        self._end("[green]✓[/green]")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end("[green]✓[/green]" if kind is None else "[red]✗[/red]")

    def _end(self, mark: str) -> None:
        if self._spinner is not None and self._step is not None:
            self._spinner.stop()
            self._spinner = None
            self._console.print(f"{mark} {escape(self._step)} [dim]{time.monotonic() - self._began:.1f} s[/dim]")
        self._step = None
