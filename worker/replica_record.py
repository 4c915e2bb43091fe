"""How others reach a replica. It crosses processes, so it imports nothing heavy."""

from dataclasses import dataclass

from worker.config import Role


@dataclass(frozen=True, slots=True)
class ReplicaRecord:
    """``incarnation`` names this life of the replica; ``kv_addresses`` are a prefill replica's, one per rank.

    A ``draining`` replica finishes what it has and takes nothing new.
    """

    role: Role
    incarnation: str
    session_address: str
    kv_addresses: tuple[str, ...] = ()
    draining: bool = False
