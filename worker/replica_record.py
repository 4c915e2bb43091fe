"""How others reach a replica. It crosses processes, so it imports nothing heavy."""

from dataclasses import dataclass, field

from worker.config import Role
from worker.replica_load import ReplicaLoad


@dataclass(frozen=True, slots=True)
class ReplicaRecord:
    """``incarnation`` names this life of the replica; ``kv_addresses`` are a prefill replica's, one per rank.

    A ``draining`` replica finishes what it has and takes nothing new. ``load`` is at most a few seconds old.
    """

    role: Role
    incarnation: str
    session_address: str
    kv_addresses: tuple[str, ...] = ()
    draining: bool = False
    load: ReplicaLoad = field(default_factory=ReplicaLoad)
