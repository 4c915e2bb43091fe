"""Commands go from rank to rank and stay what they were; other bytes are refused."""

import contextlib
import dataclasses
from typing import get_args

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.pages import IntArray
from kv_transfer.layout import SlotRange
from kv_transfer.prefill_server import TransferName
from kv_transfer.rank_pair import MAX_RANKS
from tests.memory import little_memory
from worker.kv_cache.block_pool import BlockId
from worker.kv_cache.group_blocks import BlockCopy
from worker.ranks.command_wire import decode_command, encode_command, name_message, parse_name
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

SMALL, LARGE = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
SECONDS = st.floats(allow_nan=False, allow_infinity=False)
TEXTS = st.text(max_size=20)


@st.composite
def arrays(draw: st.DrawFn) -> IntArray:
    """Token ids or blocks, of which one may be missing."""
    return np.array(draw(st.lists(st.integers(-1, 2**40), max_size=5)), dtype=np.int64)


def several(items: st.SearchStrategy[object]) -> st.SearchStrategy[tuple[object, ...]]:
    return st.lists(items, max_size=4).map(tuple)


TABLES = several(arrays())
BLOCKS = SMALL.map(BlockId)
NAMES = st.builds(TransferName, TEXTS, TEXTS, LARGE)
RANGES = several(st.builds(SlotRange, SMALL, SMALL))
ROWS = st.builds(SequenceRows, arrays(), SMALL, SMALL, TABLES, st.none() | NAMES)
SUMMARIES = st.none() | st.builds(Summary, SMALL, SECONDS, SECONDS)
STRATEGIES: dict[type, st.SearchStrategy[Command]] = {
    Compute: st.builds(Compute, several(ROWS)),
    ClearBlocks: st.builds(ClearBlocks, several(BLOCKS)),
    CopyBlocks: st.builds(CopyBlocks, several(st.builds(BlockCopy, BLOCKS, BLOCKS))),
    OpenOutgoing: st.builds(OpenOutgoing, NAMES, st.integers(0, MAX_RANKS), SMALL, RANGES, SECONDS),
    SendComputed: st.builds(SendComputed, NAMES, SMALL, TABLES, SUMMARIES),
    CloseOutgoing: st.builds(CloseOutgoing, NAMES, SMALL, TEXTS),
    ConnectPeer: st.builds(ConnectPeer, TEXTS, several(TEXTS), LARGE),
    ForgetPeer: st.builds(ForgetPeer, TEXTS),
    OpenIncoming: st.builds(OpenIncoming, TEXTS, LARGE, TEXTS, RANGES, TABLES, SECONDS),
    CloseIncoming: st.builds(CloseIncoming, LARGE),
}


def content(value: object) -> object:
    """Everything in a command, comparable."""
    if isinstance(value, np.ndarray):
        return value.dtype, value.tolist()
    if isinstance(value, tuple):
        return tuple(map(content, value))
    if dataclasses.is_dataclass(value):
        return type(value), tuple(content(getattr(value, field.name)) for field in dataclasses.fields(value))
    return type(value), value


def test_every_kind_of_command_is_tried() -> None:
    assert set(STRATEGIES) == set(get_args(Command))


@pytest.mark.parametrize("kind", get_args(Command))
@settings(max_examples=50)
@given(data=st.data())
def test_a_command_arrives_as_it_was_sent(kind: type, data: st.DataObject) -> None:
    command = data.draw(STRATEGIES[kind])
    assert content(decode_command(encode_command(command))) == content(command)


def test_the_prompt_is_for_the_leading_rank_only() -> None:
    command = OpenIncoming("r", 1, "prefill-1", (), (), 1.0, token_ids=(1, 2, 3), cache_salt="secret")
    received = decode_command(encode_command(command))
    assert content(received) == content(dataclasses.replace(command, token_ids=(), cache_salt=""))


def test_a_table_that_arrived_can_be_made_a_tensor() -> None:
    """PyTorch warns of arrays that cannot be written."""
    tables = (np.arange(3),)
    received = decode_command(encode_command(OpenIncoming("r", 1, "prefill-1", (), tables, 1.0)))
    assert isinstance(received, OpenIncoming)
    assert received.tables[0].flags.writeable


@given(name=NAMES)
def test_a_name_survives_alone(name: TransferName) -> None:
    assert parse_name(name_message(name)) == name


GARBAGE = [
    wire.Command(open_outgoing=wire.OpenOutgoing(receivers=(1 << 32) - 1)).SerializeToString(),
    b"",
    b"\xff",
    b"nonsense",
    wire.Command(compute=wire.Compute(rows=[wire.SequenceRows(token_ids=b"1234567")])).SerializeToString(),
    wire.Command(open_incoming=wire.OpenIncoming(tables=[bytes(8), bytes(9)])).SerializeToString(),
    wire.Command(copy_blocks=wire.BlockCopies(sources=[1, 2], destinations=[3])).SerializeToString(),
]


@pytest.mark.parametrize("message", GARBAGE)
def test_what_is_no_command_is_refused(message: bytes) -> None:
    with pytest.raises(DecodeError):
        decode_command(message)


@settings(max_examples=200)
@given(kind=st.sampled_from(get_args(Command)), data=st.data())
def test_a_damaged_command_is_refused_or_is_another_one(kind: type, data: st.DataObject) -> None:
    message = bytearray(encode_command(data.draw(STRATEGIES[kind])))
    at = data.draw(st.integers(0, len(message) - 1))
    message[at] ^= data.draw(st.integers(1, 255))
    with little_memory(4 << 20), contextlib.suppress(DecodeError):
        decode_command(bytes(message[: data.draw(st.integers(0, len(message)))]))


@settings(max_examples=200)
@given(message=st.binary(max_size=300))
def test_random_bytes_are_refused_or_are_a_command(message: bytes) -> None:
    with little_memory(4 << 20), contextlib.suppress(DecodeError):
        decode_command(message)
