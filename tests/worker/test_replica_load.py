"""What an engine says about how much it is asked for."""

import pytest

from worker.replica_load import occupancy


@pytest.mark.parametrize(
    ("kv_use", "seats_used", "queued", "expected"),
    [
        (0.0, 0, 0, 0.0),
        (0.5, 1, 0, 0.5),
        # Short requests: seats run out while blocks are left.
        (0.1, 9, 0, 0.9),
        # Four hold the half of all blocks, four more wait for as much.
        (0.5, 4, 4, 1.0),
        (1.0, 2, 6, 4.0),
        # Somebody must be first, and is admitted in the next step.
        (0.0, 0, 5, 0.0),
    ],
)
def test_occupancy(kv_use: float, seats_used: int, queued: int, expected: float) -> None:
    assert occupancy(kv_use=kv_use, seats_used=seats_used, seats=10, queued=queued) == pytest.approx(expected)
