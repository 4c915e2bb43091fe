from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_ABORT: _ClassVar[FinishReason]
    FINISH_REASON_ERROR: _ClassVar[FinishReason]

class ErrorKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ERROR_KIND_UNSPECIFIED: _ClassVar[ErrorKind]
    ERROR_KIND_INVALID: _ClassVar[ErrorKind]
    ERROR_KIND_OVERLOADED: _ClassVar[ErrorKind]
    ERROR_KIND_TIMEOUT: _ClassVar[ErrorKind]
    ERROR_KIND_INTERNAL: _ClassVar[ErrorKind]
    ERROR_KIND_UNAVAILABLE: _ClassVar[ErrorKind]
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_ABORT: FinishReason
FINISH_REASON_ERROR: FinishReason
ERROR_KIND_UNSPECIFIED: ErrorKind
ERROR_KIND_INVALID: ErrorKind
ERROR_KIND_OVERLOADED: ErrorKind
ERROR_KIND_TIMEOUT: ErrorKind
ERROR_KIND_INTERNAL: ErrorKind
ERROR_KIND_UNAVAILABLE: ErrorKind

class ClientMessage(_message.Message):
    __slots__ = ("submit", "abort")
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    submit: Submit
    abort: Abort
    def __init__(self, submit: _Optional[_Union[Submit, _Mapping]] = ..., abort: _Optional[_Union[Abort, _Mapping]] = ...) -> None: ...

class Submit(_message.Message):
    __slots__ = ("request_id", "token_ids", "prompt_len", "sampling", "n", "cache_salt", "timeout_ms", "priority", "caller", "choice")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LEN_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CALLER_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    prompt_len: int
    sampling: Sampling
    n: int
    cache_salt: str
    timeout_ms: int
    priority: int
    caller: str
    choice: int
    def __init__(self, request_id: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., prompt_len: _Optional[int] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., n: _Optional[int] = ..., cache_salt: _Optional[str] = ..., timeout_ms: _Optional[int] = ..., priority: _Optional[int] = ..., caller: _Optional[str] = ..., choice: _Optional[int] = ...) -> None: ...

class Abort(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed", "max_tokens", "min_tokens", "ignore_eos", "stop_token_ids", "logit_bias", "logprobs", "prompt_logprobs", "grammar")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    seed: int
    max_tokens: int
    min_tokens: int
    ignore_eos: bool
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    logit_bias: _containers.ScalarMap[int, float]
    logprobs: int
    prompt_logprobs: int
    grammar: Grammar
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., seed: _Optional[int] = ..., max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., ignore_eos: _Optional[bool] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., logprobs: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ..., grammar: _Optional[_Union[Grammar, _Mapping]] = ...) -> None: ...

class Grammar(_message.Message):
    __slots__ = ("json_schema", "regex", "ebnf", "structural_tag", "compact")
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    EBNF_FIELD_NUMBER: _ClassVar[int]
    STRUCTURAL_TAG_FIELD_NUMBER: _ClassVar[int]
    COMPACT_FIELD_NUMBER: _ClassVar[int]
    json_schema: str
    regex: str
    ebnf: str
    structural_tag: str
    compact: bool
    def __init__(self, json_schema: _Optional[str] = ..., regex: _Optional[str] = ..., ebnf: _Optional[str] = ..., structural_tag: _Optional[str] = ..., compact: _Optional[bool] = ...) -> None: ...

class EngineMessage(_message.Message):
    __slots__ = ("outputs", "load", "submits")
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    SUBMITS_FIELD_NUMBER: _ClassVar[int]
    outputs: _containers.RepeatedCompositeFieldContainer[Output]
    load: Load
    submits: int
    def __init__(self, outputs: _Optional[_Iterable[_Union[Output, _Mapping]]] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., submits: _Optional[int] = ...) -> None: ...

class Output(_message.Message):
    __slots__ = ("request_id", "choice", "token_ids", "logprobs", "finish_reason", "stop_token_id", "prompt_info", "error")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_INFO_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    choice: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    finish_reason: FinishReason
    stop_token_id: int
    prompt_info: PromptInfo
    error: Error
    def __init__(self, request_id: _Optional[str] = ..., choice: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., stop_token_id: _Optional[int] = ..., prompt_info: _Optional[_Union[PromptInfo, _Mapping]] = ..., error: _Optional[_Union[Error, _Mapping]] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("token_id", "logprob", "rank", "top_token_ids", "top_logprobs")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    rank: int
    top_token_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ..., rank: _Optional[int] = ..., top_token_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class PromptInfo(_message.Message):
    __slots__ = ("cached_tokens", "prefill_cached_tokens", "prompt_logprobs", "transfer", "phases")
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    PHASES_FIELD_NUMBER: _ClassVar[int]
    cached_tokens: int
    prefill_cached_tokens: int
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    transfer: Transfer
    phases: Phases
    def __init__(self, cached_tokens: _Optional[int] = ..., prefill_cached_tokens: _Optional[int] = ..., prompt_logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., transfer: _Optional[_Union[Transfer, _Mapping]] = ..., phases: _Optional[_Union[Phases, _Mapping]] = ...) -> None: ...

class Phases(_message.Message):
    __slots__ = ("queue_ms", "prefill_queue_ms", "prefill_ms", "transfer_ms", "start_ms", "first_token_ms")
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_MS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_MS_FIELD_NUMBER: _ClassVar[int]
    START_MS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_MS_FIELD_NUMBER: _ClassVar[int]
    queue_ms: float
    prefill_queue_ms: float
    prefill_ms: float
    transfer_ms: float
    start_ms: float
    first_token_ms: float
    def __init__(self, queue_ms: _Optional[float] = ..., prefill_queue_ms: _Optional[float] = ..., prefill_ms: _Optional[float] = ..., transfer_ms: _Optional[float] = ..., start_ms: _Optional[float] = ..., first_token_ms: _Optional[float] = ...) -> None: ...

class Transfer(_message.Message):
    __slots__ = ("payload_bytes", "lower_bound_bytes", "unshared_bytes", "retransmitted_bytes", "queue_ms", "transfer_ms", "attempts", "prefill_replica")
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    LOWER_BOUND_BYTES_FIELD_NUMBER: _ClassVar[int]
    UNSHARED_BYTES_FIELD_NUMBER: _ClassVar[int]
    RETRANSMITTED_BYTES_FIELD_NUMBER: _ClassVar[int]
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_MS_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_REPLICA_FIELD_NUMBER: _ClassVar[int]
    payload_bytes: int
    lower_bound_bytes: int
    unshared_bytes: int
    retransmitted_bytes: int
    queue_ms: float
    transfer_ms: float
    attempts: int
    prefill_replica: str
    def __init__(self, payload_bytes: _Optional[int] = ..., lower_bound_bytes: _Optional[int] = ..., unshared_bytes: _Optional[int] = ..., retransmitted_bytes: _Optional[int] = ..., queue_ms: _Optional[float] = ..., transfer_ms: _Optional[float] = ..., attempts: _Optional[int] = ..., prefill_replica: _Optional[str] = ...) -> None: ...

class Error(_message.Message):
    __slots__ = ("kind", "message", "retry_after_ms", "reason")
    KIND_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    kind: ErrorKind
    message: str
    retry_after_ms: int
    reason: str
    def __init__(self, kind: _Optional[_Union[ErrorKind, str]] = ..., message: _Optional[str] = ..., retry_after_ms: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("running_requests", "waiting_requests", "receiving_requests", "free_blocks", "cached_blocks", "total_blocks", "outstanding_prompt_tokens", "prefill_peers", "queue_limit", "queue_ms_per_request", "draining")
    RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    WAITING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    RECEIVING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    OUTSTANDING_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_PEERS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_LIMIT_FIELD_NUMBER: _ClassVar[int]
    QUEUE_MS_PER_REQUEST_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    running_requests: int
    waiting_requests: int
    receiving_requests: int
    free_blocks: int
    cached_blocks: int
    total_blocks: int
    outstanding_prompt_tokens: int
    prefill_peers: int
    queue_limit: int
    queue_ms_per_request: int
    draining: bool
    def __init__(self, running_requests: _Optional[int] = ..., waiting_requests: _Optional[int] = ..., receiving_requests: _Optional[int] = ..., free_blocks: _Optional[int] = ..., cached_blocks: _Optional[int] = ..., total_blocks: _Optional[int] = ..., outstanding_prompt_tokens: _Optional[int] = ..., prefill_peers: _Optional[int] = ..., queue_limit: _Optional[int] = ..., queue_ms_per_request: _Optional[int] = ..., draining: _Optional[bool] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("role", "replica_id", "load", "counters", "held_blocks", "block_size", "owner_layers", "total_layers", "prefill_error", "prefill_transfers")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    HELD_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    OWNER_LAYERS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_LAYERS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_ERROR_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    role: str
    replica_id: str
    load: Load
    counters: Counters
    held_blocks: int
    block_size: int
    owner_layers: int
    total_layers: int
    prefill_error: str
    prefill_transfers: _containers.RepeatedCompositeFieldContainer[PrefillTransfers]
    def __init__(self, role: _Optional[str] = ..., replica_id: _Optional[str] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., counters: _Optional[_Union[Counters, _Mapping]] = ..., held_blocks: _Optional[int] = ..., block_size: _Optional[int] = ..., owner_layers: _Optional[int] = ..., total_layers: _Optional[int] = ..., prefill_error: _Optional[str] = ..., prefill_transfers: _Optional[_Iterable[_Union[PrefillTransfers, _Mapping]]] = ...) -> None: ...

class PrefillTransfers(_message.Message):
    __slots__ = ("prefill_replica", "transfers", "payload_bytes", "unshared_bytes")
    PREFILL_REPLICA_FIELD_NUMBER: _ClassVar[int]
    TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    UNSHARED_BYTES_FIELD_NUMBER: _ClassVar[int]
    prefill_replica: str
    transfers: int
    payload_bytes: int
    unshared_bytes: int
    def __init__(self, prefill_replica: _Optional[str] = ..., transfers: _Optional[int] = ..., payload_bytes: _Optional[int] = ..., unshared_bytes: _Optional[int] = ...) -> None: ...

class Counters(_message.Message):
    __slots__ = ("requests_finished", "requests_aborted", "requests_failed", "prompt_tokens", "generated_tokens", "prefix_queries", "prefix_hits", "preemptions", "transfers", "transfers_failed", "payload_bytes", "lower_bound_bytes", "unshared_bytes", "retransmitted_bytes", "wire_bytes", "transfer_seconds", "busy_seconds", "steps", "stale_pieces", "local_prefills", "requests_refused", "failures", "transfer_failures", "completed_bytes", "strangers")
    class FailuresEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class TransferFailuresEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    REQUESTS_FINISHED_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_ABORTED_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FAILED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_QUERIES_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HITS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    TRANSFERS_FAILED_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    LOWER_BOUND_BYTES_FIELD_NUMBER: _ClassVar[int]
    UNSHARED_BYTES_FIELD_NUMBER: _ClassVar[int]
    RETRANSMITTED_BYTES_FIELD_NUMBER: _ClassVar[int]
    WIRE_BYTES_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_SECONDS_FIELD_NUMBER: _ClassVar[int]
    BUSY_SECONDS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    STALE_PIECES_FIELD_NUMBER: _ClassVar[int]
    LOCAL_PREFILLS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_REFUSED_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_FAILURES_FIELD_NUMBER: _ClassVar[int]
    COMPLETED_BYTES_FIELD_NUMBER: _ClassVar[int]
    STRANGERS_FIELD_NUMBER: _ClassVar[int]
    requests_finished: int
    requests_aborted: int
    requests_failed: int
    prompt_tokens: int
    generated_tokens: int
    prefix_queries: int
    prefix_hits: int
    preemptions: int
    transfers: int
    transfers_failed: int
    payload_bytes: int
    lower_bound_bytes: int
    unshared_bytes: int
    retransmitted_bytes: int
    wire_bytes: int
    transfer_seconds: float
    busy_seconds: float
    steps: int
    stale_pieces: int
    local_prefills: int
    requests_refused: int
    failures: _containers.ScalarMap[str, int]
    transfer_failures: _containers.ScalarMap[str, int]
    completed_bytes: int
    strangers: int
    def __init__(self, requests_finished: _Optional[int] = ..., requests_aborted: _Optional[int] = ..., requests_failed: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., generated_tokens: _Optional[int] = ..., prefix_queries: _Optional[int] = ..., prefix_hits: _Optional[int] = ..., preemptions: _Optional[int] = ..., transfers: _Optional[int] = ..., transfers_failed: _Optional[int] = ..., payload_bytes: _Optional[int] = ..., lower_bound_bytes: _Optional[int] = ..., unshared_bytes: _Optional[int] = ..., retransmitted_bytes: _Optional[int] = ..., wire_bytes: _Optional[int] = ..., transfer_seconds: _Optional[float] = ..., busy_seconds: _Optional[float] = ..., steps: _Optional[int] = ..., stale_pieces: _Optional[int] = ..., local_prefills: _Optional[int] = ..., requests_refused: _Optional[int] = ..., failures: _Optional[_Mapping[str, int]] = ..., transfer_failures: _Optional[_Mapping[str, int]] = ..., completed_bytes: _Optional[int] = ..., strangers: _Optional[int] = ...) -> None: ...
