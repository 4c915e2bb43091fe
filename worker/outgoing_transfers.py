"""A prefill rank's transfers under way: what each decode rank still has to get of each prompt, and over which streams.

One per prefill rank, used on its engine's thread only. A transfer is opened when its prompt is accepted, sent from as
tokens are computed, and forgotten when everything is queued on streams that are attached, or when it is closed.
Payloads are packed copies: pages are free as soon as a piece is queued.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import grpc

from kernels.pages import IntArray
from kv_transfer.frame import EndFrame, Frame, PieceFrame, Wait, at_once
from kv_transfer.layout import Lifetime, Piece, SlotRange
from kv_transfer.outgoing_stream import OutgoingStream
from kv_transfer.plan import plan_pieces
from kv_transfer.prefill_server import RankStream, TransferName
from kv_transfer.rank_pair import PairLayout, RankPair, pair_layout
from worker.kv_cache.specs import LayerName
from worker.model_runner import ModelRunner
from worker.ranks.commands import CloseOutgoing, OpenOutgoing, SendComputed, SequenceRows, Summary

_REPLACED = (grpc.StatusCode.ABORTED, "another stream of the same rank has taken its place")
_STATUS = {code.value[0]: code for code in grpc.StatusCode}


@dataclass(slots=True)
class _Progress:
    """Of one section, slots before ``sent`` of all owners are queued, and of the slots behind them ``owners``' own."""

    sent: int
    owners: int = 0


@dataclass(slots=True)
class _Branch:
    """What passes to one decode rank: of each section of ``passing`` the ``slots``."""

    receiver: int
    passing: PairLayout
    slots: tuple[SlotRange, ...]
    progress: list[_Progress]
    stream: OutgoingStream | None = None
    early: list[Frame] = field(default_factory=list)
    early_bytes: int = 0
    payload_bytes: int = 0
    pieces: int = 0

    @property
    def queued_bytes(self) -> int:
        """Payload that the decode rank has not taken."""
        return self.early_bytes if self.stream is None else self.stream.queued_bytes

    def put(self, frame: Frame) -> None:
        """Queue a frame, for later if nobody has attached yet."""
        if self.stream is not None:
            self.stream.put(frame)
            return
        self.early.append(frame)
        if isinstance(frame, PieceFrame):
            self.early_bytes += frame.payload.nbytes

    def attach(self, stream: OutgoingStream) -> None:
        """Queue on this stream from now on, and what came before as well."""
        if self.stream is not None:
            self.stream.fail(*_REPLACED)
        self.stream = stream
        for frame in self.early:
            stream.put(frame)
        self.early.clear()
        self.early_bytes = 0


@dataclass(slots=True)
class _Outgoing:
    epoch: int
    prompt_len: int
    branches: list[_Branch]
    deadline: float
    ended: bool = False


class OutgoingTransfers:
    """See the module; rank ``rank`` of ``ranks``.

    While a step is computed, layers leave in pieces of ``min_piece_bytes`` or more; what is left goes when it is done.
    ``payload_bytes`` counts what was queued so far. ``staged`` says what senders wait for until the payloads that were
    packed so far are there. ``clock`` gives seconds.
    """

    def __init__(
        self,
        runner: ModelRunner,
        rank: int,
        ranks: int,
        *,
        min_piece_bytes: int,
        max_piece_bytes: int,
        staged: Callable[[], Wait] = lambda: at_once,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._runner = runner
        self._staged = staged
        self._clock = clock
        self._rank = rank
        self._ranks = ranks
        self._min_piece_bytes = min_piece_bytes
        self._max_piece_bytes = max_piece_bytes
        self._open: dict[TransferName, _Outgoing] = {}
        self._unclaimed: dict[tuple[TransferName, int], OutgoingStream] = {}
        self._passing: dict[int, list[tuple[int, PairLayout]]] = {}
        self.payload_bytes = 0

    def attach(self, arrived: RankStream) -> None:
        """A decode rank's stream is there, before or after its transfer."""
        self._forget_dead()
        outgoing = self._open.get(arrived.name)
        if outgoing is None:
            earlier = self._unclaimed.pop((arrived.name, arrived.receiver), None)
            if earlier is not None:
                earlier.fail(*_REPLACED)
            self._unclaimed[arrived.name, arrived.receiver] = arrived.stream
            return
        for branch in outgoing.branches:
            if branch.receiver == arrived.receiver:
                branch.attach(arrived.stream)
        self._forget_if_done(arrived.name, outgoing)

    def open(self, command: OpenOutgoing) -> None:
        """Expect to send."""
        self._forget_dead()
        branches = []
        for receiver, passing in self._receivers(command.receivers):
            slots = passing.slots(command.lacking)
            branch = _Branch(receiver, passing, slots, [_Progress(one.begin) for one in slots])
            stream = self._unclaimed.pop((command.name, receiver), None)
            if stream is not None:
                branch.attach(stream)
            branches.append(branch)
        if branches:
            deadline = self._clock() + command.seconds
            self._open[command.name] = _Outgoing(command.name.epoch, command.prompt_len, branches, deadline)

    def while_computing(self, rows: Sequence[SequenceRows]) -> Callable[[LayerName], None]:
        """What to call during a step whenever a layer has stored its part of the rows."""
        leaving = [
            (outgoing, one.context, one.tables)
            for one in rows
            if one.transfer is not None and (outgoing := self._open.get(one.transfer)) is not None
        ]

        def stored(layer: LayerName) -> None:
            for outgoing, computed, tables in leaving:
                for branch in outgoing.branches:
                    for index, owner in branch.passing.places.get(layer, ()):
                        # A state moves to where the next step reads it only when the step is over.
                        if branch.passing.layout.sections[index].lifetime is not Lifetime.STATE:
                            self._send(outgoing, branch, index, computed, tables, owner + 1)

        return stored

    def send(self, command: SendComputed) -> None:
        """Queue what is computed and not queued yet."""
        outgoing = self._open.get(command.name)
        if outgoing is None:
            return
        for branch in outgoing.branches:
            for index in range(len(branch.slots)):
                self._send(outgoing, branch, index, command.computed, command.tables)
            if command.summary is not None:
                branch.put(_end_frame(command.name.epoch, branch, command.summary))
        outgoing.ended = command.summary is not None
        self._forget_if_done(command.name, outgoing)

    def close(self, command: CloseOutgoing) -> None:
        """Give up, with an error for whoever still listens."""
        outgoing = self._open.pop(command.name, None)
        for branch in outgoing.branches if outgoing is not None else ():
            if branch.stream is not None:
                branch.stream.fail(_STATUS[command.code], command.message)

    def backlogged(self, limit: int) -> frozenset[TransferName]:
        """Transfers of which a decode rank has more than ``limit`` bytes to take, or all that never came together."""
        return frozenset(
            name
            for name, outgoing in self._open.items()
            if any(branch.queued_bytes > limit for branch in outgoing.branches)
            or sum(branch.early_bytes for branch in outgoing.branches) > limit
        )

    def _send(
        self,
        outgoing: _Outgoing,
        branch: _Branch,
        index: int,
        computed: int,
        tables: Sequence[IntArray],
        owners: int | None = None,
    ) -> None:
        """Queue slots of a section that are computed and not queued yet: of all owners, or of the first ``owners``.

        In the latter case only if they are enough for a piece of their own.
        """
        layout, progress = branch.passing.layout, branch.progress[index]
        section = layout.sections[index]
        ready = section.ready(branch.slots[index], outgoing.prompt_len, computed)
        unsent = SlotRange(progress.sent, max(progress.sent, ready.end))
        until = len(section.owners) if owners is None else owners
        whole = Piece(index, progress.owners, until, unsent.begin, unsent.end)
        if owners is not None and whole.payload_bytes(layout) < self._min_piece_bytes:
            return
        for piece in plan_pieces(layout, whole, self._max_piece_bytes):
            payload = self._runner.read_piece(branch.passing, piece, tables)
            branch.put(PieceFrame(outgoing.epoch, piece, payload, self._staged()))
            branch.payload_bytes += payload.nbytes
            branch.pieces += 1
            self.payload_bytes += payload.nbytes
        progress.owners = until
        if owners is None:
            progress.sent, progress.owners = unsent.end, 0

    def _receivers(self, receivers: int) -> list[tuple[int, PairLayout]]:
        """The decode ranks to which this one sends anything, and what."""
        if receivers not in self._passing:
            pairs = [RankPair(self._rank, self._ranks, receiver, receivers) for receiver in range(receivers)]
            layouts = [(pair.receiver, pair_layout(self._runner.layout, pair)) for pair in pairs]
            self._passing[receivers] = [(receiver, passing) for receiver, passing in layouts if passing.sections]
        return self._passing[receivers]

    def _forget_if_done(self, name: TransferName, outgoing: _Outgoing) -> None:
        if outgoing.ended and all(branch.stream is not None for branch in outgoing.branches):
            del self._open[name]

    def _forget_dead(self) -> None:
        """Drop streams whose transfers never came, and transfers whose streams never did."""
        for key in [key for key, stream in self._unclaimed.items() if stream.cancelled]:
            del self._unclaimed[key]
        now = self._clock()
        for name in [name for name, outgoing in self._open.items() if outgoing.ended and outgoing.deadline < now]:
            del self._open[name]


def _end_frame(epoch: int, branch: _Branch, summary: Summary) -> EndFrame:
    return EndFrame(
        epoch=epoch,
        payload_bytes=branch.payload_bytes,
        pieces=branch.pieces,
        cached_tokens=summary.cached_tokens,
        queue_seconds=summary.queue_seconds,
        compute_seconds=summary.compute_seconds,
    )
