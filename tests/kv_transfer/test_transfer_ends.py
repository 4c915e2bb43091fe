"""Transfers that end before everything has been sent: whoever ends them, the other side hears of it in time."""

import signal
import subprocess
import sys
from pathlib import Path

import grpc
import pytest

from kv_transfer.layout import Piece
from kv_transfer.prefill_peer import TransferEnded
from tests.kv_transfer.connection import Decode, NewDecode, Prefill, eventually, frame


def test_the_receivers_cancel_reaches_the_sender_within_a_second(prefill: Prefill, decode: Decode) -> None:
    transfer = decode.ask()
    job = prefill.job()
    job.stream.put(frame(Piece(0, 0, 1, 0, 12)))
    decode.piece()
    assert not job.stream.cancelled
    transfer.cancel()
    assert eventually(lambda: job.stream.cancelled, seconds=1.0)
    ended = decode.ended(seconds=1.0)
    assert ended.end is None
    assert not ended.busy
    # The connection serves the next request.
    decode.ask(name="next")
    assert prefill.job().name.request_id == "next"


@pytest.mark.parametrize(
    ("code", "busy"), [(grpc.StatusCode.INTERNAL, False), (grpc.StatusCode.RESOURCE_EXHAUSTED, True)]
)
def test_the_senders_failure_reaches_the_receiver(
    prefill: Prefill, decode: Decode, code: grpc.StatusCode, busy: bool
) -> None:
    decode.ask(epoch=5)
    job = prefill.job()
    job.stream.put(frame(Piece(0, 0, 1, 0, 12)))
    job.stream.fail(code, "out of luck")
    decode.piece()
    assert decode.ended() == TransferEnded("r", 5, None, f"{prefill.address}: {code.name}: out of luck", busy)
    assert eventually(lambda: job.stream.cancelled)


def test_a_transfer_that_takes_too_long_ends_on_both_sides(prefill: Prefill, decode: Decode) -> None:
    decode.ask(timeout=0.2)
    job = prefill.job()
    ended = decode.ended(seconds=2.0)
    assert ended.end is None
    assert "DEADLINE_EXCEEDED" in ended.error
    assert eventually(lambda: job.stream.cancelled, seconds=1.0)


def test_closing_the_peer_ends_its_transfers_on_both_sides(prefill: Prefill, decode: Decode) -> None:
    decode.ask()
    job = prefill.job()
    decode.peer.close()
    assert decode.ended(seconds=2.0).end is None
    assert eventually(lambda: job.stream.cancelled, seconds=1.0)


def test_a_receiver_that_falls_silent_is_given_up_while_its_connection_stands(prefill: Prefill, decode: Decode) -> None:
    decode.ask()
    job = prefill.job()
    # It asks for the pulse, so it is listened for.
    assert eventually(lambda: any(one.silence is not None for one in prefill.server._receivers._receivers.values()))
    assert decode.peer._pulse is not None
    decode.peer._pulse.close()
    assert eventually(lambda: job.stream.cancelled, seconds=5.0)
    # It is told, should it go on one day.
    ended = decode.ended(seconds=2.0)
    assert (ended.end, ended.busy) == (None, False)


def test_a_server_that_stops_ends_its_transfers(prefill: Prefill, decode: Decode) -> None:
    decode.ask()
    prefill.job()
    prefill.server.stop(0.0)
    ended = decode.ended(seconds=2.0)
    assert ended.end is None
    assert prefill.address in ended.error


DOOMED = """
import signal, sys
from kv_transfer.frame import PieceFrame
from kv_transfer.layout import Piece
from kv_transfer.prefill_server import PrefillServer
from tests.kv_transfer.layouts import LAYOUT

def accept(job):
    job.stream.put(PieceFrame(job.name.epoch, Piece(0, 0, 1, 0, 12), memoryview(bytes(96))))

server = PrefillServer(LAYOUT, "prefill-1", 4, accept, host="127.0.0.1")
server.start()
print(server.port, flush=True)
signal.pause()
"""


def test_a_server_that_is_killed_in_the_middle_is_noticed_within_two_seconds(new_decode: NewDecode) -> None:
    root = Path(__file__).parents[2]
    with subprocess.Popen([sys.executable, "-c", DOOMED], cwd=root, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        decode = new_decode(f"127.0.0.1:{int(process.stdout.readline())}")
        try:
            decode.peer.connect()
            decode.ask()
            assert decode.piece().frame.piece == Piece(0, 0, 1, 0, 12)
            process.send_signal(signal.SIGKILL)
            ended = decode.ended(seconds=2.0)
            assert ended.end is None
            assert "UNAVAILABLE" in ended.error
            assert not ended.busy
        finally:
            process.kill()
