"""What one replica adds to the demand for its role, from what replicas report to the directory.

Prefill replicas see only the prompts that they have accepted. Those that wait because none is accepted any more are
known to decode replicas, so each prefill replica answers for an equal part of them.
"""

from collections.abc import Sequence

from worker.config import Role
from worker.replica_record import ReplicaRecord


def demand(own: ReplicaRecord, live: Sequence[ReplicaRecord]) -> float:
    """Prompt tokens of a prefill replica, occupancy of any other. ``live`` is the directory's last listing."""
    if own.role is not Role.PREFILL:
        return own.load.occupancy
    waiting = sum(record.load.queued_prompt_tokens for record in live if record.role is Role.DECODE)
    sharing = sum(record.role is Role.PREFILL and not record.draining for record in live)
    return own.load.queued_prompt_tokens + waiting / max(1, sharing)
