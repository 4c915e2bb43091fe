"""What goes back to front ends: tokens and ends of open requests, refusals, and reports of how full the replica is.

Lives as long as its engine and runs on its thread. Outputs gather while a step is worked on; ``flush`` sends them.
"""

from collections import Counter, defaultdict
from collections.abc import Callable

from worker.logprobs import logprobs_message
from worker.request import Client, Request
from worker.sampler import TokenLogprobs
from worker.scheduler import FinishReason, Sampled
from worker.sequence import RequestId, Sequence
from worker.wire import engine_pb2 as wire

LOAD_REPORT_SECONDS = 1.0
BUSY_LOAD_REPORT_SECONDS = 0.1
"""Front ends refuse requests by these reports while a queue is full."""

_REASONS = {
    FinishReason.MORE: wire.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: wire.FINISH_REASON_STOP,
    FinishReason.LENGTH: wire.FINISH_REASON_LENGTH,
}


class Outbox:
    """See the module.

    ``requests`` are the engine's open ones: the end of a request's last choice closes it. ``load`` says how full the
    replica is. ``clock`` gives seconds.
    """

    def __init__(
        self,
        requests: dict[RequestId, Request],
        counters: wire.Counters,
        load: Callable[[], wire.Load],
        clock: Callable[[], float],
    ) -> None:
        self._requests = requests
        self._counters = counters
        self._load = load
        self._clock = clock
        self._clients: dict[str, Client] = {}
        self._submits: Counter[str] = Counter()
        self._outputs: defaultdict[str, list[wire.Output]] = defaultdict(list)
        self._load_sent = 0.0

    def arrived(self, client: Client) -> None:
        """A front end begins its session."""
        self._clients[client.client_id] = client
        client.send(wire.EngineMessage(load=self._load()))

    def gone(self, client: Client) -> None:
        """A front end's session has ended."""
        self._clients.pop(client.client_id, None)
        self._submits.pop(client.client_id, None)

    def submitted(self, client: Client) -> None:
        """A front end has sent a request; load reports say how many of its requests they know of."""
        self._submits[client.client_id] += 1

    def report_load(self) -> None:
        """Tell everybody how full the replica is with the next ``flush``."""
        self._load_sent = 0.0

    def token(self, sampled: Sampled, described: TokenLogprobs | None) -> None:
        """A token, and the end of its choice if it is the last one."""
        sequence = sampled.sequence
        request = self._requests[sequence.request_id]
        output = wire.Output(
            request_id=request.wire_id,
            choice=sequence.choice,
            token_ids=[sampled.token],
            finish_reason=_REASONS[sampled.reason],
        )
        if sampled.reason is FinishReason.STOP:
            output.stop_token_id = sampled.token
        if described is not None:
            output.logprobs.append(logprobs_message(described, sequence.sampling.logprobs or 0))
        self._counters.generated_tokens += 1
        self._send(request, sequence, output)

    def end(self, sequence: Sequence, reason: wire.FinishReason, choice: int | None = None) -> None:
        """Report the end of a choice, the sequence's own or another, that comes without a token."""
        request = self._requests[sequence.request_id]
        choice = sequence.choice if choice is None else choice
        self._send(request, sequence, wire.Output(request_id=request.wire_id, choice=choice, finish_reason=reason))

    def refuse(self, client: Client, wire_id: str, error: wire.Error) -> None:
        """End a request that is not open."""
        self._outputs[client.client_id].append(
            wire.Output(request_id=wire_id, finish_reason=wire.FINISH_REASON_ERROR, error=error)
        )

    def flush(self, now: float, idle: bool) -> None:
        """Send what this step produced, one message per front end; everybody's load report when it is due."""
        report = now - self._load_sent >= (LOAD_REPORT_SECONDS if idle else BUSY_LOAD_REPORT_SECONDS)
        if not (self._outputs or report):
            return
        load = self._load()
        for client_id, client in self._clients.items():
            outputs = self._outputs.get(client_id, [])
            if outputs or report:
                client.send(wire.EngineMessage(outputs=outputs, load=load, submits=self._submits[client_id]))
        self._outputs.clear()
        if report:
            self._load_sent = now

    def _send(self, request: Request, sequence: Sequence, output: wire.Output) -> None:
        if not request.prompt_info_sent:
            request.prompt_info_sent = True
            self._counters.prompt_tokens += sequence.prompt_len - sequence.prefix_len
            top = sequence.sampling.prompt_logprobs or 0
            output.prompt_info.CopyFrom(
                wire.PromptInfo(
                    cached_tokens=max(0, min(sequence.cached_tokens, sequence.prompt_len) - sequence.prefix_len),
                    prefill_cached_tokens=request.prefill_cached_tokens,
                    prompt_logprobs=[logprobs_message(entry, top) for entry in request.prompt_logprobs],
                    transfer=request.transfer,
                    phases=request.phases.message(self._clock()),
                )
            )
        self._outputs[request.client.client_id].append(output)
        if output.finish_reason != wire.FINISH_REASON_UNSPECIFIED:
            request.open_choices -= 1
            if request.open_choices == 0:
                self._counters.requests_finished += 1
                del self._requests[sequence.request_id]
