"""One HTTP request's generation: its prompts go to the engine, its choices come back as text.

A handler makes a ``Generation`` once everything is validated and iterates ``deltas`` once. Closing that iterator, at
the end or because the client left, aborts what still runs.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from cluster.engine_client import EngineClient, EngineError, EngineOverloaded
from cluster.journal import Entry
from cluster.openai.choice import Choice, Delta
from cluster.openai.error_code import ErrorCode
from cluster.openai.errors import ApiError, from_engine, from_output
from cluster.openai.metrics import FrontEndMetrics, RequestPhases, TokenClock
from cluster.openai.prompts import Prompt
from cluster.openai.sampling import StopRule
from cluster.openai.usage import Usage
from cluster.text.detokenizer import make_detokenizer
from cluster.text.tokenizer import Tokenizer
from worker.wire.engine_pb2 import (
    FINISH_REASON_ABORT,
    FINISH_REASON_ERROR,
    Output,
    PromptInfo,
    Sampling,
    Submit,
    TokenLogprobs,
)

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GenerationPlan:
    """What one request wants, in full. ``samplings`` has one entry per prompt, each for ``choices`` choices."""

    request_id: str
    prompts: Sequence[Prompt]
    samplings: Sequence[Sampling]
    choices: int
    stop_rule: StopRule
    skip_special_tokens: bool
    cache_salt: str
    timeout_ms: int
    priority: int
    caller: str

    def submits(self) -> list[Submit]:
        """Return one message per prompt."""
        return [
            Submit(
                request_id=f"{self.request_id}-{index}",
                token_ids=prompt.token_ids,
                prompt_len=len(prompt.token_ids),
                sampling=sampling,
                n=self.choices,
                cache_salt=self.cache_salt,
                timeout_ms=self.timeout_ms,
                priority=self.priority,
                caller=self.caller,
            )
            for index, (prompt, sampling) in enumerate(zip(self.prompts, self.samplings, strict=True))
        ]


class Generation:
    """Choices are numbered ``prompt · choices per prompt + choice``. Its failures are ``ApiError``s."""

    def __init__(
        self,
        plan: GenerationPlan,
        engine: EngineClient,
        tokenizer: Tokenizer,
        eos_token_ids: frozenset[int],
        metrics: FrontEndMetrics,
        entry: Entry,
    ) -> None:
        self.plan = plan
        self.usage = Usage(sum(len(prompt.token_ids) for prompt in plan.prompts))
        self._entry = entry
        entry.generating(self.usage, len(plan.prompts) * plan.choices)
        self._engine = engine
        self._metrics = metrics
        self._clock = TokenClock(metrics, len(plan.prompts) * plan.choices, entry.began)
        self._choices = [
            Choice(
                prompt_index * plan.choices + index,
                make_detokenizer(tokenizer, prompt=prompt.token_ids, skip_special_tokens=plan.skip_special_tokens),
                plan.stop_rule,
                eos_token_ids,
            )
            for prompt_index, prompt in enumerate(plan.prompts)
            for index in range(plan.choices)
        ]
        self._prompt_infos: dict[int, PromptInfo] = {}

    def prompt_logprobs(self, prompt_index: int) -> Sequence[TokenLogprobs]:
        """Return the entries of the prompt's tokens after the first; known from the prompt's first delta on."""
        info = self._prompt_infos.get(prompt_index)
        entries: Sequence[TokenLogprobs] = () if info is None else info.prompt_logprobs
        expected = len(self.plan.prompts[prompt_index].token_ids) - 1
        if len(entries) != expected:
            raise ApiError(
                ErrorCode.REPLICA_FAILED,
                f"the engine sent {len(entries)} prompt logprobs where {expected} were expected",
            )
        return entries

    async def deltas(self) -> AsyncGenerator[list[Delta], None]:
        """Yield what each message of the engine adds, until every choice has its finish reason.

        The engine is not asked for nothing: without tokens and prompt logprobs, every choice has ended already.
        """
        if not any(sampling.max_tokens or sampling.HasField("prompt_logprobs") for sampling in self.plan.samplings):
            yield [Delta(index, "", finish_reason="length") for index in range(len(self._choices))]
            return
        submits = self.plan.submits()
        source = self._one(submits[0], 0) if len(submits) == 1 else self._several(submits)
        async with aclosing(source):
            async for deltas in source:
                if deltas:
                    yield deltas
        if not all(choice.finished for choice in self._choices):
            raise ApiError(ErrorCode.REPLICA_FAILED, "the engine ended the request before every choice had ended")
        self._clock.finish()

    async def _one(self, submit: Submit, prompt_index: int) -> AsyncGenerator[list[Delta], None]:
        first = prompt_index * self.plan.choices
        choices = self._choices[first : first + self.plan.choices]
        timeline = self._entry.new_prompt(prompt_index)
        try:
            async with aclosing(self._engine.generate(submit, timeline.placed)) as messages:
                async for outputs in messages:
                    for output in outputs:
                        if output.HasField("prompt_info"):
                            timeline.reported(output.prompt_info)
                    yield [delta for output in outputs if (delta := self._take(output, prompt_index, choices))]
                    if all(choice.finished for choice in choices):
                        return  # which aborts choices that the engine would go on with after a stop string
        except EngineError as error:
            level = logging.DEBUG if isinstance(error, EngineOverloaded) else logging.WARNING
            _logger.log(level, "%s failed: %s", submit.request_id, type(error).__name__)
            raise from_engine(error) from None
        finally:
            timeline.ended()

    async def _several(self, submits: Sequence[Submit]) -> AsyncGenerator[list[Delta], None]:
        """Run the prompts beside each other and yield their deltas as they come; the first failure ends all."""
        arrived: asyncio.Queue[list[Delta] | ApiError | None] = asyncio.Queue()

        async def run(submit: Submit, prompt_index: int) -> None:
            try:
                async with aclosing(self._one(submit, prompt_index)) as source:
                    async for deltas in source:
                        arrived.put_nowait(deltas)
            except ApiError as error:
                arrived.put_nowait(error)

        async def run_all() -> None:
            try:
                async with asyncio.TaskGroup() as group:
                    for index, submit in enumerate(submits):
                        group.create_task(run(submit, index))
            finally:
                arrived.put_nowait(None)

        runner = asyncio.create_task(run_all())
        try:
            while (item := await arrived.get()) is not None:
                if isinstance(item, ApiError):
                    raise item
                yield item
            await runner
        finally:
            runner.cancel()
            await asyncio.wait({runner})

    def _take(self, output: Output, prompt_index: int, choices: Sequence[Choice]) -> Delta | None:
        if output.finish_reason == FINISH_REASON_ERROR:
            raise from_output(output.error)
        if output.finish_reason == FINISH_REASON_ABORT:
            raise ApiError(ErrorCode.UNAVAILABLE, "the request was aborted by the replica that had it", retry_after=1)
        if output.choice >= len(choices):
            raise ApiError(ErrorCode.REPLICA_FAILED, f"the engine sent choice {output.choice} of {len(choices)}")
        if output.HasField("prompt_info") and prompt_index in self._prompt_infos:
            self.usage.add_resumption(output.prompt_info)
            self._metrics.resumptions.inc()
        elif output.HasField("prompt_info"):
            self._prompt_infos[prompt_index] = output.prompt_info
            self._metrics.observe(RequestPhases.of(output.prompt_info))
            self.usage.add_prompt(output.prompt_info)
            self._metrics.prompt_tokens.inc(len(self.plan.prompts[prompt_index].token_ids))
        choice = choices[output.choice]
        if choice.finished:
            return None
        before = choice.tokens
        delta = choice.push(output)
        if tokens := choice.tokens - before:
            self.usage.completion_tokens += tokens
            self._clock.tick(delta.choice, tokens)
        return delta
