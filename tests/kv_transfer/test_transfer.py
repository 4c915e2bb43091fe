"""Transfers that go well, and what holds a sender back."""

import time
from dataclasses import replace

from kv_transfer.frame import EndFrame, PieceFrame
from kv_transfer.layout import Piece, SlotRange
from kv_transfer.ledger import Ledger
from kv_transfer.manifest import Manifest
from kv_transfer.plan import plan_pieces, whole_section
from kv_transfer.prefill_peer import PieceArrived, TransferEnded
from kv_transfer.prefill_server import TransferName
from kv_transfer.rank_pair import RankPair
from tests.kv_transfer.connection import END, MIB, TOKENS, Decode, NewDecode, NewPrefill, Prefill, eventually, frame
from tests.kv_transfer.layouts import HYBRID, LAYOUT


def test_a_complete_transfer(prefill: Prefill, decode: Decode) -> None:
    assert decode.peer.incarnation == "prefill-1"
    assert decode.peer.max_streams == 4

    decode.ask(name="request", epoch=7, lacking=[(3, 12)], cache_salt="salt", timeout_ms=1500)
    job = prefill.job()
    assert job.name == TransferName("decode-1", "request", 7)
    assert (job.receivers, job.token_ids, job.lacking) == (1, TOKENS, (SlotRange(3, 12),))
    assert (job.cache_salt, job.timeout) == ("salt", 1.5)

    ledger = Ledger(Manifest("request", 7, job.lacking, LAYOUT))
    pieces = list(plan_pieces(LAYOUT, whole_section(LAYOUT, 0, job.lacking[0]), max_piece_bytes=72))
    for piece in pieces:
        job.stream.put(frame(piece, epoch=7))
    end = replace(END, epoch=7)
    job.stream.put(end)
    for piece in pieces:
        arrived = decode.piece()
        assert arrived == PieceArrived("request", frame(piece, epoch=7))
        ledger.check(arrived.frame.piece, arrived.frame.payload.nbytes)
        ledger.record(piece)
    assert decode.ended() == TransferEnded("request", 7, end, "the stream ended without an end frame")
    assert ledger.complete
    assert decode.staging.used == 0


def test_a_transfer_of_tokens_a_window_and_a_state(new_prefill: NewPrefill, new_decode: NewDecode) -> None:
    prefill = new_prefill(layout=HYBRID)
    decode = new_decode(prefill.address, layout=HYBRID)
    decode.peer.connect()
    # Of a prompt of 13 tokens the window of 4 still reaches 9, 10 and 11.
    decode.ask(lacking=[(5, 12), (9, 12), (0, 1)])
    job = prefill.job()
    assert job.lacking == (SlotRange(5, 12), SlotRange(9, 12), SlotRange(0, 1))

    ledger = Ledger(Manifest("r", 1, job.lacking, HYBRID))
    sections = [whole_section(HYBRID, index, slots) for index, slots in enumerate(job.lacking)]
    pieces = [piece for whole in sections for piece in plan_pieces(HYBRID, whole, 60)]
    for piece in pieces:
        job.stream.put(frame(piece, layout=HYBRID))
    job.stream.put(END)
    for piece in pieces:
        arrived = decode.piece()
        assert arrived.frame == frame(piece, layout=HYBRID)
        ledger.check(arrived.frame.piece, arrived.frame.payload.nbytes)
        ledger.record(piece)
    assert decode.ended().end == END
    assert ledger.complete
    assert ledger.received_bytes == 7 * (8 + 16) + 3 * 4 + (100 + 50)


def test_a_rank_attaches_to_a_transfer_and_says_nothing_of_its_prompt(
    new_prefill: NewPrefill, new_decode: NewDecode
) -> None:
    """Each of two prefill ranks has one of the two heads; a decode replica that is not split needs both."""
    streams = []
    for rank in range(2):
        prefill = new_prefill(rank=rank, ranks=2)
        decode = new_decode(prefill.address, pair=RankPair(rank, 2, 0, 1))
        decode.peer.connect()
        decode.ask(name="request", epoch=3)
        streams.append((prefill, decode, decode.peer.passing.layout))
    (first, _, _), (second, decode, passing) = streams
    assert first.job().name == TransferName("decode-1", "request", 3)
    attached = second.attached()
    assert (attached.name, attached.receiver) == (TransferName("decode-1", "request", 3), 0)

    piece = frame(Piece(0, 0, 3, 0, 12), epoch=3, layout=passing)
    assert piece.payload.nbytes == 3 * 12 * 8 // 2
    attached.stream.put(piece)
    attached.stream.put(replace(END, epoch=3))
    assert decode.piece() == PieceArrived("request", piece, sender=1)
    ended = decode.ended()
    assert (ended.end, ended.sender) == (replace(END, epoch=3), 1)


def test_every_rank_of_a_decode_replica_has_a_stream_and_the_first_brings_the_prompt(
    prefill: Prefill, new_decode: NewDecode
) -> None:
    for rank in (1, 0):
        decode = new_decode(prefill.address, pair=RankPair(0, 1, rank, 2))
        decode.peer.connect()
        decode.ask()
        if rank:
            attached = prefill.attached()
            assert (attached.name, attached.receiver) == (TransferName("decode-1", "r", 1), 1)
        else:
            job = prefill.job()
            assert (job.name, job.receivers, job.token_ids) == (TransferName("decode-1", "r", 1), 2, TOKENS)


def test_many_transfers_share_a_connection_without_mixing(prefill: Prefill, decode: Decode) -> None:
    # Three at a time, over and over: a stream that has ended makes room for another.
    for epoch in range(0, 12, 3):
        for number in range(3):
            decode.ask(name=f"r{epoch + number}", epoch=epoch + number)
        jobs = [prefill.job() for _ in range(3)]
        for layer in range(3):
            for job in jobs:
                job.stream.put(frame(Piece(0, layer, layer + 1, 0, 12), job.name.epoch))
        for job in jobs:
            job.stream.put(replace(END, epoch=job.name.epoch))
        seen: dict[str, list[PieceFrame]] = {}
        ended: dict[tuple[str, int], EndFrame | None] = {}
        while len(ended) < 3:
            event = decode.event()
            if isinstance(event, PieceArrived):
                seen.setdefault(event.request_id, []).append(event.frame)
            else:
                ended[event.request_id, event.epoch] = event.end
        assert ended == {(job.name.request_id, job.name.epoch): replace(END, epoch=job.name.epoch) for job in jobs}
        for job in jobs:
            assert seen[job.name.request_id] == [frame(Piece(0, i, i + 1, 0, 12), job.name.epoch) for i in range(3)]


def test_the_kernel_counts_little_more_than_the_payload(prefill: Prefill, decode: Decode) -> None:
    assert prefill.server.socket_bytes.read() < 2000  # the handshake
    payload = memoryview(bytes(256 << 10))
    decode.ask()
    job = prefill.job()
    for layer in range(16):
        job.stream.put(PieceFrame(1, Piece(0, layer, layer + 1, 0, 12), payload))
    job.stream.put(END)
    for _ in range(16):
        decode.piece()
    assert decode.ended().end == END
    assert 4 * MIB < prefill.server.socket_bytes.read() < 1.01 * 4 * MIB


# Back-pressure


def test_a_receiver_that_does_not_take_stops_the_sender(prefill: Prefill, new_decode: NewDecode) -> None:
    decode = new_decode(prefill.address, staged=3 * MIB)
    decode.peer.connect()
    payload = memoryview(bytes(MIB))
    for name in ("a", "b"):
        decode.ask(name=name)
    jobs = [prefill.job() for _ in range(2)]
    for job in jobs:
        for layer in range(60):
            job.stream.put(PieceFrame(1, Piece(0, layer, layer + 1, 0, 12), payload))
        job.stream.put(END)

    def queued() -> int:
        return sum(job.stream.queued_bytes for job in jobs)

    # Buffers on the way fill up; then nothing moves any more, and most has not left the sender.
    def stands_still() -> bool:
        before = queued()
        time.sleep(0.2)
        return queued() == before < 120 * MIB and decode.waiting_events == 3

    assert eventually(stands_still)
    assert queued() > 40 * MIB
    assert decode.staging.used == 3 * MIB
    # Everything arrives once the receiver takes it, never more than the budget at a time.
    arrived = {"a": 0, "b": 0}
    ended = 0
    while ended < 2:
        event = decode.event()
        assert decode.staging.used <= 3 * MIB
        if isinstance(event, PieceArrived):
            assert event.frame.piece.layer_begin == arrived[event.request_id]
            arrived[event.request_id] += 1
            decode.staging.give_back(event.frame.payload.nbytes)
        else:
            assert event.end == END
            ended += 1
    assert arrived == {"a": 60, "b": 60}
    assert queued() == 0


def test_cancelling_frees_a_reader_that_waits_for_room(prefill: Prefill, new_decode: NewDecode) -> None:
    decode = new_decode(prefill.address, staged=100)
    decode.peer.connect()
    transfer = decode.ask()
    job = prefill.job()
    for token in range(8):
        job.stream.put(frame(Piece(0, 0, 3, token, token + 4)))
    assert isinstance(decode.event(), PieceArrived)
    assert decode.staging.used == 96
    assert eventually(lambda: decode.readers_waiting == 1)
    transfer.cancel()
    assert decode.ended(seconds=1.0).end is None
    assert eventually(lambda: job.stream.cancelled, seconds=1.0)
    assert decode.staging.used == 96  # the piece that was handed over
