"""What a replica's engine has all ranks do, and what it makes of the leading one's mistakes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
import torch

from kv_transfer.prefill_server import TransferName
from worker.prefill_peers import PeerRefused
from worker.ranks.commands import ClearBlocks, Command, ConnectPeer, ForgetPeer
from worker.ranks.followers import Totals
from worker.ranks.process_group import RankLost
from worker.ranks.team import RankTeam

COMMAND = ClearBlocks(())
PEER = ConnectPeer("prefill-1", ("10.0.0.1:1",))
SLOW, SLOWER = TransferName("decode-1", "a", 1), TransferName("decode-1", "b", 1)


@dataclass
class Script:
    """A leading rank with its connections and its followers, all one; notes what is done in which order."""

    error: Exception | None = None
    here: int = 4
    elsewhere: int = 4
    refused_here: PeerRefused | None = None
    done: list[tuple[str, object]] = field(default_factory=list)
    count: int = 2

    # The leading rank

    @property
    def outgoing(self) -> "Script":
        return self

    def apply(self, command: Command) -> torch.Tensor | None:
        self.done.append(("apply", command))
        if self.error is not None:
            raise self.error
        return torch.ones(1)

    def backlogged(self, limit: int) -> frozenset[TransferName]:
        return frozenset({SLOW}) if limit < 10 else frozenset()

    # Its connections

    def connect(self, command: ConnectPeer) -> int:
        self.done.append(("connect", command))
        if self.refused_here is not None:
            raise self.refused_here
        return self.here

    def forget(self, incarnation: str) -> None:
        self.done.append(("forget", incarnation))

    # Its followers

    def send(self, command: Command) -> None:
        self.done.append(("send", command))

    @contextmanager
    def connecting(self, command: ConnectPeer) -> Iterator[Callable[[], int]]:
        def connected() -> int:
            self.done.append(("connected", command))
            return self.elsewhere

        self.done.append(("begin to connect", command))
        yield connected

    def totals(self) -> Totals:
        return Totals(sent_bytes=7, backlogged=frozenset({SLOWER}))


def led(script: Script) -> RankTeam:
    return RankTeam(script, script, script)  # type: ignore[arg-type]


def alone(script: Script) -> RankTeam:
    return RankTeam(script, None, script)  # type: ignore[arg-type]


def test_others_are_told_before_the_leading_rank_begins() -> None:
    script = Script()
    assert led(script).apply(COMMAND) is not None
    assert script.done == [("send", COMMAND), ("apply", COMMAND)]


def test_where_nobody_follows_nothing_is_sent() -> None:
    script = Script()
    team = alone(script)
    assert team.apply(COMMAND) is not None
    assert team.connect(PEER) == 4
    team.forget("prefill-1")
    assert script.done == [("apply", COMMAND), ("connect", PEER), ("forget", "prefill-1")]
    assert (team.size, team.followers_totals(), team.backlogged(0)) == (1, Totals(), frozenset({SLOW}))


def test_a_step_that_fails_on_the_leading_rank_alone_is_the_end_of_a_replica_of_several() -> None:
    """Others may have computed it: their pages are not what the leader believes any more."""
    error = ValueError("out of memory")
    with pytest.raises(RankLost, match="out of memory") as lost:
        led(Script(error)).apply(COMMAND)
    assert lost.value.__cause__ is error
    with pytest.raises(ValueError, match="out of memory"):
        alone(Script(error)).apply(COMMAND)
    gone = RankLost("rank 1 hangs")
    with pytest.raises(RankLost) as lost:
        led(Script(gone)).apply(COMMAND)
    assert lost.value is gone


@pytest.mark.parametrize(("here", "elsewhere"), [(3, 5), (5, 3)])
def test_all_connect_at_once_and_the_fewest_streams_count(here: int, elsewhere: int) -> None:
    script = Script(here=here, elsewhere=elsewhere)
    assert led(script).connect(PEER) == 3
    assert [what for what, _ in script.done] == ["begin to connect", "connect", "connected"]


def test_a_replica_that_the_leading_rank_refuses_is_refused() -> None:
    script = Script(refused_here=PeerRefused("another --dtype", final=True))
    with pytest.raises(PeerRefused, match="another --dtype"):
        led(script).connect(PEER)


def test_all_forget_a_replica() -> None:
    script = Script()
    led(script).forget("prefill-1")
    assert script.done == [("send", ForgetPeer("prefill-1")), ("forget", "prefill-1")]


def test_counts_and_backlogs_are_everybodys() -> None:
    team = led(Script())
    assert (team.size, team.followers_totals().sent_bytes) == (3, 7)
    assert team.backlogged(0) == {SLOW, SLOWER}
    assert team.backlogged(10) == {SLOWER}
