"""How a decode step becomes a launch: as a CUDA graph, or as a recording of compiled kernels' calls.

A runner's decode graphs have one of these, which is chosen once by where the model computes.
"""

from collections.abc import Callable
from typing import Final, Protocol

import torch

from kernels.native.recording import Arena, Recording

Launch = Callable[[], torch.Tensor]


class Capture(Protocol):
    """Turns a step into something that computes the same step again from whatever its inputs then hold."""

    def rows(self, rows: int) -> int | None:
        """How many rows a graph has that serves so many; None: it is better to compute them without."""
        ...

    def context(self, longest: int) -> int:
        """Up to how many tokens sequences may have in a graph that serves a step whose longest has so many."""
        ...

    def __call__(self, run: Launch) -> Launch:
        """Raises ``RuntimeError`` if it cannot be captured."""
        ...


class CudaCapture:
    """CUDA graphs on one device; all share their memory, since only one runs at a time."""

    MOST_ROWS: Final = 256
    """Larger batches keep a GPU busy without graphs."""
    SHORTEST_CONTEXT: Final = 1024
    CONTEXT_GROWTH: Final = 4
    """Splits of the longest context are the launch's grid, so a short one must not pay for the longest there may be."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    @classmethod
    def rows(cls, rows: int) -> int | None:
        """Powers of two up to 8, then multiples of 8: a graph for every number would take long to make."""
        if rows > cls.MOST_ROWS:
            return None
        return 1 << (rows - 1).bit_length() if rows <= 8 else -(-rows // 8) * 8

    @classmethod
    def context(cls, longest: int) -> int:
        """The shortest times a power of the growth."""
        context = cls.SHORTEST_CONTEXT
        while context < longest:
            context *= cls.CONTEXT_GROWTH
        return context

    def __call__(self, run: Launch) -> Launch:
        """Once without capture, so that kernels are compiled and libraries have their memory; then for the graph."""
        aside = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(aside):
            run()
        torch.cuda.current_stream(self._device).wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        # Threads of transfers may go on meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            logits = run()

        def launch() -> torch.Tensor:
            graph.replay()
            return logits

        return launch


class NativeCapture:
    """Recordings on the CPU, which share an arena, of sequences with up to ``max_model_len`` tokens."""

    MOST_ROWS: Final = 32
    """With more, what Python takes between kernels is little beside them, and the arena grows with every row."""

    def __init__(self, max_model_len: int) -> None:
        self._max_model_len = max_model_len
        self._arena = Arena()
        self._is_warm = False

    @classmethod
    def rows(cls, rows: int) -> int | None:
        """Exactly as many: a recording takes some milliseconds, and a row for nobody costs time in every step."""
        return rows if rows <= cls.MOST_ROWS else None

    def context(self, longest: int) -> int:
        """The longest that there may be: kernels read how long sequences are when they are called."""
        return self._max_model_len

    def __call__(self, run: Launch) -> Launch:
        """The first time once as it is, so that weights are arranged; then for the recording, without computing."""
        if not self._is_warm:
            run()
            self._is_warm = True
        recording = Recording(self._arena)
        with recording:
            logits = run()

        def launch() -> torch.Tensor:
            recording.play()
            return logits

        return launch
