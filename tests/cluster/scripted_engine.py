"""An ``EngineClient`` without an engine: each request's messages are written down beforehand."""

import asyncio
import math
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence

from cluster.engine_client import EngineOverloaded, nobody_asks
from worker.wire.engine_pb2 import (
    FINISH_REASON_LENGTH,
    FINISH_REASON_UNSPECIFIED,
    FinishReason,
    Output,
    PromptInfo,
    StatusReply,
    Submit,
    TokenLogprobs,
    Transfer,
)

# A step is a message to send, something to wait for, a failure to raise, or the replica that goes on from here.
Step = list[Output] | asyncio.Event | Exception | str
Script = Callable[[Submit], Iterable[Step]]


class ScriptedEngine:
    """Plays ``script(submit)`` for every request and keeps what it was asked and what was aborted."""

    def __init__(self, script: Script, *, statuses: Sequence[StatusReply] = (), ready: bool = True) -> None:
        self.script = script
        self.submits: list[Submit] = []
        self.aborted: list[str] = []
        self.abort_happened = asyncio.Event()
        self.submitted = asyncio.Event()
        self.overload: EngineOverloaded | None = None
        self._statuses = list(statuses)
        self.is_ready = ready

    async def generate(
        self, submit: Submit, placed: Callable[[str], None] = nobody_asks
    ) -> AsyncGenerator[list[Output], None]:
        self.submits.append(submit)
        placed("decode-0")
        self.submitted.set()
        unfinished = set(range(submit.n))
        try:
            for step in self.script(submit):
                await asyncio.sleep(0)
                match step:
                    case asyncio.Event():
                        await step.wait()
                    case Exception():
                        unfinished.clear()
                        raise step
                    case str():
                        placed(step)
                    case outputs:
                        unfinished -= {o.choice for o in outputs if o.finish_reason != FINISH_REASON_UNSPECIFIED}
                        yield outputs
        finally:
            if unfinished:
                self.aborted.append(submit.request_id)
                self.abort_happened.set()

    def require_room(self, caller: str) -> None:
        if self.overload is not None:
            raise self.overload

    async def statuses(self) -> list[StatusReply]:
        return self._statuses

    def ready(self) -> bool:
        return self.is_ready


def logprobs_for(token_id: int, top: int | None) -> TokenLogprobs | None:
    """Made-up but recognisable numbers: rank and logprob follow from the id."""
    if top is None:
        return None
    return TokenLogprobs(
        token_id=token_id,
        logprob=-0.5 - token_id / 1024,
        rank=1 + token_id % 3,
        top_token_ids=range(top),
        top_logprobs=[-0.25 - i for i in range(top)],
    )


def prompt_info(submit: Submit, **fields: object) -> PromptInfo:
    entries = []
    if submit.sampling.HasField("prompt_logprobs"):
        entries = [logprobs_for(t, submit.sampling.prompt_logprobs) for t in submit.token_ids[1:]]
    return PromptInfo(prompt_logprobs=entries, **fields)


def emit(
    submit: Submit,
    token_ids: Sequence[int],
    *,
    choice: int = 0,
    per_message: int = 1,
    finish: FinishReason = FINISH_REASON_LENGTH,
    stop_token_id: int | None = None,
    info: PromptInfo | None = None,
) -> list[list[Output]]:
    """Return the messages of one choice, the last of which ends it."""
    top = submit.sampling.logprobs if submit.sampling.HasField("logprobs") else None
    messages = []
    count = max(1, math.ceil(len(token_ids) / per_message))
    for index in range(count):
        part = token_ids[index * per_message : (index + 1) * per_message]
        last = index == count - 1
        messages.append(
            [
                Output(
                    request_id=submit.request_id,
                    choice=choice,
                    token_ids=part,
                    logprobs=[] if top is None else [logprobs_for(t, top) for t in part],
                    finish_reason=finish if last else FINISH_REASON_UNSPECIFIED,
                    stop_token_id=stop_token_id if last else None,
                    prompt_info=(info or prompt_info(submit)) if index == 0 and choice == 0 else None,
                )
            ]
        )
    return messages


def always(token_ids: Sequence[int], **how: object) -> Script:
    """Every request and choice gets the same tokens, choice after choice within each message."""

    def script(submit: Submit) -> Iterable[Step]:
        choices = [emit(submit, token_ids, choice=choice, **how) for choice in range(submit.n)]
        for messages in zip(*choices, strict=True):
            yield [output for message in messages for output in message]

    return script


TRANSFER = Transfer(
    payload_bytes=1000,
    lower_bound_bytes=1000,
    unshared_bytes=2000,
    transfer_ms=1.5,
    queue_ms=0.25,
    attempts=1,
    prefill_replica="prefill-0",
)
