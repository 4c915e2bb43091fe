"""How much one replica is asked for: what decides how many of its role there should be. Crosses processes."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """``queued_prompt_tokens``: a prefill replica's to compute; a decode replica's that no prefill replica takes yet.

    ``occupancy`` is a generating replica's: see the function.
    """

    queued_prompt_tokens: int = 0
    occupancy: float = 0.0


def occupancy(*, kv_use: float, seats_used: int, seats: int, queued: int) -> float:
    """The share of its KV blocks or of its seats that a replica uses, whichever is larger; with a queue more than that.

    Those who wait for blocks or a seat will need as much of them as those who have them do on average.
    """
    used = max(kv_use, seats_used / seats)
    return used * (1 + queued / max(1, seats_used))
