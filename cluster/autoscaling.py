"""How many replicas of a role there should be: the planner, and the policy by which Ray Serve asks it.

Serve gives a policy to its controller by value, module included, and the controller's node need not have crosskv. So
nothing of crosskv is imported here.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from ray.serve.config import AutoscalingContext

LOAD = "crosskv_load"
"""What replicas call their load in ``record_autoscaling_stats``."""
CALM = 0.8
"""A replica goes only when what is left would have no more than this part of the target."""


@dataclass(frozen=True, slots=True)
class ScalingLimits:
    """``target`` is the load that one replica should have at most; there are ``least`` to ``most`` of them."""

    target: float
    least: int
    most: int


def desired_replicas(loads: Iterable[float], current: int, limits: ScalingLimits) -> int:
    """The number of replicas that ``loads``, one per replica that has reported, need where there are ``current``.

    As many as bring the load of each to the target. Fewer than now only if theirs would stay well below it, so that
    load which swings by less than a fifth moves nothing.
    """
    demand = math.fsum(loads)
    needed = math.ceil(demand / limits.target)
    if needed < current:
        needed = min(current, math.ceil(demand / (CALM * limits.target)))
    return max(limits.least, min(limits.most, needed))


class RolePolicy:
    """One role's autoscaling policy. How long a wish must last before it is followed is Serve's to say."""

    def __init__(self, target: float) -> None:
        self._target = target

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, object]]:
        """The wanted number of replicas, and no state."""
        loads = (context.aggregated_metrics or {}).get(LOAD)
        if not loads:
            return context.target_num_replicas, {}
        limits = ScalingLimits(
            self._target, context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
        )
        return desired_replicas(loads.values(), context.target_num_replicas, limits), {}
