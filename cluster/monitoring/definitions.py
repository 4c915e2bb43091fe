"""Every metric: what front ends measure themselves, then what they read from replicas' reports."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from cluster.engine_client import Retry
from cluster.monitoring.metric import Kind, Label, Metric, Unit
from cluster.openai.error_code import DISCONNECTED, ErrorCode
from worker.config import Role
from worker.failure import Failure, TransferFailure
from worker.wire.engine_pb2 import StatusReply

_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0)
_FIRST_TOKEN_SECONDS = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0)
_PHASE_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_REQUEST_SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0)

STATUS = Label("status", tuple(sorted({"200", str(DISCONNECTED), *(str(code.status) for code in ErrorCode)})))
CODE = Label("code", tuple(code.text for code in ErrorCode))
ROLE = Label("role", tuple(Role))
STATE = Label("state", ("free", "cached", "held"))


def _seconds(name: str, help: str, buckets: tuple[float, ...]) -> Metric:
    return Metric(name, Kind.HISTOGRAM, help, Unit.SECONDS, buckets=buckets)


TIME_TO_FIRST_TOKEN = _seconds(
    "crosskv_time_to_first_token_seconds", "From receiving a request to its first token.", _FIRST_TOKEN_SECONDS
)
INTER_TOKEN_LATENCY = _seconds(
    "crosskv_inter_token_latency_seconds", "Between two tokens of one choice.", _TOKEN_SECONDS
)
REQUEST_LATENCY = _seconds(
    "crosskv_e2e_request_latency_seconds", "From receiving a request to its last token.", _REQUEST_SECONDS
)
QUEUE_TIME = _seconds(
    "crosskv_request_queue_seconds", "A prompt's wait for its turn on a decode replica.", _PHASE_SECONDS
)
PREFILL_QUEUE_TIME = _seconds(
    "crosskv_request_prefill_queue_seconds", "A prompt's wait for its turn on a prefill replica.", _PHASE_SECONDS
)
PREFILL_TIME = _seconds(
    "crosskv_request_prefill_seconds", "Computing a prompt, on whichever replica did it.", _PHASE_SECONDS
)
TRANSFER_TIME = _seconds(
    "crosskv_request_transfer_seconds",
    "From asking a prefill replica to having all of a prompt's KV, its queue and its computation included.",
    _PHASE_SECONDS,
)
DECODE_TIME = _seconds("crosskv_request_decode_seconds", "From a request's first token to its last.", _REQUEST_SECONDS)

REQUESTS = Metric(
    "crosskv_requests",
    Kind.COUNTER,
    f"Generation requests by how they ended; {DISCONNECTED} is a client that left.",
    labels=(STATUS,),
)
FAILURES = Metric(
    "crosskv_request_failures",
    Kind.COUNTER,
    "Errors that clients were told, of every kind of request, by the code in the error's body.",
    labels=(CODE,),
)
IN_FLIGHT = Metric("crosskv_front_end_requests_in_flight", Kind.GAUGE, "Generation requests that have no end yet.")
PROMPT_TOKENS = Metric("crosskv_prompt_tokens", Kind.COUNTER, "Prompt tokens of served requests.")
GENERATION_TOKENS = Metric("crosskv_generation_tokens", Kind.COUNTER, "Tokens sent to clients.")
READY = Metric("crosskv_ready", Kind.GAUGE, "1 if a request could be served now, else 0.")
RESUMPTIONS = Metric(
    "crosskv_resumptions",
    Kind.COUNTER,
    "Answers, of several choices each by itself, that another replica went on with.",
)
RETRIES = Metric(
    "crosskv_request_retries",
    Kind.COUNTER,
    "Requests that were given to one more replica: the one before was lost, sent them away, or had no room.",
    labels=(Label("reason", tuple(Retry)),),
)
REPLICAS_LOST = Metric(
    "crosskv_replicas_lost",
    Kind.COUNTER,
    "Replicas that were gone without having said that they would go; every front end counts what it sees.",
    labels=(ROLE,),
)
REPORTS_MISSING = Metric(
    "crosskv_replica_reports_missing", Kind.COUNTER, "Replicas that did not report when they were asked for metrics."
)

FRONT_END_METRICS = (
    REQUESTS,
    FAILURES,
    IN_FLIGHT,
    READY,
    PROMPT_TOKENS,
    GENERATION_TOKENS,
    TIME_TO_FIRST_TOKEN,
    INTER_TOKEN_LATENCY,
    REQUEST_LATENCY,
    QUEUE_TIME,
    PREFILL_QUEUE_TIME,
    PREFILL_TIME,
    TRANSFER_TIME,
    DECODE_TIME,
    RESUMPTIONS,
    RETRIES,
    REPLICAS_LOST,
    REPORTS_MISSING,
)

Values = float | Mapping[str, float]

_EVERY = frozenset(Role)
_GENERATING = frozenset({Role.DECODE, Role.COLOCATED})
_DECODE = frozenset({Role.DECODE})
_PREFILL = frozenset({Role.PREFILL})


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaMetric(Metric):
    """A metric that replicas of ``roles`` report; ``read`` finds it, by its label's value if it has a label.

    What two roles would count of one and the same thing has a name for each, so that a sum over all is right.
    """

    read: Callable[[StatusReply], Values]
    roles: frozenset[Role] = _EVERY


def _failures(status: StatusReply, *, refused: bool) -> dict[str, float]:
    return {reason: status.counters.failures.get(reason, 0) for reason in Failure if reason.refused == refused}


RUNNING = ReplicaMetric(
    "crosskv_num_requests_running",
    Kind.GAUGE,
    "Requests that are computed.",
    read=lambda s: s.load.running_requests,
)
WAITING = ReplicaMetric(
    "crosskv_num_requests_waiting",
    Kind.GAUGE,
    "Requests in the queue.",
    read=lambda s: s.load.waiting_requests,
)
RECEIVING = ReplicaMetric(
    "crosskv_num_requests_receiving",
    Kind.GAUGE,
    "Requests whose KV is on its way.",
    read=lambda s: s.load.receiving_requests,
    roles=_DECODE,
)
OUTSTANDING_PROMPT_TOKENS = ReplicaMetric(
    "crosskv_outstanding_prompt_tokens",
    Kind.GAUGE,
    "Prompt tokens that have been asked for and are not computed.",
    read=lambda s: s.load.outstanding_prompt_tokens,
)
PREFILL_PEERS = ReplicaMetric(
    "crosskv_prefill_peers",
    Kind.GAUGE,
    "Prefill replicas that a decode replica is connected to.",
    read=lambda s: s.load.prefill_peers,
    roles=_DECODE,
)
PREFILL_REFUSED = ReplicaMetric(
    "crosskv_prefill_peer_unusable",
    Kind.GAUGE,
    "1 if a prefill replica exists that this decode replica cannot use, else 0; crosskv status --json says why.",
    read=lambda s: bool(s.prefill_error),
    roles=_DECODE,
)
BLOCKS = ReplicaMetric(
    "crosskv_kv_cache_blocks",
    Kind.GAUGE,
    "KV blocks by state: of requests, of prefixes that may be used again, or neither.",
    labels=(STATE,),
    read=lambda s: {"free": s.load.free_blocks, "cached": s.load.cached_blocks, "held": s.held_blocks},
)
CACHE_USAGE = ReplicaMetric(
    "crosskv_kv_cache_usage_ratio",
    Kind.GAUGE,
    "Part of the KV blocks that requests hold, from 0 to 1.",
    Unit.RATIO,
    read=lambda s: s.held_blocks / s.load.total_blocks if s.load.total_blocks else 0.0,
)
OWNER_LAYERS = ReplicaMetric(
    "crosskv_owner_layers", Kind.GAUGE, "Attention layers that own KV.", read=lambda s: s.owner_layers
)
TOTAL_LAYERS = ReplicaMetric(
    "crosskv_total_layers", Kind.GAUGE, "Attention layers of the model.", read=lambda s: s.total_layers
)

FINISHED = ReplicaMetric(
    "crosskv_replica_requests_finished",
    Kind.COUNTER,
    "Requests that ended as they should; a prefill replica's are prompts.",
    read=lambda s: s.counters.requests_finished,
)
ABORTED = ReplicaMetric(
    "crosskv_replica_requests_aborted",
    Kind.COUNTER,
    "Requests that whoever asked for them wanted no longer.",
    read=lambda s: s.counters.requests_aborted,
)
FAILED = ReplicaMetric(
    "crosskv_replica_requests_failed",
    Kind.COUNTER,
    "Requests that ended with an error after they had been taken.",
    labels=(Label("reason"),),
    read=lambda s: _failures(s, refused=False),
)
REFUSED = ReplicaMetric(
    "crosskv_replica_requests_refused",
    Kind.COUNTER,
    "Requests for which nothing was computed.",
    labels=(Label("reason"),),
    read=lambda s: _failures(s, refused=True),
)
REPLICA_PROMPT_TOKENS = ReplicaMetric(
    "crosskv_replica_prompt_tokens",
    Kind.COUNTER,
    "Prompt tokens of requests that were served; both roles count a prompt that both had.",
    read=lambda s: s.counters.prompt_tokens,
)
REPLICA_GENERATION_TOKENS = ReplicaMetric(
    "crosskv_replica_generation_tokens",
    Kind.COUNTER,
    "Tokens sampled.",
    read=lambda s: s.counters.generated_tokens,
    roles=_GENERATING,
)
PREFIX_QUERIES = ReplicaMetric(
    "crosskv_prefix_cache_queries",
    Kind.COUNTER,
    "Prompt tokens looked up in a replica's prefix cache.",
    read=lambda s: s.counters.prefix_queries,
)
PREFIX_HITS = ReplicaMetric(
    "crosskv_prefix_cache_hits",
    Kind.COUNTER,
    "Prompt tokens found in a replica's prefix cache.",
    read=lambda s: s.counters.prefix_hits,
)
PREEMPTIONS = ReplicaMetric(
    "crosskv_num_preemptions",
    Kind.COUNTER,
    "Requests that lost their blocks to others, and were computed again.",
    read=lambda s: s.counters.preemptions,
)
LOCAL_PREFILLS = ReplicaMetric(
    "crosskv_local_prefills",
    Kind.COUNTER,
    "Prompts that a generating replica computed by itself.",
    read=lambda s: s.counters.local_prefills,
    roles=_GENERATING,
)
STEPS = ReplicaMetric("crosskv_engine_steps", Kind.COUNTER, "Steps computed.", read=lambda s: s.counters.steps)
BUSY = ReplicaMetric(
    "crosskv_engine_busy_seconds",
    Kind.COUNTER,
    "Time in steps: of one second, the part in which the engine was not idle.",
    Unit.SECONDS,
    read=lambda s: s.counters.busy_seconds,
)

TRANSFERS = ReplicaMetric(
    "crosskv_kv_transfers",
    Kind.COUNTER,
    "KV transfers that completed.",
    read=lambda s: s.counters.transfers,
    roles=_DECODE,
)
TRANSFERS_FAILED = ReplicaMetric(
    "crosskv_kv_transfers_failed",
    Kind.COUNTER,
    "KV transfers that did not complete. Busy ones are asked for again in a moment.",
    labels=(Label("reason"),),
    read=lambda s: {reason: s.counters.transfer_failures.get(reason, 0) for reason in TransferFailure},
    roles=_DECODE,
)
TRANSFER_SECONDS = ReplicaMetric(
    "crosskv_kv_transfer_seconds",
    Kind.COUNTER,
    "Time of completed KV transfers, summed, the computation that they overlap with included.",
    Unit.SECONDS,
    read=lambda s: s.counters.transfer_seconds,
    roles=_DECODE,
)
PAYLOAD = ReplicaMetric(
    "crosskv_kv_transfer_payload_bytes",
    Kind.COUNTER,
    "KV bytes of completed transfers.",
    Unit.BYTES,
    read=lambda s: s.counters.completed_bytes,
    roles=_DECODE,
)
LOWER_BOUND = ReplicaMetric(
    "crosskv_kv_transfer_lower_bound_bytes",
    Kind.COUNTER,
    "The fewest KV bytes that the same transfers could have had.",
    Unit.BYTES,
    read=lambda s: s.counters.lower_bound_bytes,
    roles=_DECODE,
)
SAVED = ReplicaMetric(
    "crosskv_kv_transfer_saved_bytes",
    Kind.COUNTER,
    "KV bytes that did not have to move because layers share KV.",
    Unit.BYTES,
    read=lambda s: s.counters.unshared_bytes - s.counters.lower_bound_bytes,
    roles=_DECODE,
)
RECEIVED = ReplicaMetric(
    "crosskv_kv_transfer_received_bytes",
    Kind.COUNTER,
    "KV bytes written to pages, those of transfers that did not complete included.",
    Unit.BYTES,
    read=lambda s: s.counters.payload_bytes,
    roles=_DECODE,
)
RETRANSMITTED = ReplicaMetric(
    "crosskv_kv_transfer_retransmitted_bytes",
    Kind.COUNTER,
    "KV bytes that came with transfers that failed, so that they had to come again.",
    Unit.BYTES,
    read=lambda s: s.counters.retransmitted_bytes,
    roles=_DECODE,
)
CALLS_REFUSED = ReplicaMetric(
    "crosskv_calls_without_token",
    Kind.COUNTER,
    "gRPC calls from whoever does not have the cluster's token, to a replica's first rank.",
    read=lambda s: s.counters.strangers,
)
STALE_PIECES = ReplicaMetric(
    "crosskv_kv_transfer_stale_pieces",
    Kind.COUNTER,
    "Pieces that came when nobody wanted them any more, and were dropped.",
    read=lambda s: s.counters.stale_pieces,
    roles=_DECODE,
)
SENT = ReplicaMetric(
    "crosskv_kv_transfer_sent_bytes",
    Kind.COUNTER,
    "KV bytes queued for decode replicas.",
    Unit.BYTES,
    read=lambda s: s.counters.payload_bytes,
    roles=_PREFILL,
)
WIRE = ReplicaMetric(
    "crosskv_kv_transfer_wire_bytes",
    Kind.COUNTER,
    "Bytes that the kernel counted on the KV connections, both ways.",
    Unit.BYTES,
    read=lambda s: s.counters.wire_bytes,
    roles=_PREFILL,
)

REPLICA_METRICS = (
    RUNNING,
    WAITING,
    RECEIVING,
    OUTSTANDING_PROMPT_TOKENS,
    PREFILL_PEERS,
    PREFILL_REFUSED,
    BLOCKS,
    CACHE_USAGE,
    OWNER_LAYERS,
    TOTAL_LAYERS,
    FINISHED,
    ABORTED,
    FAILED,
    REFUSED,
    REPLICA_PROMPT_TOKENS,
    REPLICA_GENERATION_TOKENS,
    PREFIX_QUERIES,
    PREFIX_HITS,
    PREEMPTIONS,
    LOCAL_PREFILLS,
    STEPS,
    BUSY,
    TRANSFERS,
    TRANSFERS_FAILED,
    TRANSFER_SECONDS,
    PAYLOAD,
    LOWER_BOUND,
    SAVED,
    RECEIVED,
    RETRANSMITTED,
    STALE_PIECES,
    CALLS_REFUSED,
    SENT,
    WIRE,
)

REPLICAS = Metric("crosskv_replicas", Kind.GAUGE, "Replicas that report.", labels=(ROLE,))
"""Counted by the front end that reports for all replicas."""
