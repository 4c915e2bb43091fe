"""What one front end has served lately: every running request, and the last that ended. Never a word of any text.

Made with the front end's application, on its event loop, for its whole life. Each HTTP request that generates begins an
entry and ends it; other front ends have journals of their own, and a request's id says in whose it is.
"""

import re
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from itertools import islice

from cluster.openai.error_code import DISCONNECTED
from cluster.openai.usage import Usage
from cluster.timeline import PromptTimeline, RequestRecord, RequestStatus

KEPT = 512
"""Requests that have ended and are remembered."""
KEPT_REFUSED = 64
"""The same of refused ones, apart, so that a flood of them drives out nothing else."""
_REQUEST_ID = re.compile(r"[a-z]{1,16}-([0-9a-f]{12})[0-9a-f]{20}")


@dataclass(frozen=True, slots=True)
class TraceContext:
    """The W3C headers with which a client names the span that its request is part of; empty if it does not."""

    traceparent: str = ""
    tracestate: str = ""


NO_CONTEXT = TraceContext()


def trace_context(headers: Mapping[str, str]) -> TraceContext:
    """What a request says."""
    return TraceContext(headers.get("traceparent", ""), headers.get("tracestate", ""))


def forget(record: RequestRecord, context: TraceContext) -> None:
    """Nobody else is told."""


class Entry:
    """One request until its end. ``request_id`` is what its response carries."""

    def __init__(self, journal: "Journal", request_id: str, route: str, context: TraceContext) -> None:
        self.request_id = request_id
        self._journal = journal
        self._route = route
        self._context = context
        self._began_unix = time.time()
        self._began = journal.clock()
        self._usage = Usage(0)
        self._choices = 0
        self._prompts: list[PromptTimeline] = []

    @property
    def began(self) -> float:
        """When it arrived, by the journal's clock, seconds."""
        return self._began

    def generating(self, usage: Usage, choices: int) -> None:
        """The request is valid and wants so many choices; ``usage`` counts along."""
        self._usage, self._choices = usage, choices

    def new_prompt(self, prompt: int) -> PromptTimeline:
        """Replicas are about to be asked for one of its prompts."""
        timeline = PromptTimeline(self._began, prompt, self._journal.clock)
        self._prompts.append(timeline)
        return timeline

    def ended(self, http_status: int) -> None:
        """Whatever its response was, or would have been."""
        for timeline in self._prompts:
            timeline.ended()
        self._journal.keep(self.record(http_status), self._context)

    def record(self, http_status: int = 0) -> RequestRecord:
        """The request as it is now."""
        now, moved = self._journal.clock(), self._usage.moved
        first_tokens = [at for timeline in self._prompts if (at := timeline.first_token) is not None]
        return RequestRecord(
            request_id=self.request_id,
            front_end=self._journal.front_end,
            began=self._began_unix,
            duration_ms=(now - self._began) * 1e3,
            route=self._route,
            model=self._journal.model,
            status=_status_of(http_status),
            http_status=http_status,
            prompt_tokens=self._usage.prompt_tokens,
            cached_tokens=self._usage.cached_tokens,
            prefill_cached_tokens=moved.prefill_cached_tokens,
            completion_tokens=self._usage.completion_tokens,
            choices=self._choices,
            decode_replica=",".join(dict.fromkeys(name for prompt in self._prompts for name in prompt.replicas)),
            prefill_replica=moved.prefill_replica,
            attempts=moved.attempts,
            resumptions=moved.resumptions,
            payload_bytes=moved.payload_bytes,
            unshared_bytes=moved.unshared_bytes,
            retransmitted_bytes=moved.retransmitted_bytes,
            first_token_ms=(min(first_tokens) - self._began) * 1e3 if first_tokens else None,
            phases=tuple(phase for prompt in self._prompts for phase in prompt.phases(now)),
        )


def new_front_end() -> str:
    """A name that no front end had before."""
    return f"front-end-{secrets.token_hex(6)}"


class Journal:
    """See the module; of the front end of this name, which serves ``model``. ``ended`` is told of each that ends.

    ``clock`` gives seconds.
    """

    def __init__(
        self,
        model: str,
        front_end: str,
        *,
        kept: int = KEPT,
        kept_refused: int = KEPT_REFUSED,
        clock: Callable[[], float] = time.monotonic,
        ended: Callable[[RequestRecord, TraceContext], None] = forget,
    ) -> None:
        self._tell = ended
        self.model = model
        self.clock = clock
        self.front_end = front_end
        self._running: dict[str, Entry] = {}
        self._ended: OrderedDict[str, RequestRecord] = OrderedDict()
        self._refused: OrderedDict[str, RequestRecord] = OrderedDict()
        self.kept = kept
        self.kept_refused = kept_refused

    def begin(self, route: str, prefix: str, context: TraceContext = NO_CONTEXT) -> Entry:
        """A request has arrived; its id begins with ``prefix``, a dash, and the front end's number."""
        request_id = f"{prefix}-{self.front_end.rpartition('-')[2]}{secrets.token_hex(10)}"
        entry = self._running[request_id] = Entry(self, request_id, route, context)
        return entry

    def keep(self, record: RequestRecord, context: TraceContext) -> None:
        """A request has ended."""
        del self._running[record.request_id]
        refused = record.status is RequestStatus.REFUSED
        ring, size = (self._refused, self.kept_refused) if refused else (self._ended, self.kept)
        ring[record.request_id] = record
        while len(ring) > size:
            ring.popitem(last=False)
        self._tell(record, context)

    def latest(self, limit: int) -> list[RequestRecord]:
        """Up to so many requests, the last that arrived first."""
        running = (entry.record() for entry in islice(reversed(self._running.values()), limit))
        known = (*running, *self._ended.values(), *self._refused.values())
        return sorted(known, key=lambda record: record.began, reverse=True)[:limit]

    def find(self, request_id: str) -> RequestRecord | None:
        """A request that runs or is still remembered."""
        if request_id in self._running:
            return self._running[request_id].record()
        return self._ended.get(request_id) or self._refused.get(request_id)

    def front_end_of(self, request_id: str) -> str | None:
        """In which front end's journal a request would be; None for what was never a request's id."""
        match = _REQUEST_ID.fullmatch(request_id)
        return None if match is None else f"front-end-{match[1]}"


def _status_of(http_status: int) -> RequestStatus:
    if http_status == 0:
        return RequestStatus.RUNNING
    if http_status == DISCONNECTED:
        return RequestStatus.ABORTED
    if http_status < HTTPStatus.BAD_REQUEST:
        return RequestStatus.FINISHED
    return RequestStatus.REFUSED if http_status < HTTPStatus.INTERNAL_SERVER_ERROR else RequestStatus.FAILED
