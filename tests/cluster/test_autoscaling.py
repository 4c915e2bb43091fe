"""How many replicas are wanted, for any load; and the policy as Serve's controller has it, without crosskv."""

import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray import cloudpickle
from ray.serve.config import AutoscalingContext, AutoscalingPolicy

from cluster.autoscaling import LOAD, RolePolicy, ScalingLimits, desired_replicas

LOADS = st.lists(st.floats(0, 1e6), max_size=20)
NUMBERS = st.integers(1, 50)


@st.composite
def all_limits(draw: st.DrawFn) -> ScalingLimits:
    least = draw(NUMBERS)
    return ScalingLimits(draw(st.floats(0.01, 1e5)), least, least + draw(st.integers(0, 50)))


ANY = ScalingLimits(1.0, 1, 100)


@pytest.mark.parametrize(
    ("loads", "current", "wanted"),
    [
        ([0.0], 1, 1),
        ([1.0], 1, 1),
        ([1.01], 1, 2),
        ([3.5], 1, 4),
        ([0.9, 0.9], 2, 2),
        # One could carry it, but barely.
        ([0.45, 0.45], 2, 2),
        ([0.4, 0.39], 2, 1),
        # The second has not reported yet.
        ([1.6], 2, 2),
        ([], 3, 1),
    ],
)
def test_by_hand(loads: list[float], current: int, wanted: int) -> None:
    assert desired_replicas(loads, current, ANY) == wanted


@given(loads=LOADS, current=NUMBERS, limits=all_limits())
def test_within_limits(loads: list[float], current: int, limits: ScalingLimits) -> None:
    assert limits.least <= desired_replicas(loads, current, limits) <= limits.most


@given(loads=LOADS, current=NUMBERS, limits=all_limits())
def test_enough(loads: list[float], current: int, limits: ScalingLimits) -> None:
    """The target is kept, unless there are as many as there may be; after a removal with a fifth to spare."""
    wanted = desired_replicas(loads, current, limits)
    each = math.fsum(loads) / wanted
    assert wanted == limits.most or each <= limits.target * (1 + 1e-9)
    if wanted < min(current, limits.most):
        assert each <= 0.8 * limits.target * (1 + 1e-9)


@given(loads=LOADS, current=NUMBERS, limits=all_limits(), part=st.floats(0, 1))
def test_more_load_never_wants_fewer(loads: list[float], current: int, limits: ScalingLimits, part: float) -> None:
    less = [load * part for load in loads]
    assert desired_replicas(less, current, limits) <= desired_replicas(loads, current, limits)


@given(loads=LOADS, current=NUMBERS, limits=all_limits())
def test_it_comes_to_rest(loads: list[float], current: int, limits: ScalingLimits) -> None:
    """Under a load that stays, one decision is the last."""
    wanted = desired_replicas(loads, current, limits)
    assert desired_replicas(loads, wanted, limits) == wanted


@given(
    demand=st.floats(0, 1e6),
    limits=all_limits(),
    swings=st.lists(st.floats(0.81, 1.0), min_size=1, max_size=20),
)
def test_it_does_not_flap(demand: float, limits: ScalingLimits, swings: Sequence[float]) -> None:
    """Swings of less than a fifth below a peak remove nobody who was added for it."""
    now = settled = desired_replicas([demand], limits.least, limits)
    for swing in swings:
        now = desired_replicas([demand * swing], now, limits)
        assert now == settled


def context(loads: dict[str, float], target: int) -> AutoscalingContext:
    return AutoscalingContext(
        deployment_id=None,
        deployment_name="prefill",
        app_name="crosskv",
        current_num_replicas=target,
        target_num_replicas=target,
        running_replicas=[],
        total_num_requests=0.0,
        total_queued_requests=0.0,
        aggregated_metrics={LOAD: loads, "other": {"a": 1e9}} if loads else {},
        raw_metrics={},
        capacity_adjusted_min_replicas=1,
        capacity_adjusted_max_replicas=3,
        policy_state={},
        last_scale_up_time=None,
        last_scale_down_time=None,
        current_time=0.0,
        config=None,
    )


def test_the_policy_sums_what_replicas_report() -> None:
    policy = RolePolicy(100)
    assert policy(context({"a": 90.0, "b": 60.0}, 2)) == (2, {})
    assert policy(context({"a": 90.0, "b": 150.0}, 2)) == (3, {})
    assert policy(context({"a": 900.0}, 1)) == (3, {})
    assert policy(context({}, 2)) == (2, {}), "nobody has reported: nothing is known"


def test_the_controller_needs_no_crosskv(tmp_path: Path) -> None:
    """Serve's controller gets the policy by value; with a job, its node has none of our packages."""
    made = AutoscalingPolicy(policy_function=RolePolicy, policy_kwargs={"target": 100})
    (tmp_path / "policy").write_bytes(made.get_serialized_policy_def())
    (tmp_path / "context").write_bytes(cloudpickle.dumps(context({"a": 250.0}, 1)))
    code = f"""
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("cluster", "worker", "kv_transfer", "kernels"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
from ray import cloudpickle
policy, context = (cloudpickle.loads(open("{tmp_path}/" + name, "rb").read()) for name in ("policy", "context"))
print(policy(target=100)(context)[0])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.strip() == "3", done.stderr
