"""The command line as a function, for tests of commands."""

import sys
from collections.abc import Callable

import pytest

from cluster.cli import main
from cluster.config import ClusterConfig

Outcome = tuple[int, str, str]
"""Exit code, output, errors."""
Run = Callable[..., Outcome]


def command_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """A function that runs ``crosskv`` with its arguments in this process, without settings from the environment."""
    for name in ClusterConfig.model_fields:
        monkeypatch.delenv(f"CROSSKV_{name.upper()}", raising=False)
    monkeypatch.delenv("CROSSKV_DEBUG", raising=False)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: str) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["crosskv", *arguments])
        code = 0
        try:
            main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def refused(outcome: Outcome) -> str:
    """Check that a command ended as it should for a user's mistake: in one line, without a traceback."""
    code, out, err = outcome
    assert code == 2
    assert out == ""
    assert "Traceback" not in err
    error = err.splitlines()[-1]
    assert error.startswith("error: ")
    return error
