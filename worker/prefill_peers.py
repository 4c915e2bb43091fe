"""One decode rank's connections to prefill replicas: to each rank of theirs from which it gets anything.

Made with a decode rank. Connections are opened when a replica is discovered, before any request needs them, on whatever
thread discovers; transfers are opened on the engine's thread.
"""

import logging
import threading
from collections.abc import Callable

import grpc

from kv_transfer.cluster_token import ClusterToken
from kv_transfer.handshake import HandshakeMismatch
from kv_transfer.layout import CacheLayout
from kv_transfer.pair_group import GroupLost, GroupSettings
from kv_transfer.prefill_peer import PrefillPeer
from kv_transfer.rank_pair import RankPair, check_ranks, peers_of_receiver
from kv_transfer.staging import StagingBudget
from kv_transfer.transfer import Transfer, TransferEvent
from kv_transfer.wire import kv_transfer_pb2 as wire
from worker.ranks.commands import ConnectPeer, OpenIncoming

log = logging.getLogger(__name__)


class PeerRefused(Exception):
    """A prefill replica cannot be used. If it is ``final``, only another life of it or of ours can change that."""

    def __init__(self, message: str, *, final: bool) -> None:
        super().__init__(message)
        self.final = final


class PrefillPeers:
    """See the module; rank ``rank`` of ``ranks``. With ``group`` payloads travel over process groups.

    ``make_peer`` makes the connection to one rank; it takes what ``PrefillPeer`` does.
    """

    def __init__(
        self,
        layout: CacheLayout,
        incarnation: str,
        staging: StagingBudget,
        deliver: Callable[[TransferEvent], None],
        *,
        rank: int = 0,
        ranks: int = 1,
        group: GroupSettings | None = None,
        make_peer: Callable[..., PrefillPeer] = PrefillPeer,
        token: ClusterToken | None = None,
    ) -> None:
        self._layout = layout
        self._incarnation = incarnation
        self._staging = staging
        self._deliver = deliver
        self._rank = rank
        self._ranks = ranks
        self._group = group
        self._make_peer = make_peer
        self._token = token
        self._lock = threading.Lock()
        self._peers: dict[str, tuple[PrefillPeer, ...]] = {}

    def connect(self, command: ConnectPeer) -> int:
        """Connect to a replica's ranks and return how many streams it grants. Blocks; raises ``PeerRefused``."""
        senders = len(command.addresses)
        problem = check_ranks(self._layout, senders)
        if problem is not None:
            raise PeerRefused(f"{command.incarnation}: {problem}", final=True)
        peers: list[PrefillPeer] = []
        try:
            for sender in peers_of_receiver(self._layout, self._rank, self._ranks, senders):
                pair = RankPair(sender, senders, self._rank, self._ranks)
                address = command.addresses[sender]
                peers.append(
                    self._make_peer(
                        address, self._layout, self._incarnation, self._staging, self._group, pair, self._token
                    )
                )
                _shake_hands(peers[-1], command.incarnation)
        except PeerRefused:
            for peer in peers:
                peer.close()
            raise
        with self._lock:
            earlier = self._peers.pop(command.incarnation, ())
            self._peers[command.incarnation] = tuple(peers)
        for peer in earlier:
            peer.close()
        log.info("connected to prefill replica %s at %s", command.incarnation, ", ".join(p.address for p in peers))
        return min(peer.max_streams for peer in peers)

    def forget(self, incarnation: str) -> None:
        """Close the connections to a replica, if there are any; running transfers end with an error."""
        with self._lock:
            gone = self._peers.pop(incarnation, ())
        for peer in gone:
            peer.close()

    def open(self, command: OpenIncoming) -> tuple[tuple[PrefillPeer, Transfer], ...]:
        """Start a transfer from every rank of a replica that has something for this one; none if it is not there."""
        started = []
        # Held until the calls are under way: the discovery thread must not close the peers in between.
        with self._lock:
            peers = self._peers.get(command.incarnation, ())
            if any(peer.silent for peer in peers):
                return ()
            for peer in peers:
                request = wire.PrefillRequest(
                    request_id=command.request_id,
                    epoch=command.epoch,
                    prefill_incarnation=command.incarnation,
                    decode_incarnation=self._incarnation,
                    timeout_ms=int(command.seconds * 1e3),
                )
                if (peer.pair.sender, peer.pair.receiver) == (0, 0):
                    request.token_ids.extend(command.token_ids)
                    request.cache_salt = command.cache_salt
                    request.caller = command.caller
                    request.priority = command.priority
                    request.lacking.extend(wire.SlotRange(begin=s.begin, end=s.end) for s in command.lacking)
                started.append((peer, peer.open(request, self._deliver, command.seconds)))
        return tuple(started)

    def close(self) -> None:
        """Drop every connection."""
        for incarnation in list(self._peers):
            self.forget(incarnation)


def _shake_hands(peer: PrefillPeer, incarnation: str) -> None:
    try:
        peer.connect()
    except HandshakeMismatch as mismatch:
        raise PeerRefused(str(mismatch), final=True) from mismatch
    except grpc.RpcError as error:
        raise PeerRefused(f"{peer.address}: {error.code().name}", final=False) from error
    except GroupLost as error:
        raise PeerRefused(f"{peer.address}: {error}", final=False) from error
    if peer.incarnation != incarnation:
        raise PeerRefused(f"{peer.address} is {peer.incarnation} by now", final=False)
