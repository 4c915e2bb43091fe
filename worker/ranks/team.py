"""All ranks of a replica, as its engine commands them: the leading one here, the others wherever they are.

Made with the engine. What a command does here and what it does elsewhere overlaps; only a step's collectives wait for
each other. A replica that is not split has no followers, and nothing is sent.
"""

import torch

from kv_transfer.prefill_server import TransferName
from worker.incoming_transfers import IncomingTransfers
from worker.outgoing_transfers import OutgoingTransfers
from worker.prefill_peers import PrefillPeers
from worker.ranks.commands import Command, ConnectPeer, ForgetPeer
from worker.ranks.followers import Followers, Totals
from worker.ranks.process_group import RankLost
from worker.ranks.rank import Rank


class RankTeam:
    """See the module. ``peers`` are the leading rank's connections, on a decode replica."""

    def __init__(self, rank: Rank, followers: Followers | None = None, peers: PrefillPeers | None = None) -> None:
        self._rank = rank
        self._followers = followers
        self._peers = peers

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return 1 if self._followers is None else 1 + self._followers.count

    @property
    def incoming(self) -> IncomingTransfers:
        """The leading rank's, on a decode replica."""
        assert self._rank.incoming is not None
        return self._rank.incoming

    @property
    def outgoing(self) -> OutgoingTransfers:
        """The leading rank's, on a prefill replica."""
        assert self._rank.outgoing is not None
        return self._rank.outgoing

    def apply(self, command: Command) -> torch.Tensor | None:
        """Have every rank carry out a command; returns the leading rank's logits, if there are any.

        Raises ``RankLost`` for whatever goes wrong where ranks could have come apart.
        """
        if self._followers is None:
            return self._rank.apply(command)
        self._followers.send(command)
        try:
            return self._rank.apply(command)
        except RankLost:
            raise
        except Exception as error:
            raise RankLost(f"the leading rank failed where others may have gone on: {error}") from error

    def connect(self, command: ConnectPeer) -> int:
        """Connect every rank to a prefill replica; returns how many streams it grants.

        Blocks; called on a discovery thread. Raises ``PeerRefused``.
        """
        assert self._peers is not None, "only a decode replica connects"
        if self._followers is None:
            return self._peers.connect(command)
        with self._followers.connecting(command) as connected:
            return min(self._peers.connect(command), connected())

    def forget(self, incarnation: str) -> None:
        """Have every rank close its connections to a prefill replica. Called on a discovery thread."""
        assert self._peers is not None
        if self._followers is not None:
            self._followers.send(ForgetPeer(incarnation))
        self._peers.forget(incarnation)

    def backlogged(self, limit: int) -> frozenset[TransferName]:
        """Outgoing transfers of which some decode rank has more than ``limit`` bytes to take."""
        here = self.outgoing.backlogged(limit)
        return here if self._followers is None else here | self._followers.totals().backlogged

    def followers_totals(self) -> Totals:
        """What the other ranks counted so far, summed."""
        return Totals() if self._followers is None else self._followers.totals()
