"""The table of faults, which grows with every test and is printed at the end."""

import os
from collections.abc import Iterator

import pytest

from tests.faults.cell import EVERY_CELL, RESULTS, SOME_CELLS, Outcomes

CELLS = EVERY_CELL if os.environ.get("CROSSKV_EVERY_FAULT") == "1" else SOME_CELLS


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "cell" in metafunc.fixturenames:
        metafunc.parametrize("cell", CELLS, ids=str)


@pytest.fixture(scope="session")
def outcomes(pytestconfig: pytest.Config) -> Iterator[Outcomes]:
    """Every test adds its own."""
    found = Outcomes()
    yield found
    reporter = pytestconfig.pluginmanager.get_plugin("terminalreporter")
    reporter.write_line("")
    reporter.write_line(f"{RESULTS}\n{found}")
