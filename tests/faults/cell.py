"""What a fault is: which process, by which signal, in which state of a request; and what came of it."""

import signal
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from kv_transfer.transport import Transport

RESULTS = Path(__file__).resolve().parents[2] / "bench-results" / "faults.md"


class Target(StrEnum):
    """Whose process."""

    PREFILL = "prefill"
    DECODE = "decode"
    PREFILL_RANK = "one of two prefill ranks"
    DECODE_RANK = "one of two decode ranks"
    FRONT_END = "front end"

    @property
    def ranks(self) -> int:
        """How many a replica must have for this."""
        return 2 if self in (Target.PREFILL_RANK, Target.DECODE_RANK) else 1


class State(StrEnum):
    """How far the request is."""

    QUEUED = "queued"
    PREFILL = "mid-prefill"
    TRANSFER = "mid-transfer"
    COMMITTED = "just after commit"
    DECODE = "mid-decode"


@dataclass(frozen=True, slots=True)
class Cell:
    """One entry of the table."""

    transport: Transport
    target: Target
    number: signal.Signals
    state: State

    @property
    def deployment(self) -> tuple[Transport, int]:
        """Cells that have this in common share a cluster."""
        return self.transport, self.target.ranks

    @property
    def stays(self) -> bool:
        """Whether a process that is stopped is left so, for its supervisor to find; others go on after the test."""
        return self.state is State.DECODE and self.target is not Target.FRONT_END

    def __str__(self) -> str:
        return f"{self.transport}-{self.target}-{self.number.name}-{self.state}".replace(" ", "_")


@dataclass(frozen=True, slots=True)
class Outcome:
    """After ``noticed`` seconds somebody had turned away from the process; ``wait`` is the client's longest since."""

    cell: Cell
    result: str
    noticed: float | None
    wait: float | None
    lost: int


EVERY_CELL = sorted(
    (
        Cell(transport, target, number, state)
        for transport in Transport
        for target in Target
        for number in (signal.SIGKILL, signal.SIGSTOP)
        for state in State
    ),
    key=lambda cell: cell.deployment,
)
SOME_CELLS = [
    Cell(Transport.GRPC, Target.DECODE, signal.SIGSTOP, State.DECODE),
    Cell(Transport.GRPC, Target.DECODE, signal.SIGSTOP, State.QUEUED),
    Cell(Transport.GRPC, Target.PREFILL, signal.SIGSTOP, State.TRANSFER),
    Cell(Transport.GRPC, Target.FRONT_END, signal.SIGKILL, State.COMMITTED),
    Cell(Transport.GRPC, Target.PREFILL, signal.SIGKILL, State.PREFILL),
]
"""Every kind of notice, once; another test kills a decode replica."""


class Outcomes:
    """What has come of the faults so far: a table, in Markdown, which is also written to ``RESULTS``.

    It begins with what is there, so that several runs can make one table; who is run again gets another row.
    """

    def __init__(self) -> None:
        written = RESULTS.read_text().splitlines() if RESULTS.exists() else []
        self._rows = {head: line for cell in EVERY_CELL for line in written if line.startswith(head := _head(cell))}

    def add(self, outcome: Outcome) -> None:
        noticed = "–" if outcome.noticed is None else f"{outcome.noticed:.2f} s"
        wait = "–" if outcome.wait is None else f"{outcome.wait:.2f} s"
        head = _head(outcome.cell)
        self._rows[head] = f"{head} {outcome.result} | {noticed} | {wait} | {outcome.lost} |"
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(str(self))

    def __str__(self) -> str:
        table = [
            "| fault | state | transport | outcome | noticed after | longest wait | requests lost |",
            "| --- | --- | --- | --- | ---: | ---: | ---: |",
        ]
        table += [self._rows[head] for cell in EVERY_CELL if (head := _head(cell)) in self._rows]
        return "\n".join(table) + "\n"


def _head(cell: Cell) -> str:
    """How its row begins."""
    return f"| {cell.number.name} {cell.target} | {cell.state} | {cell.transport} |"
