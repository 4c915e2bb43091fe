"""Replicas with a cluster token in processes of their own, and clients of them.

On the way out every replica must have given back every block.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from tests.engine_client import EngineClient
from tests.engine_process import TOKEN, ReplicaProcess
from worker.config import EngineConfig, Role
from worker.replica_record import ReplicaRecord


@contextlib.contextmanager
def connected(record: ReplicaRecord) -> Iterator[EngineClient]:
    """A client of a replica."""
    client = EngineClient(record.session_address)
    try:
        yield client
    finally:
        client.close()


@contextlib.contextmanager
def colocated(process: ReplicaProcess, config: EngineConfig) -> Iterator[EngineClient]:
    """A replica that does both phases; afterwards it must hold nothing."""
    record = process.start(replace(config, role=Role.COLOCATED, threads=1, token=TOKEN))
    try:
        with connected(record) as client:
            yield client
            client.settled()
            process.require_health()
    finally:
        process.stop_replica()


@dataclass(frozen=True, slots=True)
class Pair:
    """Clients of a decode replica, which generates, and of its prefill replica, which only has a status."""

    decode: EngineClient
    prefill: EngineClient


@contextlib.contextmanager
def disaggregated(
    prefill: ReplicaProcess, decode: ReplicaProcess, config: EngineConfig, **prefill_settings: Any
) -> Iterator[Pair]:
    """A prefill and a decode replica, connected; afterwards both must hold nothing.

    ``prefill_settings`` are what the prefill replica's configuration has otherwise.
    """
    prefill_record = prefill.start(replace(config, role=Role.PREFILL, threads=1, token=TOKEN, **prefill_settings))
    try:
        decode_record = decode.start(replace(config, role=Role.DECODE, threads=1, token=TOKEN))
        decode.use_prefill_replicas(prefill_record)
        with connected(decode_record) as client, connected(prefill_record) as prefill_client:
            status = client.status()
            assert status.load.prefill_peers == 1, status.prefill_error
            yield Pair(client, prefill_client)
            client.settled()
            prefill_client.settled()
            decode.require_health()
            prefill.require_health()
    finally:
        decode.stop_replica()
        prefill.stop_replica()
