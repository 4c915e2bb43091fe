"""What a server refuses, what a peer refuses, and what neither must believe."""

from collections.abc import Callable
from dataclasses import replace

import grpc
import pytest

from kv_transfer import prefill_peer
from kv_transfer.channel_options import HANDSHAKE_METHOD, PREFILL_METHOD
from kv_transfer.frame import encode_frame
from kv_transfer.handshake import HandshakeMismatch, layout_message
from kv_transfer.layout import WIRE_VERSION, Piece
from kv_transfer.prefill_server import GRANTED_PEERS
from kv_transfer.rank_pair import RankPair
from kv_transfer.wire import kv_transfer_pb2 as wire
from tests.kv_transfer.connection import (
    END,
    Decode,
    NewDecode,
    NewPrefill,
    Prefill,
    eventually,
    frame,
    impostor,
    prefill_request,
    raw_calls,
    reply,
)
from tests.kv_transfer.layouts import HYBRID, LAYOUT, make_layout

# What a server refuses


def test_a_stale_incarnation_is_refused(prefill: Prefill, decode: Decode) -> None:
    decode.ask(prefill_incarnation="prefill-0")
    ended = decode.ended()
    assert ended.end is None
    assert "FAILED_PRECONDITION" in ended.error
    assert "prefill-1, not prefill-0" in ended.error
    assert prefill.untouched


@pytest.mark.parametrize(
    ("lacking", "reason"),
    [
        ([(12, 12)], "nothing is lacking"),
        ([(13, 12)], "needs 0–12"),
        ([(2**32 - 1, 2**32 - 1)], "needs 0–12"),
        ([(0, 11)], "needs 0–12"),
        ([(0, 13)], "needs 0–12"),
        ([], "0 slot ranges for 1 sections"),
        ([(0, 12), (0, 12)], "2 slot ranges for 1 sections"),
    ],
)
def test_a_request_for_what_a_prompt_does_not_have_is_refused(
    prefill: Prefill, decode: Decode, lacking: list[tuple[int, int]], reason: str
) -> None:
    decode.ask(lacking=lacking)
    error = decode.ended().error
    assert "INVALID_ARGUMENT" in error
    assert reason in error
    assert prefill.untouched


def test_a_window_that_the_prefill_side_has_given_up_is_refused(new_prefill: NewPrefill, new_decode: NewDecode) -> None:
    prefill = new_prefill(layout=HYBRID)
    decode = new_decode(prefill.address, layout=HYBRID)
    decode.peer.connect()
    decode.ask(lacking=[(0, 12), (8, 12), (0, 1)])
    assert "tokens 8–12 of section 1, of which a prompt of 13 tokens needs 9–12" in decode.ended().error
    assert prefill.untouched


@pytest.mark.parametrize("method", [PREFILL_METHOD, HANDSHAKE_METHOD])
@pytest.mark.parametrize("message", [b"\xff", b"\x0a\x05abc", b"\x0a\x02\xff\xff", bytes(range(256))])
def test_garbage_is_refused_and_harms_nobody(prefill: Prefill, decode: Decode, method: str, message: bytes) -> None:
    with raw_calls(prefill.address) as call, pytest.raises(grpc.RpcError) as error:
        list(call(method, message))
    assert error.value.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION)
    assert prefill.untouched
    decode.ask()
    assert prefill.job().name.request_id == "r"


def test_more_calls_than_there_are_threads_are_busy_not_stuck(new_prefill: NewPrefill) -> None:
    prefill = new_prefill(max_streams=1)
    request = prefill_request()
    with raw_calls(prefill.address) as call:
        for _ in range(GRANTED_PEERS + 4):
            call(PREFILL_METHOD, request.SerializeToString())
        jobs = [prefill.job() for _ in range(GRANTED_PEERS + 4)]
        with pytest.raises(grpc.RpcError) as error:
            next(call(PREFILL_METHOD, request.SerializeToString()))
        assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED

        def accepted() -> bool:
            answer = call(PREFILL_METHOD, request.SerializeToString())
            return eventually(lambda: not prefill.untouched or not answer.is_active()) and not prefill.untouched

        # As soon as one ends, another is taken.
        jobs[0].stream.put(END)
        assert eventually(accepted)


@pytest.mark.parametrize(
    ("receiver", "receivers", "reason"),
    [
        (2, 2, "rank 2 of 2"),
        (1, 1, "rank 1 of 1"),
        (0, 3, "layers.0 has 2 KV heads, which 3 ranks can neither share nor repeat"),
        (1, 2, "rank 0 of 2 has nothing for rank 1 of 2"),
        (3, 4, "rank 0 of 2 has nothing for rank 3 of 4"),
    ],
)
def test_a_rank_that_cannot_be_served_is_refused(
    new_prefill: NewPrefill, receiver: int, receivers: int, reason: str
) -> None:
    prefill = new_prefill(ranks=2)
    request = prefill_request()
    request.receiver, request.receivers = receiver, receivers
    with raw_calls(prefill.address) as call, pytest.raises(grpc.RpcError) as error:
        next(call(PREFILL_METHOD, request.SerializeToString()))
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert reason in str(error.value.details())
    assert prefill.untouched


# The handshake


def test_replicas_of_any_number_of_ranks_that_can_hold_the_model_understand_each_other(
    new_prefill: NewPrefill, new_decode: NewDecode
) -> None:
    pair = RankPair(sender=1, senders=2, receiver=3, receivers=4)
    decode = new_decode(new_prefill(rank=1, ranks=2).address, pair=pair)
    decode.peer.connect()
    assert decode.peer.incarnation == "prefill-1"


def test_a_peer_of_a_number_of_ranks_that_cannot_be_is_refused_by_its_flag(
    prefill: Prefill, new_decode: NewDecode
) -> None:
    request = wire.HandshakeRequest(
        wire_version=WIRE_VERSION, incarnation="decode-1", layout=layout_message(LAYOUT), transport="grpc", ranks=3
    )
    with raw_calls(prefill.address) as call:
        for rank, reason in ((0, "layers.0 has 2 KV heads, which 3 ranks"), (3, "rank 3 does not exist")):
            request.rank = rank
            with pytest.raises(grpc.RpcError) as error:
                next(call(HANDSHAKE_METHOD, request.SerializeToString()))
            assert error.value.code() is grpc.StatusCode.FAILED_PRECONDITION
            details = str(error.value.details())
            assert details.startswith(f"decode-1 says that it has 3 ranks: {reason}")
            assert "--tensor-parallel-size" in details


@pytest.mark.parametrize(("rank", "ranks", "expected", "of"), [(0, 1, 0, 2), (0, 2, 1, 2), (0, 2, 0, 1)])
def test_another_rank_than_the_directory_says_is_not_used(
    rank: int, ranks: int, expected: int, of: int, new_prefill: NewPrefill, new_decode: NewDecode
) -> None:
    decode = new_decode(new_prefill(rank=rank, ranks=ranks).address, pair=RankPair(expected, of, 0, 1))
    said = f"is rank {rank} of {ranks}, the directory says {expected} of {of}"
    with pytest.raises(HandshakeMismatch, match=said):
        decode.peer.connect()


def test_a_layout_that_differs_is_refused_by_name(prefill: Prefill, new_decode: NewDecode) -> None:
    decode = new_decode(prefill.address, layout=replace(LAYOUT, kv_dtype="float16"))
    with pytest.raises(
        HandshakeMismatch, match=r"decode-1 differs in kv_dtype: float16 there, bfloat16 here; .*--dtype"
    ):
        decode.peer.connect()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (reply(version=WIRE_VERSION + 2), "speaks wire version"),
        (reply(layout=make_layout(8, 8)), "differs in owner layers"),
        (lambda request, context: b"\xff\xff", "does not answer with a HandshakeReply"),
        (lambda request, context: b"", "speaks wire version 0"),
    ],
)
def test_an_answer_that_does_not_match_is_refused(
    answer: Callable[[bytes, grpc.ServicerContext], bytes], message: str, new_decode: NewDecode
) -> None:
    with impostor(answer) as address:
        decode = new_decode(address)
        with pytest.raises(HandshakeMismatch, match=f"{address} {message}"):
            decode.peer.connect()


def test_nobody_at_the_address_is_an_error_after_a_while(
    monkeypatch: pytest.MonkeyPatch, new_decode: NewDecode
) -> None:
    monkeypatch.setattr(prefill_peer, "HANDSHAKE_SECONDS", 0.2)
    decode = new_decode("127.0.0.1:1")
    with pytest.raises(grpc.RpcError):
        decode.peer.connect()


def test_a_peer_with_a_lifetime_that_is_not_known_is_refused(new_decode: NewDecode) -> None:
    message = wire.HandshakeReply.FromString(reply()(b"", None))  # type: ignore[arg-type]
    message.layout.sections[0].lifetime = 77  # type: ignore[assignment]
    with impostor(lambda request, context: message.SerializeToString()) as address:
        decode = new_decode(address)
        with pytest.raises(HandshakeMismatch, match="lifetime 77"):
            decode.peer.connect()


def test_a_window_that_differs_is_refused(new_prefill: NewPrefill, new_decode: NewDecode) -> None:
    prefill = new_prefill(layout=HYBRID)
    full, window, state = HYBRID.sections
    other = replace(HYBRID, sections=(full, replace(window, window=5), state))
    decode = new_decode(prefill.address, layout=other)
    with pytest.raises(HandshakeMismatch, match=r"decode-1 differs in what owner layers store: .*window=5.*window=4"):
        decode.peer.connect()


# What a peer must not believe


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([b"nonsense"], "sent something else than frames"),
        ([b""], "sent something else than frames"),
        ([encode_frame(END)[:-1]], "sent something else than frames"),
        ([], "ended without an end frame"),
    ],
)
def test_a_stream_that_is_none_ends_with_a_reason(messages: list[bytes], reason: str, new_decode: NewDecode) -> None:
    good = frame(Piece(0, 0, 1, 0, 12))
    with impostor(reply(), lambda request, context: iter([encode_frame(good), *messages])) as address:
        decode = new_decode(address)
        decode.peer.connect()
        decode.ask()
        assert decode.piece().frame == good
        ended = decode.ended()
        assert ended.end is None
        assert reason in ended.error
        assert decode.staging.used == 0
