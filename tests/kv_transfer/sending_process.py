"""A prefill replica without an engine, in a process of its own: a real server over process groups, payloads by formula.

What it does with a job follows from the request's name: ``stalls-N`` sends N pieces and nothing more, ``pair`` nothing
before another one of that name comes, whose pieces it then sends in turn with its own; any other sends everything.
"""

import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Self

import torch

from kv_transfer.frame import EndFrame, PieceFrame
from kv_transfer.group_sender import GroupSender
from kv_transfer.layout import CacheLayout, Piece, SlotRange
from kv_transfer.pair_group import GroupSettings
from kv_transfer.plan import plan_pieces, whole_section
from kv_transfer.prefill_server import PrefillJob, PrefillServer, RankStream
from tests.kv_transfer.layouts import make_layout

ODD = make_layout(1, 3, 1021, 65537)
MAX_PIECE_BYTES = 40
SETTINGS = GroupSettings("127.0.0.1", torch.device("cpu"))
_ROOT = Path(__file__).resolve().parents[2]


def payload_of(piece: Piece, epoch: int, layout: CacheLayout = ODD) -> bytes:
    """Bytes that tell a piece and an epoch from others."""
    size = piece.payload_bytes(layout)
    seed = 7 * piece.slot_begin + 31 * piece.layer_begin + 101 * epoch
    return bytes((torch.arange(size) * 37 + seed).remainder(251).to(torch.uint8).numpy())


def pieces_of(lacking: Sequence[SlotRange]) -> list[Piece]:
    """What is sent of each section: 12 and 36 bytes, then 12 times 1021 and 12 times 65537."""
    sections = [whole_section(ODD, index, slots) for index, slots in enumerate(lacking)]
    return [piece for whole in sections for piece in plan_pieces(ODD, whole, MAX_PIECE_BYTES)]


class _Sender:
    def __init__(self) -> None:
        self._pair: list[PrefillJob] = []
        self._lock = threading.Lock()

    def accept(self, job: PrefillJob | RankStream) -> None:
        assert isinstance(job, PrefillJob)
        jobs = [job]
        if job.name.request_id == "pair":
            # Calls come in any order.
            with self._lock:
                self._pair.append(job)
                if len(self._pair) < 2:
                    return
                jobs, self._pair = self._pair, []
        for turn in zip(*(self._frames(job) for job in jobs), strict=True):
            for job_in_turn, frame in zip(jobs, turn, strict=True):
                if frame is not None:
                    job_in_turn.stream.put(frame)

    def _frames(self, job: PrefillJob) -> Iterator[PieceFrame | EndFrame | None]:
        pieces = pieces_of(job.lacking)
        name, epoch = job.name.request_id, job.name.epoch
        stalls = int(name.split("-")[1]) if name.startswith("stalls") else None
        for piece in pieces[:stalls]:
            yield PieceFrame(epoch, piece, memoryview(bytearray(payload_of(piece, epoch))))
        yield None if stalls is not None else EndFrame(epoch, 0, len(pieces), 0, 0.0, 0.0)


def serve() -> None:
    """Print the port, then print what is asked for until the parent is gone."""
    torch.set_num_threads(1)
    server = PrefillServer(ODD, "prefill-1", 4, _Sender().accept, host="127.0.0.1", sender=GroupSender(SETTINGS))
    server.start()
    print(server.port, flush=True)
    for _ in sys.stdin:
        threads = sum(thread.name == "kv-group-out" for thread in threading.enumerate())
        print(server.socket_bytes.read(), threads, flush=True)


class SendingProcess:
    """The process and what can be done to it."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", "from tests.kv_transfer.sending_process import serve; serve()"],
            cwd=_ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.address = f"127.0.0.1:{self._line()}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.communicate()

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def counts(self) -> tuple[int, int]:
        """Bytes on its sockets, and groups that still have a thread."""
        assert self._process.stdin is not None
        self._process.stdin.write("?\n")
        self._process.stdin.flush()
        wire_bytes, threads = self._line().split()
        return int(wire_bytes), int(threads)

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()
