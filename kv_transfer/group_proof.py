"""Proof that whoever a Gloo group has connected is who was met at the store.

Gloo connects whoever is first at its port and names the right number, a small one. The store is reached with the
cluster token only: every member leaves a secret there, says it to every other over the group, and compares what it
hears. A stranger who took a member's place knows none, and the group is not used.
"""

import secrets
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import Store

SECRET_BYTES = 32
_TAG = 0


def require_members(group: Any, store: Store, rank: int, size: int, seconds: float) -> None:
    """Hear every other member of a new group within ``seconds``. Raises ``RuntimeError``."""
    limit = timedelta(seconds=seconds)
    own = secrets.token_bytes(SECRET_BYTES)
    store.set(f"secrets/{rank}", own)  # type: ignore[arg-type] # it takes bytes as well
    others = [other for other in range(size) if other != rank]
    said = torch.frombuffer(bytearray(own), dtype=torch.uint8)
    heard = {other: torch.zeros(SECRET_BYTES, dtype=torch.uint8) for other in others}
    works = [group.recv([heard[other]], other, _TAG) for other in others]
    works += [group.send([said], other, _TAG) for other in others]
    for work in works:
        work.wait(limit)
    store.wait([f"secrets/{other}" for other in others], limit)
    for other in others:
        if not secrets.compare_digest(bytes(heard[other].numpy()), bytes(store.get(f"secrets/{other}"))):
            raise RuntimeError(f"somebody else has taken the place of rank {other}")
