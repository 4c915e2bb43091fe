"""What a peer says about sizes is checked before memory is taken for it."""

import contextlib
from collections.abc import Iterator

import grpc
import pytest
import torch
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.channel_options import HANDSHAKE_METHOD, MAX_REQUEST_BYTES, PREFILL_METHOD
from kv_transfer.frame import FrameError, SentFrame, max_piece_bytes
from kv_transfer.group_receiver import GroupReceiver
from kv_transfer.handshake import HandshakeMismatch, layout_message, parse_layout, require_match
from kv_transfer.layout import WIRE_VERSION, CacheLayout, Lifetime, OwnerLayer, Piece, Section
from kv_transfer.pair_group import GroupSettings
from kv_transfer.staging import StagingBudget
from kv_transfer.wire import kv_transfer_pb2 as wire
from tests.kv_transfer.connection import NewDecode, NewPrefill, impostor, raw_calls
from tests.kv_transfer.layouts import LAYOUT, layout_of, layouts
from tests.memory import little_memory


@given(message=st.binary(max_size=400) | layouts.map(lambda layout: layout_message(layout).SerializeToString()))
def test_a_layout_from_anywhere_is_compared_or_refused(message: bytes) -> None:
    with little_memory(4 << 20), contextlib.suppress(DecodeError, HandshakeMismatch):
        require_match(LAYOUT, parse_layout(wire.Layout.FromString(message)), WIRE_VERSION, "peer")


@pytest.mark.parametrize("owners_per_section", [0, 1, 100_000])
def test_a_layout_of_a_million_layers_is_refused_unbuilt(owners_per_section: int) -> None:
    section = b"\x1a\x00" * owners_per_section
    message = wire.Layout()
    message.sections.extend(wire.Section.FromString(section) for _ in range(100_000 // max(1, owners_per_section)))
    with little_memory(1 << 20), pytest.raises(HandshakeMismatch, match="no model has as many"):
        parse_layout(message)


def test_a_peer_with_a_layout_of_megabytes_is_refused(new_prefill: NewPrefill) -> None:
    prefill = new_prefill()
    huge = wire.HandshakeRequest(wire_version=WIRE_VERSION, incarnation="x" * (5 << 20))
    with raw_calls(prefill.address) as call:
        with pytest.raises(grpc.RpcError) as refusal:
            next(call(HANDSHAKE_METHOD, huge.SerializeToString()))
        assert refusal.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert "at most" in refusal.value.details()


@given(theirs=layouts)
def test_a_mismatch_of_long_layouts_fits_a_trailer(theirs: CacheLayout) -> None:
    ours = layout_of(Section(Lifetime.EVERY_TOKEN, 0, 0, tuple(OwnerLayer(f"layers.{i}", 2, 8, 0) for i in range(200))))
    with pytest.raises(HandshakeMismatch) as refusal:
        require_match(ours, theirs, WIRE_VERSION, "peer")
    assert len(str(refusal.value)) < 2000


@pytest.mark.parametrize("method", [HANDSHAKE_METHOD, PREFILL_METHOD])
def test_a_request_beyond_the_bound_is_not_received(method: str, new_prefill: NewPrefill) -> None:
    prefill = new_prefill()
    with raw_calls(prefill.address) as call:
        with pytest.raises(grpc.RpcError) as refusal:
            next(call(method, bytes(MAX_REQUEST_BYTES + 1)))
        assert refusal.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert prefill.untouched


def test_a_prompt_beyond_the_context_is_refused_before_it_is_copied(new_prefill: NewPrefill) -> None:
    prefill = new_prefill(max_prompt_tokens=5)
    request = wire.PrefillRequest(
        request_id="r",
        epoch=1,
        token_ids=range(6),
        prefill_incarnation="prefill-1",
        lacking=[wire.SlotRange(begin=0, end=6)],
    )
    with raw_calls(prefill.address) as call, pytest.raises(grpc.RpcError, match="6 tokens are more than 5"):
        next(call(PREFILL_METHOD, request.SerializeToString()))
    assert prefill.untouched


def test_a_message_that_is_larger_than_any_piece_ends_its_transfer(new_decode: NewDecode) -> None:
    def handshake(message: bytes, context: grpc.ServicerContext) -> bytes:
        del message, context
        return wire.HandshakeReply(
            wire_version=WIRE_VERSION, incarnation="prefill-1", layout=layout_message(LAYOUT), max_streams=4
        ).SerializeToString()

    def stream(message: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        del message, context
        yield bytes(max_piece_bytes(LAYOUT) + (1 << 20))

    with impostor(handshake, stream) as address:
        decode = new_decode(address)
        decode.peer.connect()
        decode.ask()
        ended = decode.ended()
    assert ended.end is None
    assert "larger than max" in ended.error
    assert decode.staging.used == 0


@pytest.mark.parametrize("slots", [1 << 20, (1 << 32) - 1])
def test_a_send_that_claims_gigabytes_is_refused_before_anything_is_posted(slots: int) -> None:
    large = layout_of(Section(Lifetime.EVERY_TOKEN, 0, 0, (OwnerLayer("layers.0", 2, 4096, 0),)))
    piece = Piece(0, 0, 1, 0, slots)
    frame = SentFrame(1, piece, piece.payload_bytes(large), 1, 0)
    with grpc.insecure_channel("127.0.0.1:1") as channel:
        receiver = GroupReceiver(
            GroupSettings("127.0.0.1", torch.device("cpu")), channel, large, "decode-1", StagingBudget(1 << 20)
        )
        with little_memory(1 << 20), pytest.raises(FrameError, match="at most"):
            receiver.take(None, frame)  # type: ignore[arg-type] # it is not asked


def test_a_slot_of_any_size_is_taken() -> None:
    state = layout_of(Section(Lifetime.STATE, 0, 0, (OwnerLayer("state", 0, 1 << 30, 0),)))
    assert max_piece_bytes(state) == 1 << 30
    assert max_piece_bytes(layout_of()) == 64 << 20
