import socket
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.channel_options import HANDSHAKE_METHOD, PREFILL_METHOD
from kv_transfer.cluster_token import HEADER, ClusterToken, ClusterTokenError, metadata_of
from kv_transfer.handshake import HandshakeMismatch
from tests.kv_transfer.connection import NewDecode, NewPrefill, prefill_request
from tests.strangers import HTTP2, SETTINGS

OURS, THEIRS = ClusterToken("our-own-canary-token"), ClusterToken("some-other-canary-token")


@pytest.mark.parametrize("value", ["", "short", "with a space in it", "ümlaute-im-geheimnis", "line\nbreak-in-a-token"])
def test_a_token_that_cannot_be_used_is_refused_without_being_shown(value: str) -> None:
    with pytest.raises(ClusterTokenError) as refusal:
        ClusterToken(value)
    assert not value or value not in str(refusal.value)


def test_a_token_is_never_shown() -> None:
    assert OURS.value not in repr(OURS) + str(OURS)


def test_a_token_is_read_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(f"{OURS.value}\n")
    assert ClusterToken.read(file) == OURS
    file.write_text("short")
    with pytest.raises(ClusterTokenError, match=r"--cluster-token-file .*at least 16"):
        ClusterToken.read(file)
    file.write_bytes(b"\xff" * 32)
    with pytest.raises(ClusterTokenError, match="not text"):
        ClusterToken.read(file)
    with pytest.raises(ClusterTokenError, match="No such file"):
        ClusterToken.read(tmp_path / "nowhere")


def test_new_tokens_differ() -> None:
    assert len({ClusterToken.new().value for _ in range(100)}) == 100


@given(st.lists(st.tuples(st.sampled_from([HEADER, "user-agent"]), st.text() | st.binary())))
def test_only_the_token_fits(metadata: list[tuple[str, str | bytes]]) -> None:
    assert OURS.problem(metadata) is not None
    fits = OURS.problem([*metadata, *OURS.metadata]) is None
    assert fits == (HEADER not in dict(metadata))


@pytest.mark.parametrize("token", [None, THEIRS])
def test_strangers_are_refused_before_anything_of_a_call_is_looked_at(
    token: ClusterToken | None, new_prefill: NewPrefill
) -> None:
    prefill = new_prefill(token=OURS)
    with grpc.insecure_channel(prefill.address) as channel:
        for method in (HANDSHAKE_METHOD, PREFILL_METHOD, "/crosskv.kv.v1.KVTransfer/Nothing"):
            for call in (channel.unary_unary(method), channel.unary_stream(method)):
                with pytest.raises(grpc.RpcError) as refusal:
                    list(call(b"\xff" * 100, timeout=20, metadata=metadata_of(token)))
                assert refusal.value.code() is grpc.StatusCode.UNAUTHENTICATED
                assert "--cluster-token-file" in refusal.value.details()
                assert OURS.value not in refusal.value.details()
    assert prefill.untouched


@pytest.mark.parametrize("token", [None, THEIRS])
def test_a_peer_says_what_keeps_it_out(
    token: ClusterToken | None, new_prefill: NewPrefill, new_decode: NewDecode
) -> None:
    prefill = new_prefill(token=OURS)
    with pytest.raises(HandshakeMismatch, match=rf"{prefill.address}.*--cluster-token-file"):
        new_decode(prefill.address, token=token).peer.connect()


def test_with_the_token_everything_is_as_without(new_prefill: NewPrefill, new_decode: NewDecode) -> None:
    prefill = new_prefill(token=OURS)
    decode = new_decode(prefill.address, token=OURS)
    decode.peer.connect()
    transfer = decode.ask()
    assert prefill.job().token_ids == tuple(prefill_request().token_ids)
    transfer.cancel()
    assert decode.ended().end is None


def test_a_connection_that_says_nothing_is_dropped(new_prefill: NewPrefill) -> None:
    """Before it is HTTP/2 by the handshake's limit, afterwards because it does not answer pings."""
    prefill = new_prefill(token=OURS)
    said = (b"", HTTP2[:10], HTTP2, HTTP2 + SETTINGS)
    with ExitStack() as stack:
        silent = [stack.enter_context(socket.create_connection(("127.0.0.1", prefill.server.port))) for _ in said]
        for connection, words in zip(silent, said, strict=True):
            connection.sendall(words)
            connection.settimeout(40)
        for connection, words in zip(silent, said, strict=True):
            try:
                while connection.recv(4096):
                    pass
            except ConnectionResetError:
                pass
            except TimeoutError:
                pytest.fail(f"{words!r} and then nothing is kept for ever")
