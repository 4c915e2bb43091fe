"""Where copies between pages and payloads run: at once on a CPU, on streams of their own on a GPU.

Made with a runner and used on its engine's thread. On a GPU the engine's stream computes, a second one gathers and
scatters tokens, and a third one moves payloads between the GPU and pinned memory of the host. Whoever goes on waits for
events on the GPU, and the host for nothing: it waits only in the thread that sends a payload, until that one is there.
Pages are given to the next user in the order of streams: what computes after a copy runs behind it on the GPU.

The GPU's side has not been run on one.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch

from kv_transfer.frame import Wait, at_once


class PageStream(Protocol):
    """See the module."""

    def touching_pages(self) -> AbstractContextManager[None]:
        """Within it pages are read or written, behind all that the engine computed or copied so far."""
        ...

    def settle(self) -> None:
        """Before the engine itself touches pages: what it does next runs behind all copies so far."""
        ...

    def to_host(self, packed: torch.Tensor) -> torch.Tensor:
        """Bytes that were gathered, for the host; they are there when ``staged`` says so."""
        ...

    def to_device(self, payload: memoryview) -> torch.Tensor:
        """Bytes for the device's pages: a copy, or on a CPU ``payload`` itself."""
        ...

    def staged(self) -> Wait:
        """What returns when everything that ``to_host`` gave so far is there. Can be called on any thread."""
        ...


class InLine:
    """A CPU's ``PageStream``: nothing runs beside anything."""

    def touching_pages(self) -> AbstractContextManager[None]:
        """At once."""
        return nullcontext()

    def settle(self) -> None:
        """Everything is over."""

    def to_host(self, packed: torch.Tensor) -> torch.Tensor:
        """It is there."""
        return packed

    def to_device(self, payload: memoryview) -> torch.Tensor:
        """Its own memory."""
        return torch.frombuffer(payload, dtype=torch.uint8)

    def staged(self) -> Wait:
        """At once."""
        return at_once


class GpuStreams:
    """A GPU's ``PageStream``."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pages = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._host = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._touched = torch.cuda.Event()  # type: ignore[no-untyped-call]

    @contextmanager
    def touching_pages(self) -> Iterator[None]:
        """On the second stream."""
        self._pages.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._pages):
            yield
        self._touched.record(self._pages)

    def settle(self) -> None:
        """Not behind payloads on their way to the host: they are copies."""
        torch.cuda.current_stream(self._device).wait_event(self._touched)

    def to_host(self, packed: torch.Tensor) -> torch.Tensor:
        """Into pinned memory, which PyTorch uses again when both the copy is over and nobody holds it."""
        host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
        self._host.wait_event(self._touched)
        with torch.cuda.stream(self._host):
            host.copy_(packed, non_blocking=True)
        packed.record_stream(self._host)
        return host

    def to_device(self, payload: memoryview) -> torch.Tensor:
        """Through pinned memory."""
        pinned = torch.frombuffer(payload, dtype=torch.uint8).pin_memory()
        with torch.cuda.stream(self._host):
            packed = pinned.to(self._device, non_blocking=True)
        self._pages.wait_stream(self._host)
        packed.record_stream(self._pages)
        return packed

    def staged(self) -> Callable[[], None]:
        """An event behind the last payload; whoever waits for it does not spin."""
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(self._host)
        return event.synchronize


def page_stream(device: torch.device) -> PageStream:
    """That of a device."""
    return GpuStreams(device) if device.type == "cuda" else InLine()
