"""How others reach a replica. It crosses processes, so it imports nothing heavy."""

from dataclasses import dataclass

from worker.config import Role


@dataclass(frozen=True, slots=True)
class ReplicaRecord:
    """``incarnation`` names this life of the replica; ``kv_address`` is a prefill replica's, None for others."""

    role: Role
    incarnation: str
    session_address: str
    kv_address: str | None
