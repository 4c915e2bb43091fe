"""A decode engine's view of the prefill side: which replicas it can use, how much each grants, and whom to ask.

Made with the engine. A discovery thread tells it which replicas exist; it connects and shakes hands there, before any
request needs them. The engine's thread asks for credit, opens transfers and reports how they ended.
"""

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, auto

import grpc

from kv_transfer.handshake import HandshakeMismatch
from kv_transfer.layout import CacheLayout
from kv_transfer.manifest import Manifest
from kv_transfer.pair_group import GroupLost, GroupSettings
from kv_transfer.prefill_peer import PrefillPeer
from kv_transfer.staging import StagingBudget
from kv_transfer.transfer import Transfer, TransferEvent
from kv_transfer.wire import kv_transfer_pb2 as wire
from worker.prefill_selector import PrefillCandidate, PrefillSelector
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


@dataclass(slots=True)
class _Link:
    """A connected peer and what is going on with it."""

    peer: PrefillPeer
    streams: int = 0
    outstanding_tokens: int = 0
    backoff: float = 0.0
    usable_from: float = 0.0
    busy_since: float | None = None


@dataclass(frozen=True, slots=True)
class OpenTransfer:
    """A transfer and whom it comes from. By its ``deadline``, in the engine's clock, its stream gives up by itself."""

    incarnation: str
    link: _Link
    tokens: int
    transfer: Transfer
    deadline: float


class PrefillConnector:
    """See the module. With ``group`` payloads travel over process groups, else in the streams."""

    def __init__(
        self,
        layout: CacheLayout,
        incarnation: str,
        selector: PrefillSelector,
        staging: StagingBudget,
        deliver: Callable[[TransferEvent], None],
        transfer_timeout: float,
        group: GroupSettings | None = None,
    ) -> None:
        self._layout = layout
        self._incarnation = incarnation
        self._selector = selector
        self._staging = staging
        self._deliver = deliver
        self._transfer_timeout = transfer_timeout
        self._group = group
        self._lock = threading.Lock()
        self._links: dict[str, _Link] = {}
        self._errors: dict[str, str] = {}
        self._refused: set[str] = set()

    @property
    def peers(self) -> int:
        """Connected prefill replicas."""
        return len(self._links)

    @property
    def last_error(self) -> str:
        """Why a replica that exists cannot be used, if one cannot."""
        return next(iter(self._errors.values()), "")

    def update(self, replicas: Mapping[str, str]) -> None:
        """Follow the directory: ``replicas`` maps incarnation to address. Blocks while it connects to new ones.

        Called from one discovery thread. A replica whose layout does not match is not asked again: only a new
        incarnation can change that.
        """
        with self._lock:
            for gone in self._links.keys() - replicas.keys():
                self._links.pop(gone).peer.close()
            self._refused &= replicas.keys()
            for gone in self._errors.keys() - replicas.keys():
                del self._errors[gone]
            new = replicas.keys() - self._links.keys() - self._refused
        for incarnation in new:
            self._connect(incarnation, replicas[incarnation])

    def credit(self, now: float) -> PrefillCredit:
        """What the prefill side offers at this moment."""
        with self._lock:
            usable = [link for link in self._links.values() if link.usable_from <= now]
            if not self._links:
                return NO_PREFILL
            # A peer that is only busy will be usable in a moment; one that failed must not be waited for.
            waiting = any(link.backoff == 0.0 for link in self._links.values())
            return PrefillCredit(
                reachable=bool(usable) or waiting,
                streams=sum(link.peer.max_streams - link.streams for link in usable),
            )

    def open(self, sequence: Sequence, manifest: Manifest, now: float) -> OpenTransfer | None:
        """Ask a prefill replica for a sequence's KV; None if none can take it after all."""
        tokens = sequence.tokens[:-1]
        timeout = min(self._transfer_timeout, max(0.001, manifest.deadline - now))
        # Held until the call is under way: the discovery thread must not close the peer in between.
        with self._lock:
            candidates = {
                incarnation: link
                for incarnation, link in self._links.items()
                if link.usable_from <= now and link.streams < link.peer.max_streams
            }
            if not candidates:
                return None
            chosen = self._selector.choose(
                [PrefillCandidate(name, link.outstanding_tokens) for name, link in candidates.items()],
                tokens,
                sequence.salt,
            )
            link = candidates[chosen]
            request = wire.PrefillRequest(
                request_id=manifest.request_id,
                epoch=manifest.epoch,
                prefill_incarnation=chosen,
                decode_incarnation=self._incarnation,
                token_ids=tokens,
                lacking=[wire.SlotRange(begin=slots.begin, end=slots.end) for slots in manifest.ranges],
                cache_salt=sequence.salt,
                timeout_ms=int(timeout * 1e3),
            )
            transfer = link.peer.open(request, self._deliver, timeout)
            link.streams += 1
            link.outstanding_tokens += len(tokens)
        return OpenTransfer(chosen, link, len(tokens), transfer, deadline=now + timeout)

    def closed(self, opened: OpenTransfer, outcome: Outcome, now: float) -> None:
        """Account for a transfer that ended.

        A peer that failed is left alone for a growing while; one that had no stream to spare, for a moment, unless it
        has been so for ``BUSY_PATIENCE``: then it counts as failed, and prompts are computed elsewhere.
        """
        link = opened.link
        link.streams -= 1
        link.outstanding_tokens -= opened.tokens
        if outcome is Outcome.BUSY:
            link.busy_since = link.busy_since if link.busy_since is not None else now
            if now - link.busy_since < BUSY_PATIENCE:
                link.usable_from = now + BUSY_BACKOFF
                return
            outcome = Outcome.FAILED
        match outcome:
            case Outcome.FAILED:
                link.backoff = min(LONGEST_BACKOFF, max(FIRST_BACKOFF, link.backoff * 2))
                link.usable_from = now + link.backoff
            case Outcome.COMPLETE:
                link.backoff = 0.0
                link.busy_since = None

    def close(self) -> None:
        """Drop every connection."""
        self.update({})

    def _connect(self, incarnation: str, address: str) -> None:
        peer = PrefillPeer(address, self._layout, self._incarnation, self._staging, self._group)
        try:
            peer.connect()
        except HandshakeMismatch as mismatch:
            log.error("prefill replica %s refused: %s", incarnation, mismatch)
            self._refuse(incarnation, str(mismatch), peer)
            self._refused.add(incarnation)
            return
        except grpc.RpcError as error:
            self._refuse(incarnation, f"{address}: {error.code().name}", peer)
            return
        except GroupLost as error:
            self._refuse(incarnation, f"{address}: {error}", peer)
            return
        if peer.incarnation != incarnation:
            self._refuse(incarnation, f"{address} is {peer.incarnation} by now", peer)
            return
        with self._lock:
            self._links[incarnation] = _Link(peer)
            self._errors.pop(incarnation, None)
        log.info("connected to prefill replica %s at %s", incarnation, address)

    def _refuse(self, incarnation: str, error: str, peer: PrefillPeer) -> None:
        peer.close()
        with self._lock:
            self._errors[incarnation] = error
