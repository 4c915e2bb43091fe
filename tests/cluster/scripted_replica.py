"""A decode replica without an engine, which does to its sessions what a test wants: it speaks gRPC on a real socket."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any

import grpc

from kv_transfer.heartbeat import BEAT_SECONDS
from tests.cluster.test_transcript import steps
from worker.config import Role
from worker.replica_record import ReplicaRecord
from worker.wire import engine_pb2 as wire
from worker.wire import engine_pb2_grpc


class ScriptedReplica(engine_pb2_grpc.EngineServicer):
    """Answers every submission with ``steps`` of it, but after ``steps_sent`` of them does something else.

    ``then`` is ``die``, ``hang``, ``fall silent`` or an error to send. Once that has happened it hangs on every later
    submission. While it is not ``silent`` it beats.
    """

    def __init__(self, name: str, *, steps_sent: int = 1000, then: "str | wire.Error" = "hang") -> None:
        self.name = name
        self.submits: list[wire.Submit] = []
        self.aborted: list[str] = []
        self._steps_sent = steps_sent
        self._then = then
        self._server = grpc.aio.server()
        self.silent = False
        self._messages: asyncio.Queue[wire.EngineMessage] = asyncio.Queue()
        engine_pb2_grpc.add_EngineServicer_to_server(self, self._server)
        self._port = self._server.add_insecure_port("127.0.0.1:0")

    @property
    def record(self) -> ReplicaRecord:
        return ReplicaRecord(Role.DECODE, self.name, f"127.0.0.1:{self._port}")

    async def start(self) -> None:
        await self._server.start()

    async def stop(self) -> None:
        await self._server.stop(None)

    async def Session(  # noqa: N802
        self, request_iterator: AsyncIterator[wire.ClientMessage], context: Any
    ) -> AsyncIterator[wire.EngineMessage]:
        reader = asyncio.create_task(self._read(request_iterator))
        yield wire.EngineMessage(load=wire.Load(total_blocks=10, free_blocks=10))
        beating = asyncio.create_task(self._beat())
        try:
            while True:
                yield await self._messages.get()
        finally:
            reader.cancel()
            beating.cancel()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            if not self.silent:
                self._messages.put_nowait(wire.EngineMessage())

    async def _read(self, messages: AsyncIterator[wire.ClientMessage]) -> None:
        async for message in messages:
            match message.WhichOneof("message"):
                case "abort":
                    self.aborted.append(message.abort.request_id)
                case "submit":
                    self.submits.append(message.submit)
                    await self._answer(message.submit, steps(message.submit))

    async def _answer(self, submit: wire.Submit, outputs: Iterable[list[wire.Output]]) -> None:
        for number, step in enumerate(outputs):
            if self._steps_sent == 0:
                return await self._fail(submit)
            self._steps_sent -= 1
            if number == 0:
                step[0].prompt_info.cached_tokens = 1
            self._messages.put_nowait(wire.EngineMessage(outputs=step))
        return None

    async def _fail(self, submit: wire.Submit) -> None:
        match self._then:
            case "hang":
                return
            case "fall silent":
                self.silent = True
            case "die":
                # What was sent before reaches the client first.
                await asyncio.sleep(0.1)
                # Not awaited here, where the end of the session cancels whatever waits.
                self._dying = asyncio.create_task(self.stop())
            case error:
                failed = wire.Output(request_id=submit.request_id, finish_reason=wire.FINISH_REASON_ERROR, error=error)
                self._messages.put_nowait(wire.EngineMessage(outputs=[failed]))
