"""A prompt whose transfer lasts long enough to be interrupted anywhere, and how replicas are configured for it."""

from dataclasses import replace
from typing import Any

from tests.worker.tiny_llama import random_prompt
from worker.config import EngineConfig, Role
from worker.wire import engine_pb2 as wire

LONG = random_prompt(3000)
SLOWLY = {"max_batched_tokens": 2}
"""So small are a prefill replica's chunks that a long prompt can be interrupted anywhere."""


def is_halfway(status: wire.StatusReply) -> bool:
    """Whether a transfer is under way; if it is the replica's first, something of it has arrived."""
    return status.load.receiving_requests > 0 and status.counters.payload_bytes > 0


def prefill_config(config: EngineConfig, **settings: Any) -> EngineConfig:
    return replace(config, role=Role.PREFILL, threads=1, **settings)


def decode_config(config: EngineConfig) -> EngineConfig:
    return replace(config, role=Role.DECODE, threads=1)
