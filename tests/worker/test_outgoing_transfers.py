"""What prefill ranks put on whose streams, whenever these attach, and what they keep no longer than they must."""

import time
import weakref
from collections.abc import Callable
from collections.abc import Sequence as Sequences
from itertools import pairwise

import grpc
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.pages import IntArray
from kv_transfer.layout import Piece, SlotRange
from kv_transfer.plan import lacking, lower_bound
from kv_transfer.prefill_server import RankStream, TransferName
from kv_transfer.rank_pair import RankPair, pair_layout, replica_lower_bound
from tests.worker.kept_stream import KeptStream
from tests.worker.kv_cache.plans import StatedLayer, full, owners, state, window
from tests.worker.scripted_runner import ScriptedRunner
from worker.config import EngineConfig, Role
from worker.kv_cache.specs import FullAttentionSpec, LastState
from worker.outgoing_transfers import OutgoingTransfers
from worker.ranks.commands import CloseOutgoing, OpenOutgoing, SendComputed, SequenceRows, Summary

NAME = TransferName("decode-1", "request", 7)
TOKENS = list(range(10, 22))
SUMMARY = Summary(cached_tokens=3, queue_seconds=0.5, compute_seconds=1.5)
BLOCK = 4


def heads(count: int, width: int = 1) -> FullAttentionSpec:
    """``count`` heads of ``4 * width`` bytes of a token."""
    return FullAttentionSpec(BLOCK, count, width, torch.bfloat16)


def mixed_layers() -> list[StatedLayer]:
    """Four heads, one head, and beside these what slides and what is a state."""
    return owners(heads(4), heads(1), window(BLOCK, 5), window(BLOCK, 3, sinks=2), state(2))


class Sender:
    """One prefill rank, whose engine and pages are the test's."""

    def __init__(
        self,
        layers: Sequences[StatedLayer] | None = None,
        *,
        rank: int = 0,
        ranks: int = 1,
        min_piece_bytes: int = 1 << 20,
        max_piece_bytes: int = 1 << 20,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        config = EngineConfig(model="", role=Role.PREFILL, block_size=BLOCK)
        self.runner = ScriptedRunner(config, 256, layers=layers or owners(heads(2)))
        self.outgoing = OutgoingTransfers(
            self.runner,  # type: ignore[arg-type]
            rank,
            ranks,
            min_piece_bytes=min_piece_bytes,
            max_piece_bytes=max_piece_bytes,
            clock=clock,
        )
        self._rank, self._ranks = rank, ranks
        self._blocks = 0
        self._tables: dict[TransferName, tuple[IntArray, ...]] = {}

    def attach(self, stream: KeptStream, name: TransferName = NAME, receiver: int = 0) -> KeptStream:
        self.outgoing.attach(RankStream(name, receiver, stream))
        return stream

    def open(
        self,
        name: TransferName = NAME,
        *,
        receivers: int = 1,
        tokens: Sequences[int] = TOKENS,
        held: int = 0,
        seconds: float = 60.0,
    ) -> tuple[SlotRange, ...]:
        """Of a prompt of one token more than ``tokens``; returns what its receivers lack."""
        layout = self.runner.layout
        wanted = lacking(layout, len(tokens) + 1, [held] * len(layout.sections))
        self.outgoing.open(OpenOutgoing(name, receivers, len(tokens) + 1, wanted, seconds))
        return wanted

    def tables(self, name: TransferName) -> tuple[IntArray, ...]:
        """Blocks for any prompt of a test, and a state that is written where it is read."""
        if name not in self._tables:
            tables = []
            for group in self.runner._plan.groups:
                is_state = isinstance(group.retention, LastState)
                tables.append(np.array([self._blocks] * 2) if is_state else np.arange(self._blocks, self._blocks + 10))
                self._blocks += 10
            self._tables[name] = tuple(tables)
        return self._tables[name]

    def compute(
        self, begin: int, end: int, *names: TransferName | None, tokens: Sequences[int] = TOKENS
    ) -> list[SequenceRows]:
        """A step of the same tokens for every name."""
        rows = [SequenceRows(np.array(tokens[begin:end]), begin, 0, self.tables(name or NAME), name) for name in names]
        self.runner.execute(rows, self.outgoing.while_computing(rows))
        return rows

    def send(self, computed: int, name: TransferName = NAME, summary: Summary | None = None) -> None:
        self.outgoing.send(SendComputed(name, computed, self.tables(name), summary))

    def send_all(self, name: TransferName = NAME) -> None:
        """The whole prompt in one step."""
        self.compute(0, len(TOKENS), name)
        self.send(len(TOKENS), name, SUMMARY)

    def require(self, stream: KeptStream, wanted: Sequences[SlotRange], receiver: int = 0, receivers: int = 1) -> int:
        """Everything that passes to one decode rank has been put on its stream."""
        passing = pair_layout(self.runner.layout, RankPair(self._rank, self._ranks, receiver, receivers))
        assert stream.end is not None
        assert (stream.end.cached_tokens, stream.end.queue_seconds, stream.end.compute_seconds) == (3, 0.5, 1.5)
        return stream.require_everything(passing.layout, passing.slots(wanted), TOKENS, NAME.epoch)


def name(epoch: int) -> TransferName:
    return TransferName("decode-1", "request", epoch)


# Streams and when they attach


@pytest.mark.parametrize("moment", range(5))
def test_a_stream_gets_everything_in_order_whenever_it_attaches(moment: int) -> None:
    sender, stream = Sender(max_piece_bytes=20), KeptStream()
    for step in range(5):
        if step == moment:
            sender.attach(stream)
            assert (stream.pieces == []) == (moment < 2), "what came before it is put at once"
        match step:
            case 0:
                wanted = sender.open(held=1)
            case 1:
                sender.compute(0, 8, NAME)
                sender.send(3)
                assert (stream.pieces != []) == (moment < 2)
            case 2:
                sender.send(8)
            case 3:
                sender.compute(8, 12, NAME)
                sender.send(12, summary=SUMMARY)
    slots = [(frame.piece.slot_begin, frame.piece.slot_end) for frame in stream.pieces]
    assert slots == [(1, 3), (3, 5), (5, 7), (7, 8), (8, 10), (10, 12)]
    assert sender.require(stream, wanted) == sender.outgoing.payload_bytes == 11 * 8


def test_two_ranks_are_sent_their_own_heads_and_neither_waits_for_the_other() -> None:
    sender = Sender(owners(heads(2), heads(1)))
    first, second = KeptStream(), KeptStream()
    sender.attach(first)
    wanted = sender.open(receivers=2)
    sender.send_all()
    assert sender.require(first, wanted, 0, 2) == 12 * (4 + 4)
    sender.attach(second, receiver=1)
    assert sender.require(second, wanted, 1, 2) == 12 * (4 + 4)
    assert sender.outgoing.payload_bytes == replica_lower_bound(sender.runner.layout, wanted, 2)


def test_one_prefill_rank_of_two_has_something_for_one_decode_rank_only() -> None:
    sender = Sender(owners(heads(2)), rank=1, ranks=2)
    # There is no stream to expect from rank 0: it is done with rank 1's.
    wanted = sender.open(receivers=2)
    sender.send_all()
    stream = sender.attach(KeptStream(), receiver=1)
    assert sender.require(stream, wanted, 1, 2) == 12 * 4
    require_forgotten(sender, NAME, receiver=1)


def test_a_rank_whose_part_is_empty_still_says_that_this_is_all() -> None:
    """Of one slot of a latent, which both prefill ranks hold, one of them sends nothing."""
    sizes = []
    for rank in range(2):
        sender = Sender(owners(heads(1)), rank=rank, ranks=2)
        stream = sender.attach(KeptStream())
        wanted = sender.open(held=11)
        sender.send_all()
        sizes.append(sender.require(stream, wanted))
    assert sorted(sizes) == [0, 4]


def test_transfers_of_one_request_and_of_others_do_not_mix() -> None:
    sender = Sender()
    names = [NAME, name(8), TransferName("decode-2", "request", 7), TransferName("decode-1", "other", 7)]
    streams = [sender.attach(KeptStream(), each) for each in names]
    wanted = [sender.open(each, held=held) for held, each in enumerate(names)]
    rows = sender.compute(0, 12, *names)
    assert len(rows) == 4
    for each in reversed(names):
        sender.send(12, each, SUMMARY)
    for each, stream, slots in zip(names, streams, wanted, strict=True):
        stream.require_everything(sender.runner.layout, slots, TOKENS, each.epoch)


# Layers that leave during a step


def leaving(sender: Sender, stream: KeptStream, begin: int, end: int) -> list[list[Piece]]:
    """The pieces that are put between layers of one step."""
    counts = [len(stream.pieces)]
    rows = [SequenceRows(np.array(TOKENS[begin:end]), begin, 0, sender.tables(NAME), NAME)]
    told = sender.outgoing.while_computing(rows)

    def stored(layer: str) -> None:
        told(layer)  # type: ignore[arg-type]
        counts.append(len(stream.pieces))

    sender.runner.execute(rows, stored)
    return [[frame.piece for frame in stream.pieces[before:after]] for before, after in pairwise(counts)]


def test_layers_leave_as_soon_as_they_are_enough_for_a_piece() -> None:
    # Owners of 4 bytes: two of them are enough.
    sender = Sender(owners(*[heads(1)] * 5), min_piece_bytes=8 * 8)
    stream = sender.attach(KeptStream())
    wanted = sender.open()
    assert leaving(sender, stream, 0, 8) == [[], [Piece(0, 0, 2, 0, 8)], [], [Piece(0, 2, 4, 0, 8)], []]
    sender.send(8)
    assert [frame.piece for frame in stream.pieces[2:]] == [Piece(0, 4, 5, 0, 8)]
    # The rest is too little for that, and goes at the end of the step.
    assert leaving(sender, stream, 8, 11) == [[], [], [], [], []]
    sender.send(11)
    assert [frame.piece for frame in stream.pieces[3:]] == [Piece(0, 0, 5, 8, 11)]
    assert leaving(sender, stream, 11, 12) == [[], [], [], [], []]
    sender.send(12, summary=SUMMARY)
    sender.require(stream, wanted)


def test_what_was_cached_leaves_with_the_layers_of_the_first_step() -> None:
    sender = Sender(owners(heads(1), heads(1)), min_piece_bytes=1)
    stream = sender.attach(KeptStream())
    wanted = sender.open(held=2)
    sender.compute(0, 8, None)
    assert stream.untouched
    assert leaving(sender, stream, 8, 12) == [[Piece(0, 0, 1, 2, 12)], [Piece(0, 1, 2, 2, 12)]]
    sender.send(12, summary=SUMMARY)
    assert len(stream.pieces) == 2
    sender.require(stream, wanted)


def test_a_state_leaves_only_when_the_last_step_is_over() -> None:
    sender = Sender(owners(heads(1), state(2)), min_piece_bytes=1)
    stream = sender.attach(KeptStream())
    wanted = sender.open()
    tokens, states = 0, 1
    assert leaving(sender, stream, 0, 8) == [[Piece(tokens, 0, 1, 0, 8)], []]
    sender.send(8)
    assert leaving(sender, stream, 8, 12) == [[Piece(tokens, 0, 1, 8, 12)], []]
    sender.send(12, summary=SUMMARY)
    assert [frame.piece for frame in stream.pieces[2:]] == [Piece(states, 0, 1, 0, 1)]
    sender.require(stream, wanted)


def test_rows_of_nobodys_transfer_are_computed_and_not_sent() -> None:
    sender = Sender(min_piece_bytes=1)
    stream = sender.attach(KeptStream())
    sender.open()
    sender.outgoing.close(CloseOutgoing(NAME, grpc.StatusCode.ABORTED.value[0], "cancelled"))
    sender.compute(0, 4, NAME, None, name(99))
    assert stream.pieces == []
    assert sender.outgoing.payload_bytes == 0


# Ends


def test_a_transfer_that_is_given_up_fails_on_every_stream_and_is_forgotten() -> None:
    sender = Sender(owners(heads(1)))
    streams = [sender.attach(KeptStream(), receiver=receiver) for receiver in (0, 1)]
    sender.open(receivers=3)
    sender.compute(0, 8, NAME)
    sender.send(8)
    sent = sender.outgoing.payload_bytes
    sender.outgoing.close(CloseOutgoing(NAME, grpc.StatusCode.UNAVAILABLE.value[0], "shutting down"))
    for stream in streams:
        assert stream.failure is not None
        assert (stream.failure.code, stream.failure.message) == (grpc.StatusCode.UNAVAILABLE, "shutting down")
    late = sender.attach(KeptStream(), receiver=2)
    sender.compute(8, 12, NAME)
    sender.send(12, summary=SUMMARY)
    assert late.untouched
    assert sender.outgoing.payload_bytes == sent
    assert sender.outgoing.backlogged(0) == frozenset()
    # Again, and what never was.
    sender.outgoing.close(CloseOutgoing(NAME, grpc.StatusCode.INTERNAL.value[0], "again"))
    sender.outgoing.close(CloseOutgoing(name(99), grpc.StatusCode.INTERNAL.value[0], "never was"))


@pytest.mark.parametrize("code", grpc.StatusCode)
def test_every_status_crosses_between_ranks_as_a_number(code: grpc.StatusCode) -> None:
    sender = Sender()
    stream = sender.attach(KeptStream())
    sender.open()
    sender.outgoing.close(CloseOutgoing(NAME, code.value[0], "why"))
    assert stream.failure is not None
    assert stream.failure.code is code


def require_forgotten(sender: Sender, transfer: TransferName, receiver: int = 0) -> None:
    """A stream that attaches by this name finds nothing."""
    stream = sender.attach(KeptStream(), transfer, receiver)
    sender.send(len(TOKENS), transfer, SUMMARY)
    assert stream.untouched
    stream.cancel()


def test_a_finished_transfer_is_forgotten_and_so_are_its_streams() -> None:
    sender = Sender(owners(heads(1)))
    first, second = KeptStream(), KeptStream()
    sender.attach(first)
    sender.open(receivers=2)
    sender.attach(second, receiver=1)
    sender.send_all()
    assert first.end is not None
    assert second.end is not None
    references = [weakref.ref(first), weakref.ref(second)]
    del first, second
    assert [reference() for reference in references] == [None, None]
    require_forgotten(sender, NAME)


def test_a_stream_whose_transfer_never_comes_is_forgotten_when_it_is_cancelled() -> None:
    sender, stream = Sender(), KeptStream()
    sender.attach(stream)
    reference = weakref.ref(stream)
    sender.open(name(8))
    assert reference() is not None, "its transfer may still come"
    stream.cancel()
    del stream
    sender.open(name(9))
    assert reference() is None


def test_a_transfer_whose_stream_never_comes_is_forgotten_after_its_time() -> None:
    now = 1000.0
    sender = Sender(owners(heads(1)), clock=lambda: now)
    stream = KeptStream()
    for epoch in (1, 2, 3):
        sender.attach(stream if epoch == 2 else KeptStream(), name(epoch))
        sender.open(name(epoch), receivers=2, seconds=30.0)
    for epoch in (1, 2):
        sender.send_all(name(epoch))
    now += 29.0
    sender.open(name(4))
    late = sender.attach(KeptStream(), name(1), receiver=1)
    assert late.end is not None, "just in time"
    now += 2.0
    assert name(2) in sender.outgoing.backlogged(0)
    reference = weakref.ref(stream)
    del stream
    sender.open(name(5))
    assert sender.outgoing.backlogged(0) == frozenset()
    assert reference() is None
    require_forgotten(sender, name(2), receiver=1)
    # What is still computed is the engine's to give up.
    stream = sender.attach(KeptStream(), name(3), receiver=1)
    sender.send_all(name(3))
    assert stream.end is not None


# Back-pressure


def test_a_transfer_is_backlogged_as_long_as_any_of_its_receivers_has_too_much_to_take() -> None:
    sender = Sender(owners(heads(1)))
    first, second = KeptStream(), KeptStream()
    sender.attach(first)
    sender.open(receivers=2)
    other = sender.attach(KeptStream(), name(8))
    sender.open(name(8))
    sender.compute(0, 8, NAME, name(8))
    sender.send(8)
    sender.send(8, name(8))
    assert other.pieces
    # Nobody has attached for the second rank: it has 8 slots to take.
    assert sender.outgoing.backlogged(8 * 4 - 1) == {NAME}
    assert sender.outgoing.backlogged(8 * 4) == frozenset()
    second.slow = True
    sender.attach(second, receiver=1)
    assert sender.outgoing.backlogged(8 * 4 - 1) == {NAME}
    second.slow = False
    assert sender.outgoing.backlogged(0) == frozenset()
    first.slow = other.slow = True
    assert sender.outgoing.backlogged(0) == {NAME, name(8)}


# Anything


@settings(max_examples=60)
@given(
    ranks=st.tuples(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4])),
    sizes=st.tuples(st.sampled_from([0, 1, 40, 1 << 20]), st.sampled_from([1, 30, 1 << 20])),
    held=st.integers(0, 12),
    ends=st.sets(st.integers(1, 11)),
    data=st.data(),
)
def test_every_pair_of_ranks_passes_exactly_what_is_between_them(
    ranks: tuple[int, int], sizes: tuple[int, int], held: int, ends: set[int], data: st.DataObject
) -> None:
    """In chunks of any size, cut into pieces of any size, with streams that attach at any moment."""
    senders, receivers = ranks
    total = 0
    layers = data.draw(st.sampled_from([mixed_layers(), owners(heads(4), heads(2), heads(1, 3), full(BLOCK))]))
    for rank in range(senders):
        sender = Sender(layers, rank=rank, ranks=senders, min_piece_bytes=sizes[0], max_piece_bytes=sizes[1])
        chunks = sorted({*ends, 12})
        pairs = [RankPair(rank, senders, receiver, receivers) for receiver in range(receivers)]
        streams = {p.receiver: KeptStream() for p in pairs if pair_layout(sender.runner.layout, p).sections}
        moments = {receiver: data.draw(st.integers(0, len(chunks) + 1)) for receiver in streams}
        for moment, end in enumerate([0, *chunks, 12]):
            for receiver, stream in streams.items():
                if moments[receiver] == moment:
                    sender.attach(stream, receiver=receiver)
            if moment == 0:
                wanted = sender.open(receivers=receivers, held=held)
            elif moment <= len(chunks):
                sender.compute([0, *chunks][moment - 1], end, NAME)
                sender.send(end, summary=SUMMARY if end == 12 else None)
        sent = sum(sender.require(stream, wanted, receiver, receivers) for receiver, stream in streams.items())
        assert sender.outgoing.payload_bytes == sent
        total += sent
        if streams:
            require_forgotten(sender, NAME, next(iter(streams)))
    assert total == replica_lower_bound(sender.runner.layout, wanted, receivers)
    assert (total == 0) == (lower_bound(sender.runner.layout, wanted) == 0)


@pytest.mark.parametrize("opened", [True, False])
def test_a_stream_whose_place_another_takes_is_ended(opened: bool) -> None:
    sender = Sender()
    if opened:
        sender.open()
    first = sender.attach(KeptStream())
    second = sender.attach(KeptStream())
    if not opened:
        sender.open()
    assert first.failure is not None
    assert first.failure.code is grpc.StatusCode.ABORTED
    assert second.failure is None
