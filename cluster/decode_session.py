"""One front end's connection to one decode replica: a single stream that carries all of its requests.

Opened when the replica appears in the directory, closed when it disappears or the stream breaks. A broken stream or a
silent replica ends every request on it; who asked decides whether to try elsewhere.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Sequence

import grpc

from cluster.engine_client import EngineUnavailable
from kv_transfer.cluster_token import ClusterToken, metadata_of
from kv_transfer.heartbeat import SILENCE_SECONDS, Silence
from worker.replica_record import ReplicaRecord
from worker.wire import engine_pb2_grpc
from worker.wire.engine_pb2 import Abort, ClientMessage, EngineMessage, Load, Output, StatusReply, StatusRequest, Submit

log = logging.getLogger(__name__)

STATUS_SECONDS = 2.0

_OPTIONS = (
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 2_000),
    # This is what ends a connection whose pings are not answered; without it gRPC waits for a minute.
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.use_local_subchannel_pool", 1),
)


class ReplicaLost(EngineUnavailable):
    """The session with the replica has broken, and with it everything that the replica was asked for."""


class Call:
    """What was asked for in one go on a session: outputs as they come, until the session breaks.

    ``started``: it is no longer queued.
    """

    def __init__(self, caller: str) -> None:
        self.caller = caller
        self.started = False
        self._outputs: asyncio.Queue[list[Output] | ReplicaLost] = asyncio.Queue()

    def put(self, outputs: "list[Output] | ReplicaLost") -> None:
        """What the session received."""
        self._outputs.put_nowait(outputs)

    async def take(self) -> list[Output]:
        """The next outputs; raises ``ReplicaLost`` when there will be none."""
        outputs = await self._outputs.get()
        if isinstance(outputs, ReplicaLost):
            raise outputs
        return outputs


class DecodeSession:
    """See the module. Everything runs on one event loop."""

    def __init__(self, record: ReplicaRecord, token: ClusterToken | None = None) -> None:
        self.record = record
        self._metadata = metadata_of(token)
        self.load = Load()
        self.open_requests = 0
        self._submits = 0
        self._acknowledged = 0
        self._unstarted: Counter[str] = Counter()
        self._channel = grpc.aio.insecure_channel(record.session_address, options=_OPTIONS)
        self._stub = engine_pb2_grpc.EngineStub(self._channel)  # type: ignore[no-untyped-call]
        self._sending: asyncio.Queue[ClientMessage | None] = asyncio.Queue()
        self._calls: dict[str, Call] = {}
        self._silence = Silence()
        self._silent = False
        self._connected = False
        self._reader = asyncio.create_task(self._read())

    @property
    def usable(self) -> bool:
        """Whether the replica has greeted us, and neither fell silent nor ended the stream."""
        return self._connected and not self._silent and not self._reader.done()

    @property
    def accepting(self) -> bool:
        """Whether it takes new requests: a replica that drains only finishes what it has."""
        return self.usable and not self.load.draining

    @property
    def lost(self) -> bool:
        """Whether it was there and is gone, or silent, without having said that it would go."""
        return self._connected and not self.usable and not self.load.draining

    @property
    def broken(self) -> bool:
        """Whether the stream has ended."""
        return self._reader.done()

    def submit(self, submits: Sequence[Submit]) -> Call:
        """Send submissions of one request, whose outputs are taken together. Raises ``ReplicaLost``."""
        if self.broken:
            raise ReplicaLost("the decode replica is gone")
        call = Call(submits[0].caller)
        self._unstarted[call.caller] += 1
        self._submits += len(submits)
        for submit in submits:
            self._calls[submit.request_id] = call
            self._sending.put_nowait(ClientMessage(submit=submit))
        return call

    def end(self, request_id: str, *, abort: bool) -> None:
        """Forget a submission; ``abort`` tells the replica as well."""
        call = self._calls.pop(request_id, None)
        if call is None:
            return
        self._leave_queue(call)
        if abort and not self.broken:
            self._sending.put_nowait(ClientMessage(abort=Abort(request_id=request_id)))

    def full_for(self, caller: str) -> bool:
        """Whether the replica would refuse a new request of ``caller``, by its last report and what was sent since.

        A full queue still takes one from a caller that has less in it than another, whose last request it gives up.
        """
        limit = self.load.queue_limit
        # An older replica reports no limit; it refuses by itself.
        if not limit or self._waiting < limit:
            return False
        return self._unstarted[caller] + 1 >= max(self._unstarted.values(), default=0)

    @property
    def retry_after(self) -> float:
        """Seconds until those who wait now will have been taken, by the pace of the replica's queue; 0 if unknown."""
        return self._waiting * self.load.queue_ms_per_request / 1e3

    @property
    def _waiting(self) -> int:
        return self.load.waiting_requests + self._submits - self._acknowledged

    def look(self, now: float) -> None:
        """Give up what a replica has that does not speak any more. To be called every ``LOOK_SECONDS``.

        It is told, should it go on one day; then it may be used again.
        """
        if not self._connected or self._silent or not self._silence.look(now):
            return
        self._silent = True
        for request_id in self._calls:
            self._sending.put_nowait(ClientMessage(abort=Abort(request_id=request_id)))
        self._cut_off(f"silent for {SILENCE_SECONDS} s")

    def beat(self) -> None:
        """Let the replica know that this process runs. To be called every ``BEAT_SECONDS``."""
        # What is not taken yet says as much, and a replica that was stopped takes nothing.
        if self._connected and not self.broken and self._sending.empty():
            self._sending.put_nowait(ClientMessage())

    async def status(self) -> StatusReply:
        """The replica's own report; raises ``grpc.RpcError``."""
        reply: StatusReply = await self._stub.Status(StatusRequest(), timeout=STATUS_SECONDS, metadata=self._metadata)
        return reply

    async def close(self) -> None:
        """End the stream."""
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        await self._channel.close()

    async def _outgoing(self) -> AsyncIterator[ClientMessage]:
        while (message := await self._sending.get()) is not None:
            yield message

    async def _read(self) -> None:
        reason = "the replica has closed the session"
        try:
            message: EngineMessage
            async for message in self._stub.Session(self._outgoing(), metadata=self._metadata, wait_for_ready=True):
                self._connected, self._silent = True, False
                self._silence.heard()
                if message.HasField("load"):
                    self.load = message.load
                    self._acknowledged = message.submits
                self._deliver(message)
        except grpc.aio.AioRpcError as error:
            reason = f"{error.code().name}: {error.details()}"
            if error.code() is grpc.StatusCode.UNAUTHENTICATED:
                log.error("%s refuses this front end: %s", self.record.incarnation, error.details())
        finally:
            self._cut_off(reason)

    def _cut_off(self, reason: str) -> None:
        if self._calls:
            log.warning("%s: %d requests cut off: %s", self.record.incarnation, len(self._calls), reason)
        for call in self._calls.values():
            self._leave_queue(call)
            call.put(ReplicaLost(f"the decode replica is gone ({reason})"))
        self._calls.clear()

    def _deliver(self, message: EngineMessage) -> None:
        by_request: dict[str, list[Output]] = {}
        for output in message.outputs:
            by_request.setdefault(output.request_id, []).append(output)
        for request_id, outputs in by_request.items():
            call = self._calls.get(request_id)
            if call is not None:
                self._leave_queue(call)
                call.put(outputs)

    def _leave_queue(self, call: Call) -> None:
        """A call that had no output yet has one, or is over."""
        if call.started:
            return
        call.started = True
        self._unstarted[call.caller] -= 1
        if not self._unstarted[call.caller]:
            del self._unstarted[call.caller]
