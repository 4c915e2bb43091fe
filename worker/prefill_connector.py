"""A decode engine's view of the prefill side: which replicas it can use, how much each grants, and whom to ask.

Made with the engine. A discovery thread tells it which replicas exist; all ranks connect and shake hands there, before
any request needs them. The engine's thread asks for credit, chooses, and reports how transfers ended.
"""

import itertools
import logging
import threading
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from enum import Enum, auto

from worker.prefill_peers import PeerRefused
from worker.prefill_selector import PrefillCandidate, PrefillSelector
from worker.ranks.commands import ConnectPeer
from worker.ranks.team import RankTeam
from worker.scheduler import NO_PREFILL, PrefillCredit
from worker.sequence import Sequence

log = logging.getLogger(__name__)

FIRST_BACKOFF = 0.25
LONGEST_BACKOFF = 15.0
BUSY_BACKOFF = 0.02
BUSY_PATIENCE = 5.0


class Outcome(Enum):
    """How a transfer ended. A cancelled one says nothing about its peer."""

    COMPLETE = auto()
    FAILED = auto()
    BUSY = auto()
    CANCELLED = auto()


@dataclass(frozen=True, slots=True)
class Received:
    """Completed transfers, their KV bytes, and what these would be if every layer owned KV."""

    transfers: int = 0
    payload_bytes: int = 0
    unshared_bytes: int = 0


@dataclass(slots=True)
class _Link:
    """A connected replica and what is going on with it. It has refused everything since ``busy_since``."""

    max_streams: int
    streams: int = 0
    outstanding_tokens: int = 0
    backoff: float = 0.0
    usable_from: float = 0.0
    draining: bool = False
    busy_since: float | None = None
    received: Received = Received()

    def refused(self, now: float) -> None:
        """It had no stream to spare. Refusals that are far apart say nothing of what was in between."""
        if self.busy_since is None or now - self.usable_from > BUSY_PATIENCE:
            self.busy_since = now
        if now - self.busy_since < BUSY_PATIENCE:
            self.usable_from = now + BUSY_BACKOFF
        else:
            self.leave_alone(now)

    def leave_alone(self, now: float) -> None:
        """It is not asked for a while, which grows."""
        self.backoff = min(LONGEST_BACKOFF, max(FIRST_BACKOFF, self.backoff * 2))
        self.usable_from = now + self.backoff


@dataclass(frozen=True, slots=True)
class OpenTransfer:
    """Whom a transfer comes from. By its ``deadline``, in the engine's clock, its streams give up by themselves."""

    incarnation: str
    link: _Link
    tokens: int
    deadline: float


class PrefillConnector:
    """See the module."""

    def __init__(self, team: RankTeam, selector: PrefillSelector, transfer_timeout: float) -> None:
        self._team = team
        self._selector = selector
        self._transfer_timeout = transfer_timeout
        self._lock = threading.Lock()
        self._links: dict[str, _Link] = {}
        self._errors: dict[str, str] = {}
        self._refused: set[str] = set()
        self._attempts = itertools.count(1)

    @property
    def peers(self) -> int:
        """Connected prefill replicas."""
        return len(self._links)

    @property
    def last_error(self) -> str:
        """Why a replica that exists cannot be used, if one cannot."""
        return next(iter(self._errors.values()), "")

    def update(self, replicas: Mapping[str, tuple[str, ...]], draining: AbstractSet[str] = frozenset()) -> None:
        """Follow the directory: ``replicas`` maps incarnation to its ranks' addresses. Blocks while it connects.

        Those of ``draining`` are asked for nothing new; what they have been asked for goes on.
        Called from one discovery thread. A replica whose layout does not match is not asked again: only a new
        incarnation can change that.
        """
        with self._lock:
            gone = [incarnation for incarnation in self._links if incarnation not in replicas]
            for incarnation in gone:
                del self._links[incarnation]
            self._refused &= replicas.keys()
            for incarnation in self._errors.keys() - replicas.keys():
                del self._errors[incarnation]
            for incarnation, link in self._links.items():
                link.draining = incarnation in draining
            known = self._links.keys() | self._refused | draining
            new = [incarnation for incarnation in replicas if incarnation not in known]
        for incarnation in gone:
            self._team.forget(incarnation)
        for incarnation in new:
            self._connect(ConnectPeer(incarnation, replicas[incarnation], next(self._attempts)))

    def credit(self, now: float) -> PrefillCredit:
        """What the prefill side offers at this moment."""
        with self._lock:
            links = [link for link in self._links.values() if not link.draining]
            usable = [link for link in links if link.usable_from <= now]
            if not links:
                return NO_PREFILL
            # A peer that is only busy will be usable in a moment; one that failed must not be waited for.
            waiting = any(link.backoff == 0.0 for link in links)
            return PrefillCredit(
                reachable=bool(usable) or waiting,
                streams=sum(link.max_streams - link.streams for link in usable),
            )

    def open(self, sequence: Sequence, now: float) -> OpenTransfer | None:
        """Choose a prefill replica for a sequence's KV; None if none can take it after all."""
        tokens = sequence.tokens[:-1]
        timeout = min(self._transfer_timeout, max(0.001, sequence.deadline - now))
        with self._lock:
            candidates = {
                incarnation: link
                for incarnation, link in self._links.items()
                if link.usable_from <= now and link.streams < link.max_streams and not link.draining
            }
            if not candidates:
                return None
            chosen = self._selector.choose(
                [PrefillCandidate(name, link.outstanding_tokens) for name, link in candidates.items()],
                tokens,
                sequence.salt,
            )
            link = candidates[chosen]
            link.streams += 1
            link.outstanding_tokens += len(tokens)
        return OpenTransfer(chosen, link, len(tokens), deadline=now + timeout)

    def closed(self, opened: OpenTransfer, outcome: Outcome, now: float) -> None:
        """Account for a transfer that ended.

        A peer that failed is left alone for a growing while; one that had no stream to spare, for a moment, unless it
        has been so for ``BUSY_PATIENCE``: then it is left alone like one that failed, and prompts are computed
        elsewhere.
        """
        link = opened.link
        link.streams -= 1
        link.outstanding_tokens -= opened.tokens
        match outcome:
            case Outcome.BUSY:
                link.refused(now)
            case Outcome.FAILED:
                link.busy_since = None
                link.leave_alone(now)
            case Outcome.COMPLETE:
                link.busy_since = None
                link.backoff = 0.0

    def count(self, incarnation: str, payload_bytes: int, unshared_bytes: int) -> None:
        """Account for what a complete transfer has brought."""
        with self._lock:
            if (link := self._links.get(incarnation)) is not None:
                so_far = link.received
                link.received = Received(
                    so_far.transfers + 1,
                    so_far.payload_bytes + payload_bytes,
                    so_far.unshared_bytes + unshared_bytes,
                )

    def received(self) -> dict[str, Received]:
        """What every connected prefill replica has sent since it was connected."""
        with self._lock:
            return {incarnation: link.received for incarnation, link in self._links.items()}

    def close(self) -> None:
        """Drop every connection."""
        self.update({})

    def _connect(self, command: ConnectPeer) -> None:
        incarnation = command.incarnation
        try:
            max_streams = self._team.connect(command)
        except PeerRefused as refusal:
            if refusal.final:
                log.error("prefill replica %s refused: %s", incarnation, refusal)
                self._refused.add(incarnation)
            self._team.forget(incarnation)
            with self._lock:
                self._errors[incarnation] = str(refusal)
            return
        with self._lock:
            self._links[incarnation] = _Link(max_streams)
            self._errors.pop(incarnation, None)
