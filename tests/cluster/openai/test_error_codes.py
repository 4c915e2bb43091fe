"""docs/errors.md explains every code and reason that there is, and none that there is not."""

import re
from pathlib import Path

from cluster.openai.error_code import ErrorCode
from cluster.openai.errors import ApiError
from worker.failure import Failure, TransferFailure

GUIDE = (Path(__file__).parents[3] / "docs" / "errors.md").read_text()


def tables() -> list[list[list[str]]]:
    """Cells of every table's rows, without its head."""
    found = []
    for table in re.findall(r"(?:^\|.*\|\n)+", GUIDE, re.M):
        rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
        found.append(rows[2:])
    return found


def test_codes() -> None:
    codes, _, _ = tables()
    assert {(code.strip("`"), int(status)) for code, status, _, _ in codes} == {(c.text, c.status) for c in ErrorCode}
    assert [int(status) for _, status, _, _ in codes] == sorted(code.status for code in ErrorCode)
    assert all(what and action for _, _, what, action in codes)


def test_reasons() -> None:
    _, failures, transfers = tables()
    assert [row[0].strip("`") for row in failures] == list(Failure)
    assert [row[0].strip("`") for row in transfers] == list(TransferFailure)
    codes = {code.text for code in ErrorCode}
    for reason, _, _, seen in failures:
        assert seen.startswith("nothing") or set(re.findall(r"`(\w+)`", seen)) <= codes, reason


def test_every_code_has_a_body_of_its_own() -> None:
    bodies = {ApiError(code, "why").body() for code in ErrorCode}
    assert len(bodies) == len(ErrorCode)
    assert all(b'"type":null' not in body for body in bodies)
