"""docs/adding-a-transport.md: its code, as it stands there, between a real server and a real client."""

import zlib
from types import SimpleNamespace

import pytest

from kv_transfer import prefill_peer, prefill_server
from kv_transfer.handshake import HandshakeMismatch
from kv_transfer.layout import Piece
from kv_transfer.prefill_peer import PieceArrived
from tests.docs.documents import REPOSITORY, blocks
from tests.kv_transfer.connection import END, Decode, Prefill, frame
from tests.kv_transfer.layouts import LAYOUT

PAGE = REPOSITORY / "docs" / "adding-a-transport.md"
(CODE,) = (block.content for block in blocks(PAGE) if block.language == "python")
PIECE = Piece(0, 0, 3, 0, 12)


@pytest.fixture
def transport() -> SimpleNamespace:
    names: dict[str, object] = {"__name__": "documented_transport"}
    exec(compile(CODE, str(PAGE), "exec"), names)
    return SimpleNamespace(**names)


@pytest.fixture
def compressing_server(transport: SimpleNamespace, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(prefill_server, "StreamSender", transport.CompressedSender)
    prefill = Prefill()
    yield prefill
    prefill.server.stop(0.0)


@pytest.fixture
def expanding_client(compressing_server: Prefill, transport: SimpleNamespace, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(prefill_peer, "StreamReceiver", lambda staging: transport.CompressedReceiver(staging, LAYOUT))
    decode = Decode(compressing_server.address)
    decode.peer.connect()
    yield decode
    decode.close()


def test_pieces_arrive_as_they_were(compressing_server: Prefill, expanding_client: Decode) -> None:
    expanding_client.ask()
    job = compressing_server.job()
    sent = frame(PIECE)
    job.stream.put(sent)
    job.stream.put(END)
    assert expanding_client.piece() == PieceArrived("r", sent)
    assert expanding_client.ended().end == END
    assert expanding_client.staging.used == 0


@pytest.mark.parametrize("wrong", [b"", b"no zlib", zlib.compress(bytes(10)), zlib.compress(bytes(1 << 20))])
def test_a_piece_that_expands_to_another_size_ends_the_transfer(
    compressing_server: Prefill, expanding_client: Decode, monkeypatch: pytest.MonkeyPatch, wrong: bytes
) -> None:
    monkeypatch.setattr(zlib, "compress", lambda payload, level: wrong)
    expanding_client.ask()
    compressing_server.job().stream.put(frame(PIECE))
    ended = expanding_client.ended()
    assert ended.end is None
    assert "compressed piece" in ended.error
    assert expanding_client.staging.used == 0


def test_another_transport_is_refused_by_name(compressing_server: Prefill) -> None:
    decode = Decode(compressing_server.address)
    try:
        with pytest.raises(HandshakeMismatch, match="zlib"):
            decode.peer.connect()
    finally:
        decode.close()
