"""One decode rank's connections to real servers that stand for the ranks of prefill replicas."""

import queue
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

from kv_transfer.layout import CacheLayout, Lifetime, OwnerLayer, Section, SlotRange
from kv_transfer.prefill_peer import PrefillPeer, TransferEnded, TransferEvent
from kv_transfer.prefill_server import PrefillJob, PrefillServer, RankStream, TransferName
from kv_transfer.staging import StagingBudget
from worker.prefill_peers import PeerRefused, PrefillPeers
from worker.ranks.commands import ConnectPeer, OpenIncoming

SECONDS = 20.0
NOBODY = "127.0.0.1:1"


def layout(*heads: int) -> CacheLayout:
    """A layer per entry, of so many heads of four bytes."""
    owners = tuple(OwnerLayer(f"layers.{index}", count, 4 * count, 0) for index, count in enumerate(heads))
    return CacheLayout("model", "float32", (Section(Lifetime.EVERY_TOKEN, 0, 0, owners),), "digest", 0)


FOUR_HEADS = layout(4, 4)

Call = tuple[int, PrefillJob | RankStream]
"""By which rank it was taken."""


class Replicas:
    """Prefill replicas, and what reaches them."""

    def __init__(self) -> None:
        self._servers: list[PrefillServer] = []
        self.calls: queue.Queue[Call] = queue.Queue()

    def rank(
        self,
        rank: int = 0,
        ranks: int = 1,
        *,
        layout: CacheLayout = FOUR_HEADS,
        incarnation: str = "prefill-1",
        streams: int = 4,
    ) -> str:
        """Start a server; returns its address."""
        server = PrefillServer(
            layout,
            incarnation,
            streams,
            lambda call: self.calls.put((rank, call)),
            host="127.0.0.1",
            rank=rank,
            ranks=ranks,
        )
        server.start()
        self._servers.append(server)
        return f"127.0.0.1:{server.port}"

    def taken(self, count: int) -> list[Call]:
        """The next calls, by rank."""
        return sorted((self.calls.get(timeout=SECONDS) for _ in range(count)), key=lambda call: call[0])

    def stop(self) -> None:
        for server in self._servers:
            server.stop(0.0)


@pytest.fixture
def replicas() -> Iterator[Replicas]:
    replicas = Replicas()
    yield replicas
    replicas.stop()


class Decode:
    """One decode rank."""

    def __init__(self, rank: int = 0, ranks: int = 1, layout: CacheLayout = FOUR_HEADS) -> None:
        self.events: queue.Queue[TransferEvent] = queue.Queue()
        self.peers = PrefillPeers(layout, "decode-1", StagingBudget(1 << 20), self.events.put, rank=rank, ranks=ranks)

    def connect(self, *addresses: str, incarnation: str = "prefill-1") -> int:
        return self.peers.connect(ConnectPeer(incarnation, addresses))

    def ask(self, incarnation: str = "prefill-1") -> list[int]:
        """Open a transfer; returns from which ranks."""
        command = OpenIncoming(
            "request", 7, incarnation, (SlotRange(2, 9),), (), 15.0, token_ids=tuple(range(9)), cache_salt="salt"
        )
        opened = self.peers.open(command)
        for peer, transfer in opened:
            assert (transfer.request_id, transfer.epoch, transfer.sender) == ("request", 7, peer.pair.sender)
        return [peer.pair.sender for peer, _ in opened]


@pytest.fixture
def connected() -> Iterator[list[Decode]]:
    """Decode ranks that are closed at the end."""
    made: list[Decode] = []
    yield made
    for decode in made:
        decode.peers.close()


def test_a_rank_connects_to_those_that_have_its_heads_and_to_no_other(
    replicas: Replicas, connected: list[Decode]
) -> None:
    third, fourth = replicas.rank(2, 4, streams=5), replicas.rank(3, 4, streams=3)
    decode = Decode(rank=1, ranks=2)
    connected.append(decode)
    assert decode.connect(NOBODY, NOBODY, third, fourth) == 3, "the fewest streams of any"
    assert decode.ask() == [2, 3]
    for rank, call in replicas.taken(2):
        assert isinstance(call, RankStream), f"rank {rank} got a prompt"
        assert (call.name, call.receiver) == (TransferName("decode-1", "request", 7), 1)


def test_a_latent_comes_from_every_rank_and_the_prompt_goes_to_the_first(
    replicas: Replicas, connected: list[Decode]
) -> None:
    latent = layout(1)
    decodes = [Decode(rank, 2, latent) for rank in range(2)]
    connected += decodes
    addresses = [replicas.rank(rank, 2, layout=latent) for rank in range(2)]
    for decode in decodes:
        decode.connect(*addresses)
        assert decode.ask() == [0, 1]
    calls = replicas.taken(4)
    jobs = [(rank, call) for rank, call in calls if isinstance(call, PrefillJob)]
    ((rank, job),) = jobs
    assert rank == 0
    assert (job.name, job.receivers) == (TransferName("decode-1", "request", 7), 2)
    assert (job.token_ids, job.lacking, job.cache_salt) == (tuple(range(9)), (SlotRange(2, 9),), "salt")
    assert job.timeout == 15.0
    streams = [(rank, call.receiver) for rank, call in calls if isinstance(call, RankStream)]
    assert sorted(streams) == [(0, 1), (1, 0), (1, 1)]


def test_a_replica_is_usable_only_if_all_of_its_ranks_are(replicas: Replicas, connected: list[Decode]) -> None:
    good = replicas.rank(0, 2)
    decode = Decode()
    connected.append(decode)
    for bad, reason, final in (
        (replicas.rank(1, 2, layout=replace(FOUR_HEADS, kv_dtype="float16")), "--dtype", True),
        (replicas.rank(0, 2), "is rank 0 of 2, the directory says 1 of 2", True),
        (replicas.rank(1, 2, incarnation="prefill-2"), "is prefill-2 by now", False),
    ):
        with pytest.raises(PeerRefused, match=reason) as refusal:
            decode.connect(good, bad)
        assert refusal.value.final is final
        assert decode.ask() == []
    assert decode.connect(good, replicas.rank(1, 2)) == 4
    assert decode.ask() == [0, 1]


def test_a_number_of_ranks_that_cannot_be_is_refused_without_a_call(connected: list[Decode]) -> None:
    decode = Decode()
    connected.append(decode)
    with pytest.raises(PeerRefused, match=r"prefill-1: layers.0 has 4 KV heads, which 3 ranks") as refusal:
        decode.connect(NOBODY, NOBODY, NOBODY)
    assert refusal.value.final


def test_forgetting_ends_the_transfers_of_all_ranks_and_of_no_other_replica(
    replicas: Replicas, connected: list[Decode]
) -> None:
    decode = Decode()
    connected.append(decode)
    decode.connect(replicas.rank(0, 2), replicas.rank(1, 2))
    decode.connect(replicas.rank(incarnation="prefill-2"), incarnation="prefill-2")
    decode.ask()
    decode.peers.forget("prefill-1")
    decode.peers.forget("prefill-1")
    ended = [decode.events.get(timeout=SECONDS) for _ in range(2)]
    assert all(isinstance(event, TransferEnded) and event.end is None for event in ended)
    assert {event.sender for event in ended} == {0, 1}
    assert decode.ask() == []
    assert decode.ask("prefill-2") == [0]


def test_a_replica_that_is_forgotten_while_it_is_asked_costs_only_that_transfer(
    replicas: Replicas, connected: list[Decode], monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = Decode()
    connected.append(decode)
    decode.connect(replicas.rank(0, 2), replicas.rank(1, 2))
    vanished = threading.Thread(target=decode.peers.forget, args=["prefill-1"])
    original = PrefillPeer.open

    def opened(peer: PrefillPeer, *arguments: object) -> object:
        if vanished.ident is None:
            vanished.start()
            vanished.join(0.2)
        return original(peer, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(PrefillPeer, "open", opened)
    assert decode.ask() == [0, 1]  # on the engine's thread, where an exception would end the replica
    vanished.join(SECONDS)
    ended = [decode.events.get(timeout=SECONDS) for _ in range(2)]
    assert all(isinstance(event, TransferEnded) and event.end is None for event in ended)
