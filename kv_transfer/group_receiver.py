"""The decode side of the torch transport, for one prefill rank: keeps a group with it while there are transfers.

Made with the peer's connection. The first group is made when the connection is, each later one when a transfer begins
after the one before was lost. A thread of its own makes a group and then watches its Join call, which ends when the
prefill replica discards the group or dies.
"""

import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import grpc

from kv_transfer.channel_options import JOIN_METHOD, STOP_METHOD, STORE_METHOD
from kv_transfer.frame import FrameError, PieceFrame, SentFrame, max_piece_bytes
from kv_transfer.group_store import GroupStore
from kv_transfer.incoming_group import IncomingGroup
from kv_transfer.layout import CacheLayout
from kv_transfer.pair_group import DECODE_RANK, RENDEZVOUS_SECONDS, GroupLost, GroupSettings, PairGroup
from kv_transfer.staging import StagingBudget
from kv_transfer.transfer import PieceArrived, Transfer, TransferEnded
from kv_transfer.wire import kv_transfer_pb2 as wire

if TYPE_CHECKING:
    from grpc import _CallIterator

log = logging.getLogger(__name__)

STOP_SECONDS = 5.0
"""A prefill replica that does not even say that it stops is taken for dead."""


class GroupReceiver:
    """A ``PieceReceiver``."""

    def __init__(
        self,
        settings: GroupSettings,
        channel: grpc.Channel,
        layout: CacheLayout,
        incarnation: str,
        staging: StagingBudget,
    ) -> None:
        self.name = settings.name
        self._settings = settings
        self._layout = layout
        self._incarnation = incarnation
        self._staging = staging
        self._join: grpc.UnaryStreamMultiCallable[Any, bytes] = channel.unary_stream(JOIN_METHOD)
        self._store: Callable[..., bytes] = channel.unary_unary(STORE_METHOD)
        self._stop: grpc.UnaryUnaryMultiCallable[Any, bytes] = channel.unary_unary(STOP_METHOD)
        self._changed = threading.Condition()
        self._group: IncomingGroup | None = None
        self._generation = 0
        # Transfers that have had pieces over a group, and over which: the other side never changes it.
        self._users: dict[Transfer, int] = {}
        self._making = False
        self._failure = ""
        self._closed = False
        self._join_call: _CallIterator[bytes] | None = None

    def connect(self) -> None:
        """Make the first group. Raises ``GroupLost``."""
        self.prepare()
        with self._changed:
            self._changed.wait_for(lambda: not self._making, 2 * RENDEZVOUS_SECONDS)
            if self._group is None:
                raise GroupLost(self._failure or f"no process group within {2 * RENDEZVOUS_SECONDS} s")

    def prepare(self) -> None:
        """Begin to make another group if the last one was lost."""
        with self._changed:
            if self._making or self._closed or self._group is not None:
                return
            self._making = True
            self._generation += 1
            generation = self._generation
        threading.Thread(target=self._keep, args=(generation,), name="kv-group", daemon=True).start()

    def begin(self, transfer: Transfer) -> None:
        """Wait until the other side has taken the call: only then can it be stopped."""
        transfer.call.initial_metadata()
        if transfer.cancelled.is_set():
            self.cancel(transfer)

    def take(self, transfer: Transfer, frame: PieceFrame | SentFrame) -> bool:
        """Post the receive of a piece; it is delivered when it is complete. Dropped then if nobody wants it any more.

        A cancelled transfer's sends are received like others: the other side has posted them.
        """
        if isinstance(frame, PieceFrame):
            raise FrameError("a piece that carries its payload")
        if frame.piece.section >= len(self._layout.sections):
            raise FrameError(f"a piece of section {frame.piece.section}")
        if frame.size != frame.piece.payload_bytes(self._layout) or frame.size == 0:
            raise FrameError(f"a piece of {frame.piece.payload_bytes(self._layout)} bytes announced as {frame.size}")
        if frame.size > max_piece_bytes(self._layout):
            raise FrameError(
                f"a piece of {frame.size} bytes; at most {max_piece_bytes(self._layout)} are taken at once"
            )
        self._group_of(frame.generation, transfer).receive(
            frame.sequence, frame.size, partial(self._arrived, transfer, frame)
        )
        return True

    def end(self, transfer: Transfer, ended: TransferEnded, *, every_header: bool) -> None:
        """Deliver it behind the pieces. Sends that this side has not heard of cost the group."""
        with self._changed:
            group = self._group
            used = self._users.pop(transfer, None)
        # One that has had no piece may have lost the names of its first sends.
        if group is not None and not every_header and used in (None, group.generation):
            group.discard(f"a stream broke off: {ended.error}")
        if group is None:
            transfer.deliver(ended)
        else:
            group.then(lambda: transfer.deliver(ended))

    def cancel(self, transfer: Transfer) -> None:
        """Ask the other side to stop, and break the call off if it does not answer."""
        request = wire.StopRequest(
            decode_incarnation=self._incarnation, request_id=transfer.request_id, epoch=transfer.epoch
        )
        try:
            asked = self._stop.future(request.SerializeToString(), timeout=STOP_SECONDS)
        except ValueError:
            # The channel was closed meanwhile, and with it the call.
            return

        def answered(future: "grpc.Future[bytes]") -> None:
            if future.cancelled() or future.exception() is not None:
                transfer.call.cancel()

        asked.add_done_callback(answered)

    def close(self) -> None:
        """Give the group up and make no other."""
        with self._changed:
            self._closed = True
            group, call = self._group, self._join_call
        if call is not None:
            call.cancel()
        if group is not None:
            group.discard("the connection was closed")

    def _arrived(self, transfer: Transfer, frame: SentFrame, payload: memoryview) -> None:
        if transfer.cancelled.is_set():
            self._staging.give_back(frame.size)
        else:
            arrived = PieceFrame(frame.epoch, frame.piece, payload)
            transfer.deliver(PieceArrived(transfer.request_id, arrived, transfer.sender))

    def _group_of(self, generation: int, transfer: Transfer) -> IncomingGroup:
        """A generation, which the other side may have been ready with a little earlier, with one more user."""
        with self._changed:
            self._changed.wait_for(lambda: not (self._making and generation == self._generation), RENDEZVOUS_SECONDS)
            if self._group is None or self._group.generation != generation:
                raise GroupLost(f"the process group of generation {generation} was given up")
            self._users[transfer] = generation
            return self._group

    def _keep(self, generation: int) -> None:
        request = wire.JoinRequest(decode_incarnation=self._incarnation, generation=generation)
        try:
            call = self._join(request.SerializeToString())
        except ValueError:
            # The channel was closed meanwhile. Nothing will be asked for any more.
            return
        with self._changed:
            self._join_call = call
            if self._closed:
                call.cancel()
        reason = "the other side has ended it"
        group: IncomingGroup | None = None
        try:
            next(call)
            store = GroupStore(self._store, self._incarnation, generation)
            pair = PairGroup(self._settings, store, DECODE_RANK)
            next(call)
            group = IncomingGroup(pair, generation, self._staging, on_lost=lambda: self._forget(generation, call))
            with self._changed:
                self._group = group
                self._making = False
                self._changed.notify_all()
            for _ in call:
                pass
        except grpc.RpcError as error:
            reason = f"{error.code().name}: {error.details()}"
        except (GroupLost, StopIteration) as error:
            reason = str(error) or "it was not made"
        finally:
            if group is not None:
                group.discard(reason)
            with self._changed:
                # The next one may be in the making already.
                if generation == self._generation:
                    self._failure = reason
                    self._making = False
            self._forget(generation, call)
            log.info("process group %d has ended: %s", generation, reason)

    def _forget(self, generation: int, call: "_CallIterator[bytes]") -> None:
        with self._changed:
            if self._group is not None and self._group.generation == generation:
                self._group = None
            users = [transfer for transfer, used in self._users.items() if used == generation]
            self._changed.notify_all()
        call.cancel()
        for transfer in users:
            transfer.call.cancel()
