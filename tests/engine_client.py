"""A client that speaks to a replica as a front end does, and checks that the replica keeps to the protocol."""

import itertools
import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from kv_transfer.cluster_token import ClusterToken, metadata_of
from tests.engine_process import TOKEN
from worker.wire import engine_pb2 as wire
from worker.wire import engine_pb2_grpc

_ANSWER_SECONDS = 120.0
_SETTLE_SECONDS = 20.0


class RequestFailed(Exception):
    """A request ended with an error instead of tokens."""

    def __init__(self, error: wire.Error) -> None:
        super().__init__(f"{wire.ErrorKind.Name(error.kind)}: {error.message}")
        self.kind = error.kind
        self.message = error.message


@dataclass
class Choice:
    """One choice of an answer."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[wire.TokenLogprobs] = field(default_factory=list)
    finish_reason: int = wire.FINISH_REASON_UNSPECIFIED
    stop_token_id: int | None = None


@dataclass
class Answer:
    """Everything that came back for one request."""

    choices: list[Choice]
    prompt_info: wire.PromptInfo

    @property
    def tokens(self) -> list[int]:
        """The only choice's tokens."""
        (choice,) = self.choices
        return choice.tokens


class PendingAnswer:
    """A request on its way. Also checks that the engine keeps to the protocol."""

    def __init__(self, client: "EngineClient", request_id: str, n: int) -> None:
        self._client = client
        self._request_id = request_id
        self._choices = [Choice() for _ in range(n)]
        self._prompt_info: wire.PromptInfo | None = None
        self._failure: Exception | None = None
        self._changed = threading.Condition()

    def result(self, timeout: float = _ANSWER_SECONDS) -> Answer:
        """Wait for the last token. Raises ``RequestFailed``."""
        self._wait(lambda: self._prompt_info is not None and all(c.finish_reason for c in self._choices), timeout)
        assert self._prompt_info is not None
        return Answer(self._choices, self._prompt_info)

    def wait_for_tokens(self, count: int, timeout: float = _ANSWER_SECONDS) -> None:
        """Wait until so many tokens have come, over all choices."""
        self._wait(lambda: sum(len(choice.tokens) for choice in self._choices) >= count, timeout)

    def abort(self) -> None:
        """Lose interest. Nothing more is delivered."""
        self._client.abort(self._request_id)

    def take(self, output: wire.Output) -> None:
        """Add what one step produced."""
        with self._changed:
            try:
                self._add(output)
            except AssertionError as violation:
                self._failure = violation
            self._changed.notify_all()

    def fail(self, failure: Exception) -> None:
        """End without an answer."""
        with self._changed:
            self._failure = self._failure or failure
            self._changed.notify_all()

    def _add(self, output: wire.Output) -> None:
        if output.HasField("error"):
            assert output.finish_reason == wire.FINISH_REASON_ERROR
            self._failure = RequestFailed(output.error)
            return
        assert output.HasField("prompt_info") == (self._prompt_info is None), "prompt_info comes first, and once"
        if output.HasField("prompt_info"):
            self._prompt_info = output.prompt_info
        choice = self._choices[output.choice]
        assert not choice.finish_reason, f"choice {output.choice} goes on after its end"
        choice.tokens += output.token_ids
        choice.logprobs += output.logprobs
        choice.finish_reason = output.finish_reason
        if output.HasField("stop_token_id"):
            choice.stop_token_id = output.stop_token_id

    def _wait(self, condition: Any, timeout: float) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: self._failure is not None or condition(), timeout):
                raise TimeoutError(f"{self._request_id}: no answer within {timeout} s, only {self._choices}")
            if self._failure is not None:
                raise self._failure


class EngineClient:
    """A front end's session with one replica."""

    def __init__(self, address: str, token: ClusterToken | None = TOKEN) -> None:
        self._metadata = metadata_of(token)
        options = (("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1))
        self._channel = grpc.insecure_channel(address, options=options)
        self._stub = engine_pb2_grpc.EngineStub(self._channel)  # type: ignore[no-untyped-call]
        self._numbers = itertools.count()
        self._pending: dict[str, PendingAnswer] = {}
        self._failure: Exception | None = None
        self._outgoing: queue.SimpleQueue[wire.ClientMessage | None] = queue.SimpleQueue()
        self._session = self._stub.Session(iter(self._outgoing.get, None), metadata=self._metadata)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def submit(
        self,
        token_ids: Sequence[int],
        *,
        n: int = 1,
        prompt_len: int | None = None,
        cache_salt: str = "",
        timeout_ms: int = 0,
        **sampling: Any,
    ) -> PendingAnswer:
        """Ask for tokens: greedy and past any end of sequence, unless ``sampling`` (``wire.Sampling``) says else."""
        request_id = f"request-{next(self._numbers)}"
        settings = {"top_p": 1.0, "repetition_penalty": 1.0, "ignore_eos": True, "max_tokens": 16} | sampling
        pending = self._pending[request_id] = PendingAnswer(self, request_id, n)
        # Either the session's end finds it among the pending, or its failure is found here.
        if self._failure is not None:
            pending.fail(self._failure)
        message = wire.Submit(
            request_id=request_id,
            token_ids=token_ids,
            prompt_len=len(token_ids) if prompt_len is None else prompt_len,
            sampling=wire.Sampling(**settings),
            n=n,
            cache_salt=cache_salt,
            timeout_ms=timeout_ms,
        )
        self._outgoing.put(wire.ClientMessage(submit=message))
        return pending

    def generate(self, token_ids: Sequence[int], **settings: Any) -> Answer:
        """Submit and wait. Raises ``RequestFailed``."""
        return self.submit(token_ids, **settings).result()

    def abort(self, request_id: str) -> None:
        """Cancel a request."""
        self._outgoing.put(wire.ClientMessage(abort=wire.Abort(request_id=request_id)))

    def status(self) -> wire.StatusReply:
        """What the replica says of itself."""
        reply: wire.StatusReply = self._stub.Status(
            wire.StatusRequest(), timeout=_SETTLE_SECONDS, metadata=self._metadata
        )
        return reply

    def settled(self) -> wire.StatusReply:
        """The status once no request is left; checks that every block is free or cached."""
        status = self.wait_for_status(
            lambda s: not (s.load.running_requests or s.load.waiting_requests or s.load.receiving_requests)
        )
        assert status.held_blocks == 0, f"{status.held_blocks} blocks are still held"
        assert status.load.free_blocks + status.load.cached_blocks == status.load.total_blocks
        return status

    def wait_for_status(self, condition: Any) -> wire.StatusReply:
        """Ask until ``condition`` holds of the answer."""
        deadline = time.monotonic() + _SETTLE_SECONDS
        while not condition(status := self.status()):
            assert time.monotonic() < deadline, f"waited {_SETTLE_SECONDS} s; the last status is {status}"
            time.sleep(0.005)
        return status

    def close(self) -> None:
        """End the session, as a front end does that goes away."""
        self._outgoing.put(None)
        self._session.cancel()
        self._channel.close()
        self._thread.join()

    def _read(self) -> None:
        failure: Exception = ConnectionError("the session has ended")
        try:
            for message in self._session:
                for output in message.outputs:
                    self._pending[output.request_id].take(output)
        except grpc.RpcError as error:
            failure = ConnectionError(f"the session has ended: {error}")
        self._failure = failure
        for pending in list(self._pending.values()):
            pending.fail(failure)
