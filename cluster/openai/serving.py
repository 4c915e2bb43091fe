"""What every handler of one front end shares; made by ``build_app``, never changed."""

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.engine_client import EngineClient, EngineError
from cluster.journal import Entry, Journal
from cluster.openai.api_keys import Caller
from cluster.openai.errors import from_engine
from cluster.openai.generation import Generation, GenerationPlan
from cluster.openai.limits import ApiLimits, ModelCard
from cluster.openai.metrics import FrontEndMetrics
from cluster.openai.prompts import Prompt, PromptEncoder
from cluster.openai.protocol import GenerationBody
from cluster.openai.sampling import (
    check_model,
    choices_of,
    logprobs_of,
    sampling_of,
    stop_rule_of,
    timeout_ms_of,
)
from cluster.openai.structured_output import grammar_of, to_wire
from cluster.text.tokenizer import Tokenizer
from cluster.text.tool_calls import ToolCallFormat
from worker.wire.engine_pb2 import Sampling


@dataclass(frozen=True, slots=True)
class Serving:
    """The engine, the model's texts, and the limits. ``prefix_cache_per_key`` keeps callers' cached prefixes apart."""

    engine: EngineClient
    tokenizer: Tokenizer
    prompts: PromptEncoder
    model: ModelCard
    limits: ApiLimits
    metrics: FrontEndMetrics
    journal: Journal
    prefix_cache_per_key: bool = False
    tool_calls: ToolCallFormat | None = None

    def require_room(self, caller: str) -> None:
        """Refuse a request that no replica would queue, before any work is done for it."""
        try:
            self.engine.require_room(caller)
        except EngineError as error:
            raise from_engine(error) from None

    def check(self, body: GenerationBody) -> None:
        """Refuse what can be refused without looking at the prompt, cheapest first."""
        check_model(body.model, self.model)
        body.refuse_unsupported()
        choices_of(body, self.limits)
        stop_rule_of(body, self.limits)
        timeout_ms_of(body, self.limits)

    def sampling(self, body: GenerationBody) -> Sampling:
        """Return the sampling of a request, still without its number of tokens and its logprobs."""
        sampling = sampling_of(body, self.model, self.limits)
        count = logprobs_of(body.prompt_logprobs, self.limits, "prompt_logprobs")
        if count is not None:
            sampling.prompt_logprobs = count
        grammar = grammar_of(body)
        if grammar is not None:
            sampling.grammar.CopyFrom(to_wire(grammar))
        return sampling

    def generation(
        self,
        body: GenerationBody,
        caller: Caller,
        entry: Entry,
        prompts: Sequence[Prompt],
        samplings: Sequence[Sampling],
        timeout: float | None = None,
        *,
        keep_special_tokens: bool = False,
    ) -> Generation:
        """Return the generation of a request that has been validated; nothing is sent before it is iterated."""
        plan = GenerationPlan(
            request_id=entry.request_id,
            prompts=prompts,
            samplings=samplings,
            choices=choices_of(body, self.limits),
            stop_rule=stop_rule_of(body, self.limits),
            skip_special_tokens=body.skip_special_tokens is not False and not keep_special_tokens,
            cache_salt=self.cache_salt(body.cache_salt or "", caller),
            timeout_ms=timeout_ms_of(body, self.limits, timeout),
            priority=body.priority or 0,
            caller=caller.name,
        )
        return Generation(plan, self.engine, self.tokenizer, self.model.eos_token_ids, self.metrics, entry)

    def cache_salt(self, wanted: str, caller: Caller) -> str:
        """Return the salt of a request's prefixes: requests with different ones never see each other's."""
        # A name has no colon.
        return f"{caller.name}:{wanted}" if self.prefix_cache_per_key else wanted
