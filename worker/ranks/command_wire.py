"""Commands as they cross the wire between ranks, and back. Both ends are processes of one replica."""

from collections.abc import Iterable

import numpy as np
from google.protobuf.message import DecodeError

from kernels.pages import IntArray
from kv_transfer.layout import SlotRange
from kv_transfer.prefill_server import TransferName
from kv_transfer.rank_pair import MAX_RANKS
from worker.kv_cache.block_pool import BlockId
from worker.kv_cache.group_blocks import BlockCopy
from worker.ranks.commands import (
    ClearBlocks,
    CloseIncoming,
    CloseOutgoing,
    Command,
    Compute,
    ConnectPeer,
    CopyBlocks,
    ForgetPeer,
    OpenIncoming,
    OpenOutgoing,
    SendComputed,
    SequenceRows,
    Summary,
)
from worker.wire import ranks_pb2 as wire

MAX_COMMAND_BYTES = 256 << 20
"""A step's block tables are the most: eight bytes for each block of each of its requests."""


def encode_command(command: Command) -> bytes:
    """One message."""
    return _message(command).SerializeToString()


def decode_command(message: bytes) -> Command:
    """The inverse. Raises ``DecodeError`` for other bytes."""
    try:
        return _parse(wire.Command.FromString(message))
    except ValueError as error:
        raise DecodeError(str(error)) from error


def _parse(command: wire.Command) -> Command:  # noqa: PLR0911 - one per kind
    match command.WhichOneof("command"):
        case "compute":
            return Compute(
                tuple(
                    SequenceRows(
                        _array(rows.token_ids),
                        rows.first,
                        rows.logit_rows,
                        tuple(map(_array, rows.tables)),
                        parse_name(rows.transfer) if rows.HasField("transfer") else None,
                    )
                    for rows in command.compute.rows
                )
            )
        case "clear_blocks":
            return ClearBlocks(tuple(map(BlockId, command.clear_blocks.blocks)))
        case "copy_blocks":
            pairs = zip(command.copy_blocks.sources, command.copy_blocks.destinations, strict=True)
            return CopyBlocks(tuple(BlockCopy(BlockId(source), BlockId(to)) for source, to in pairs))
        case "open_outgoing":
            opened = command.open_outgoing
            if opened.receivers > MAX_RANKS:
                raise ValueError(f"{opened.receivers} receivers are more than {MAX_RANKS}")
            return OpenOutgoing(
                parse_name(opened.name), opened.receivers, opened.prompt_len, _ranges(opened.lacking), opened.seconds
            )
        case "send_computed":
            sent = command.send_computed
            last = sent.summary
            return SendComputed(
                parse_name(sent.name),
                sent.computed,
                tuple(map(_array, sent.tables)),
                Summary(last.cached_tokens, last.queue_seconds, last.compute_seconds)
                if sent.HasField("summary")
                else None,
            )
        case "close_outgoing":
            closed = command.close_outgoing
            return CloseOutgoing(parse_name(closed.name), closed.code, closed.message)
        case "connect_peer":
            peer = command.connect_peer
            return ConnectPeer(peer.incarnation, tuple(peer.addresses), peer.attempt)
        case "forget_peer":
            return ForgetPeer(command.forget_peer.incarnation)
        case "open_incoming":
            incoming = command.open_incoming
            return OpenIncoming(
                incoming.request_id,
                incoming.epoch,
                incoming.incarnation,
                _ranges(incoming.lacking),
                tuple(map(_array, incoming.tables)),
                incoming.seconds,
            )
        case "close_incoming":
            return CloseIncoming(command.close_incoming.epoch)
    raise ValueError("a command of a kind that this version does not know")


def name_message(name: TransferName) -> wire.TransferName:
    """A transfer's name."""
    return wire.TransferName(decode_incarnation=name.decode_incarnation, request_id=name.request_id, epoch=name.epoch)


def parse_name(message: wire.TransferName) -> TransferName:
    """The inverse of ``name_message``."""
    return TransferName(message.decode_incarnation, message.request_id, message.epoch)


def _message(command: Command) -> wire.Command:  # noqa: PLR0911 - one per kind
    match command:
        case Compute(rows):
            return wire.Command(compute=wire.Compute(rows=[_rows_message(one) for one in rows]))
        case ClearBlocks(blocks):
            return wire.Command(clear_blocks=wire.Blocks(blocks=blocks))
        case CopyBlocks(copies):
            return wire.Command(
                copy_blocks=wire.BlockCopies(
                    sources=[copy.source for copy in copies], destinations=[copy.destination for copy in copies]
                )
            )
        case OpenOutgoing(name, receivers, prompt_len, lacking, seconds):
            return wire.Command(
                open_outgoing=wire.OpenOutgoing(
                    name=name_message(name),
                    receivers=receivers,
                    prompt_len=prompt_len,
                    lacking=_range_messages(lacking),
                    seconds=seconds,
                )
            )
        case SendComputed(name, computed, tables, summary):
            message = wire.SendComputed(name=name_message(name), computed=computed, tables=_table_bytes(tables))
            if summary is not None:
                message.summary.cached_tokens = summary.cached_tokens
                message.summary.queue_seconds = summary.queue_seconds
                message.summary.compute_seconds = summary.compute_seconds
            return wire.Command(send_computed=message)
        case CloseOutgoing(name, code, text):
            return wire.Command(close_outgoing=wire.CloseOutgoing(name=name_message(name), code=code, message=text))
        case ConnectPeer(incarnation, addresses, attempt):
            peer = wire.ConnectPeer(incarnation=incarnation, addresses=addresses, attempt=attempt)
            return wire.Command(connect_peer=peer)
        case ForgetPeer(incarnation):
            return wire.Command(forget_peer=wire.ForgetPeer(incarnation=incarnation))
        case OpenIncoming():
            return wire.Command(
                open_incoming=wire.OpenIncoming(
                    request_id=command.request_id,
                    epoch=command.epoch,
                    incarnation=command.incarnation,
                    lacking=_range_messages(command.lacking),
                    tables=_table_bytes(command.tables),
                    seconds=command.seconds,
                )
            )
        case CloseIncoming(epoch):
            return wire.Command(close_incoming=wire.CloseIncoming(epoch=epoch))


def _rows_message(rows: SequenceRows) -> wire.SequenceRows:
    return wire.SequenceRows(
        token_ids=rows.token_ids.tobytes(),
        first=rows.first,
        logit_rows=rows.logit_rows,
        tables=_table_bytes(rows.tables),
        transfer=None if rows.transfer is None else name_message(rows.transfer),
    )


def _table_bytes(tables: tuple[IntArray, ...]) -> list[bytes]:
    return [table.tobytes() for table in tables]


def _array(content: bytes) -> IntArray:
    # A copy, because tensors want memory that could be written.
    return np.frombuffer(content, dtype=np.int64).copy()


def _ranges(messages: Iterable[wire.SlotRange]) -> tuple[SlotRange, ...]:
    return tuple(SlotRange(one.begin, one.end) for one in messages)


def _range_messages(ranges: tuple[SlotRange, ...]) -> list[wire.SlotRange]:
    return [wire.SlotRange(begin=one.begin, end=one.end) for one in ranges]
