"""Where front ends connect: the gRPC service that carries requests to the engine and tokens back.

Runs on an event loop in a thread of its own. It parses, queues and serialises; it never touches KV, and the engine's
thread never waits for it.
"""

import asyncio
import itertools
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from kv_transfer.authentication import aio_token_checks
from kv_transfer.cluster_token import ClusterToken
from kv_transfer.heartbeat import BEAT_SECONDS, LOOK_SECONDS, SILENCE_SECONDS, Silence
from kv_transfer.strangers import Strangers
from worker.events import Aborted, CacheCleared, ClientArrived, ClientGone, StatusWanted, Submitted
from worker.wire import engine_pb2 as wire
from worker.wire import engine_pb2_grpc

log = logging.getLogger(__name__)

_Context = grpc.aio.ServicerContext[Any, Any]

SessionEvent = Submitted | Aborted | ClientArrived | ClientGone | StatusWanted | CacheCleared

_OPTIONS = (
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.server_handshake_timeout_ms", 10_000),
    # A connection that leads nowhere is dropped after so long. Without the last, gRPC waits for a minute.
    ("grpc.keepalive_time_ms", 2_000),
    ("grpc.keepalive_timeout_ms", 4_000),
    ("grpc.http2.ping_timeout_ms", 4_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
)


class SessionClient:
    """One front end's session. Messages from the engine's thread are joined while the event loop is busy."""

    def __init__(self, client_id: str, loop: asyncio.AbstractEventLoop) -> None:
        self.client_id = client_id
        self._loop = loop
        self._messages: list[wire.EngineMessage] = []
        self._ready = asyncio.Event()
        self.closed = False
        self._silence: Silence | None = None
        self.failure: str | None = None

    def send(self, message: wire.EngineMessage) -> None:
        """Queue a message; called on the engine's thread."""
        self._loop.call_soon_threadsafe(self._append, message)

    def beat(self) -> None:
        """Queue a message that says nothing but that this process runs; called on the event loop."""
        if not self._messages:
            self._append(wire.EngineMessage())

    def heard(self, *, beat: bool) -> None:
        """The front end has spoken. Only one that also speaks when it has nothing to say is listened for."""
        if self._silence is None and beat:
            self._silence = Silence()
        if self._silence is not None:
            self._silence.heard()

    def look(self, now: float) -> bool:
        """Whether it has been silent for too long. To be asked every ``LOOK_SECONDS``, on the event loop."""
        return self._silence is not None and self._silence.look(now)

    def close(self, failure: str | None = None) -> None:
        """No more messages; called on the event loop. With a ``failure``, that is how the session ends."""
        self.closed = True
        self.failure = self.failure or failure
        self._ready.set()

    async def messages(self) -> AsyncIterator[wire.EngineMessage]:
        """Messages until the session is closed."""
        while True:
            await self._ready.wait()
            self._ready.clear()
            messages, self._messages = self._messages, []
            if messages:
                joined = messages[0]
                for message in messages[1:]:
                    # Merged, a number that has become 0 would keep its old value.
                    joined.ClearField("load")
                    joined.MergeFrom(message)
                yield joined
            if self.closed:
                return

    def _append(self, message: wire.EngineMessage) -> None:
        self._messages.append(message)
        self._ready.set()


class _Servicer(engine_pb2_grpc.EngineServicer):
    def __init__(self, deliver: Callable[[SessionEvent], None], strangers: Strangers) -> None:
        self._deliver = deliver
        self._strangers = strangers
        self._numbers = itertools.count()
        self._clients: set[SessionClient] = set()
        self._failure: str | None = None

    def hang_up(self, failure: str) -> None:
        """End every session, and every later one, as failed; called on the event loop."""
        self._failure = failure
        for client in self._clients:
            client.close(failure)

    async def beat(self) -> None:
        """Let every front end know that this process runs. Never returns."""
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            for client in self._clients:
                client.beat()

    async def listen(self) -> None:
        """Give up what front ends have asked for that do not speak any more. Never returns."""
        clock = asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            for client in [client for client in self._clients if client.look(clock())]:
                log.warning("a front end was silent for %s s: its requests are aborted", SILENCE_SECONDS)
                self._leave(client)
                # If it goes on one day, it learns that it has to ask again.
                client.close(f"silent for {SILENCE_SECONDS} s")

    def _leave(self, client: SessionClient) -> None:
        if client in self._clients:
            self._clients.remove(client)
            self._deliver(ClientGone(client))

    async def Session(  # noqa: N802 (the contract's name)
        self, request_iterator: AsyncIterator[wire.ClientMessage], context: _Context
    ) -> AsyncIterator[wire.EngineMessage]:
        if self._failure is not None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, self._failure)
        client = SessionClient(f"session-{next(self._numbers)}", asyncio.get_running_loop())
        self._clients.add(client)
        self._deliver(ClientArrived(client))
        reader = asyncio.create_task(self._read(request_iterator, client))
        try:
            async for message in client.messages():
                yield message
            if client.failure is not None:
                await context.abort(grpc.StatusCode.UNAVAILABLE, client.failure)
        finally:
            reader.cancel()
            self._leave(client)

    async def _read(self, requests: AsyncIterator[wire.ClientMessage], client: SessionClient) -> None:
        try:
            async for message in requests:
                if client.closed:
                    return
                kind = message.WhichOneof("message")
                client.heard(beat=kind is None)
                match kind:
                    case "submit":
                        self._deliver(Submitted(client, message.submit, time.monotonic()))
                    case "abort":
                        self._deliver(Aborted(client, message.abort.request_id))
        finally:
            client.close()

    async def Status(self, request: wire.StatusRequest, context: _Context) -> wire.StatusReply:  # noqa: N802
        del request, context
        loop = asyncio.get_running_loop()
        future: asyncio.Future[wire.StatusReply] = loop.create_future()

        def settle(status: wire.StatusReply) -> None:
            if not future.done():
                future.set_result(status)

        def reply(status: wire.StatusReply) -> None:
            loop.call_soon_threadsafe(settle, status)

        self._deliver(StatusWanted(reply))
        status = await future
        status.counters.strangers = self._strangers.calls
        return status


class SessionServer:
    """The service and its thread. ``token`` is what callers must have, ``strangers`` counts those who have not."""

    def __init__(
        self,
        deliver: Callable[[SessionEvent], None],
        *,
        host: str,
        port: int = 0,
        token: ClusterToken | None = None,
        strangers: Strangers | None = None,
    ) -> None:
        strangers = Strangers() if strangers is None else strangers
        self._address = f"{host}:{port}"
        self._checks = aio_token_checks(token, strangers)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="sessions", daemon=True)
        self._server: grpc.aio.Server | None = None
        self._servicer = _Servicer(deliver, strangers)
        self._tasks: list[asyncio.Task[None]] = []
        self.port = 0

    def start(self) -> None:
        """Bind and begin to serve; ``port`` is known afterwards."""
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()

    def hang_up(self, failure: str) -> None:
        """End every session at once, and every later one, as failed."""
        self._loop.call_soon_threadsafe(self._servicer.hang_up, failure)

    def stop(self, grace: float) -> None:
        """End every session after ``grace`` seconds."""
        asyncio.run_coroutine_threadsafe(self._stop(grace), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    async def _start(self) -> None:
        self._server = grpc.aio.server(options=_OPTIONS, interceptors=self._checks)
        engine_pb2_grpc.add_EngineServicer_to_server(self._servicer, self._server)  # type: ignore[no-untyped-call]
        self.port = self._server.add_insecure_port(self._address)
        await self._server.start()
        self._tasks = [asyncio.create_task(self._servicer.beat()), asyncio.create_task(self._servicer.listen())]

    async def _stop(self, grace: float) -> None:
        for task in self._tasks:
            task.cancel()
        if self._server is not None:
            await self._server.stop(grace)
