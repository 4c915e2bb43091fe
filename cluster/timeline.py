"""One HTTP request's phases: what the journal keeps, ``crosskv trace`` draws and spans are made of.

A ``PromptTimeline`` is kept while a prompt is served, in its front end's clock; it knows no text and no token. Replicas
report offsets in their own clocks. No two clocks are compared: a report is laid out so that it ends when its first
token comes here. What the request's way to the replica and the token's way back took then counts as queue.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from worker.wire.engine_pb2 import Phases, PromptInfo


class PhaseName(StrEnum):
    """What a request was doing."""

    QUEUE = "queue"
    """Waiting: for a decode replica and in its queue, or at a prefill replica."""
    RETRY = "retry"
    """A transfer that failed or a computation that was preempted, and the wait for the next."""
    TRANSFER = "transfer"
    """From asking the prefill replica until all of the KV was there; that prompt is computed meanwhile."""
    PREFILL = "prefill"
    """Computing the prompt, on either side."""
    DECODE = "decode"
    """Generating, the last prompt token's step included, until the last choice's last token."""
    RESUMPTION = "resumption"
    """From a replica's loss until another goes on with the answer; its phases up to there lie within."""


class RequestStatus(StrEnum):
    """How a request ended, if it has."""

    RUNNING = "running"
    FINISHED = "finished"
    ABORTED = "aborted"
    """Its client left."""
    REFUSED = "refused"
    """It was wrong, or there was no room for it: a status from 400 to 498."""
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Phase:
    """Times are milliseconds since the request arrived, ``prompt`` is the number of one of a batch.

    A transfer has a ``source``, which is the prefill replica, and ``payload_bytes``.
    """

    name: PhaseName
    begin_ms: float
    end_ms: float
    replica: str
    prompt: int = 0
    source: str = ""
    payload_bytes: int = 0


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One HTTP request. ``began`` is Unix time in seconds; bytes and attempts are those of the response's usage.

    Replicas are joined by commas where there are several. ``http_status`` is 0 while it is running.
    """

    request_id: str
    front_end: str
    began: float
    duration_ms: float
    route: str
    model: str
    status: RequestStatus
    http_status: int
    prompt_tokens: int
    cached_tokens: int
    prefill_cached_tokens: int
    completion_tokens: int
    choices: int
    decode_replica: str
    prefill_replica: str
    attempts: int
    resumptions: int
    payload_bytes: int
    unshared_bytes: int
    retransmitted_bytes: int
    first_token_ms: float | None
    phases: tuple[Phase, ...]


@dataclass(frozen=True, slots=True)
class _Report:
    """What a replica said with a first token that came ``at`` this time. Copies, so that no token is kept."""

    at: float
    phases: Phases
    payload_bytes: int
    source: str


@dataclass(slots=True)
class _Placement:
    replica: str
    at: float
    reports: list[_Report] = field(default_factory=list)


class PromptTimeline:
    """See the module. Made when replicas are first asked for a prompt of a request that arrived when it ``began``.

    ``clock`` gives seconds.
    """

    def __init__(self, began: float, prompt: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        self._began = began
        self._prompt = prompt
        self._clock = clock
        self._asked = clock()
        self._placements: list[_Placement] = []
        self._ended: float | None = None

    @property
    def replicas(self) -> Sequence[str]:
        """Decode replicas that have had it."""
        return [placement.replica for placement in self._placements]

    @property
    def first_token(self) -> float | None:
        """When it came, in the clock."""
        return next((report.at for placement in self._placements for report in placement.reports), None)

    def placed(self, replica: str) -> None:
        """A decode replica is asked; if it is not the first, because the one before has not finished."""
        self._placements.append(_Placement(replica, self._clock()))

    def reported(self, info: PromptInfo) -> None:
        """The first token of the whole prompt, or of a choice that is resumed, has come."""
        phases = Phases()
        phases.CopyFrom(info.phases)
        report = _Report(self._clock(), phases, info.transfer.payload_bytes, info.transfer.prefill_replica)
        self._placements[-1].reports.append(report)

    def ended(self) -> None:
        """No choice is open any more; what is said first counts."""
        if self._ended is None:
            self._ended = self._clock()

    def phases(self, now: float) -> list[Phase]:
        """Every phase so far; those that are open end ``now``."""
        end = now if self._ended is None else self._ended
        if not self._placements:
            return [self._phase(PhaseName.QUEUE, self._asked, end, "")]
        phases: list[Phase] = []
        begun = False
        ends = [*(placement.at for placement in self._placements[1:]), end]
        for index, (placement, until) in enumerate(zip(self._placements, ends, strict=True)):
            begin = placement.at if index else self._asked
            if begun:
                again = placement.reports[-1].at if placement.reports else until
                phases.append(self._phase(PhaseName.RESUMPTION, begin, again, placement.replica))
            begun = begun or bool(placement.reports)
            phases += self._of(placement, begin, until)
        return phases

    def _of(self, placement: _Placement, begin: float, until: float) -> Iterator[Phase]:
        if not placement.reports:
            yield self._phase(PhaseName.QUEUE, begin, until, placement.replica)
            return
        decoding = until
        for report in placement.reports:
            told = report.phases
            origin = report.at - told.first_token_ms / 1e3
            queued, started = origin + told.queue_ms / 1e3, origin + told.start_ms / 1e3
            yield self._phase(PhaseName.QUEUE, begin, queued, placement.replica)
            if started > queued:
                yield self._phase(PhaseName.RETRY, queued, started, placement.replica)
            if told.transfer_ms:
                ready = started + told.transfer_ms / 1e3
                yield self._phase(
                    PhaseName.TRANSFER, started, ready, placement.replica, report.source, report.payload_bytes
                )
                yield from self._elsewhere(report, started)
            else:
                ready = report.at
                yield self._phase(PhaseName.PREFILL, started, started + told.prefill_ms / 1e3, placement.replica)
            decoding = min(decoding, ready)
        yield self._phase(PhaseName.DECODE, decoding, until, placement.replica)

    def _elsewhere(self, report: _Report, started: float) -> Iterator[Phase]:
        """What the prefill replica did during a transfer."""
        told = report.phases
        begun = started + told.prefill_queue_ms / 1e3
        yield self._phase(PhaseName.QUEUE, started, begun, report.source)
        yield self._phase(PhaseName.PREFILL, begun, begun + told.prefill_ms / 1e3, report.source)

    def _phase(
        self, name: PhaseName, begin: float, end: float, replica: str, source: str = "", payload_bytes: int = 0
    ) -> Phase:
        """From times in the clock. Rounding may have let it end before it begins."""
        begin_ms = (begin - self._began) * 1e3
        end_ms = max(begin_ms, (end - self._began) * 1e3)
        return Phase(name, begin_ms, end_ms, replica, self._prompt, source, payload_bytes)
