"""A client's request as the engine keeps it: who asked, which choices are open, what to report once.

Made when a Submit arrives, dropped when its last choice has ended. Sequences do the work; this remembers for whom.
"""

from dataclasses import dataclass, field
from typing import Protocol

from worker.grammar.grammar import Grammar, GrammarKind
from worker.prompt_phases import PromptPhases
from worker.sampler import TokenLogprobs
from worker.sampling_params import InvalidRequest, SamplingParams
from worker.sequence import RequestId, Sequence, SequenceState
from worker.wire import engine_pb2 as wire

MAX_REQUEST_ID_BYTES = 256
MAX_CALLER_BYTES = 256


class Client(Protocol):
    """A session with a front end. ``send`` may be called from the engine's thread and never blocks."""

    @property
    def client_id(self) -> str:
        """Unique within this engine's life."""
        ...

    def send(self, message: wire.EngineMessage) -> None:
        """Queue a message for the front end."""
        ...


@dataclass(slots=True)
class Request:
    """``wire_id`` is the client's name for it. ``transfer`` is what moved for its prompt, for the usage report."""

    client: Client
    wire_id: str
    open_choices: int
    phases: PromptPhases
    transfer: wire.Transfer = field(default_factory=wire.Transfer)
    prefill_cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_info_sent: bool = False


def request_id_of(client: Client, wire_id: str) -> RequestId:
    """A request's name inside the engine; two front ends may use the same wire id."""
    return RequestId(f"{client.client_id}/{wire_id}")


def parse_sampling(message: wire.Sampling) -> SamplingParams:
    """Sampling as it crosses the wire, unchecked."""
    return SamplingParams(
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=message.top_p,
        min_p=message.min_p,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        repetition_penalty=message.repetition_penalty,
        seed=message.seed,
        max_tokens=message.max_tokens,
        min_tokens=message.min_tokens,
        ignore_eos=message.ignore_eos,
        stop_token_ids=frozenset(message.stop_token_ids),
        logit_bias=dict(message.logit_bias),
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
        grammar=parse_grammar(message.grammar) if message.HasField("grammar") else None,
    )


def parse_grammar(message: wire.Grammar) -> Grammar:
    """A grammar as it crosses the wire, unchecked; one of a kind that is not known here raises ``InvalidRequest``."""
    match message.WhichOneof("source"):
        case "json_schema":
            return Grammar(GrammarKind.JSON_SCHEMA, message.json_schema, message.compact)
        case "regex":
            return Grammar(GrammarKind.REGEX, message.regex)
        case "ebnf":
            return Grammar(GrammarKind.EBNF, message.ebnf)
        case "structural_tag":
            return Grammar(GrammarKind.STRUCTURAL_TAG, message.structural_tag)
    raise InvalidRequest("the grammar is of a kind that this replica does not know")


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What any request must fit into, and the ``prefix_tokens`` that the model wants before every prompt.

    ``max_model_len`` does not count them.
    """

    vocab_size: int
    max_model_len: int
    prefix_tokens: tuple[int, ...]
    max_choices: int
    default_timeout: float
    queue_timeout: float | None
    eos_token_ids: frozenset[int]


def make_sequence(submit: wire.Submit, request_id: RequestId, limits: RequestLimits, now: float) -> Sequence:
    """The first choice of a submission; raises ``InvalidRequest`` for one that can never be served."""
    known = len(submit.token_ids)
    if not 0 < len(submit.request_id.encode()) <= MAX_REQUEST_ID_BYTES:
        raise InvalidRequest(f"request_id must have 1 to {MAX_REQUEST_ID_BYTES} bytes")
    if len(submit.caller.encode()) > MAX_CALLER_BYTES:
        raise InvalidRequest(f"caller must have at most {MAX_CALLER_BYTES} bytes")
    if not 0 < submit.prompt_len <= known:
        raise InvalidRequest(f"prompt_len is {submit.prompt_len}, but {known} token ids were given")
    if known >= limits.max_model_len:
        raise InvalidRequest(
            f"{known} tokens were given, but this replica serves up to {limits.max_model_len} in all, answer included"
        )
    if max(submit.token_ids) >= limits.vocab_size:
        raise InvalidRequest(f"token id {max(submit.token_ids)} is not in the vocabulary of {limits.vocab_size}")
    if not 1 <= submit.n <= limits.max_choices:
        raise InvalidRequest(f"n is {submit.n}, which is not between 1 and {limits.max_choices}")
    sampling = parse_sampling(submit.sampling)
    sampling.validate(limits.vocab_size)
    timeout = submit.timeout_ms / 1e3 or limits.default_timeout
    return Sequence(
        request_id=request_id,
        choice=submit.choice,
        tokens=[*limits.prefix_tokens, *submit.token_ids],
        prompt_len=len(limits.prefix_tokens) + submit.prompt_len,
        prefix_len=len(limits.prefix_tokens),
        sampling=sampling,
        salt=submit.cache_salt,
        arrival=now,
        deadline=now + timeout,
        eos_token_ids=limits.eos_token_ids,
        branches=submit.n,
        caller=submit.caller,
        priority=submit.priority,
        start_by=now + min(timeout, limits.queue_timeout or timeout),
        state=SequenceState.WAITING if sampling.grammar is None else SequenceState.PREPARING,
    )
