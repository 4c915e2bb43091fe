"""What each replica asks of the node that it is placed on."""

import pytest
from ray.serve import Application, Deployment

from cluster.config import ClusterConfig, ConfigError
from cluster.deployments import build_application, role_resource
from cluster.front_end import FrontEndConfig
from cluster.openai.limits import ModelCard


def deployments(config: ClusterConfig) -> dict[str, Deployment]:
    card = ModelCard("tiny", max_model_len=8, vocab_size=8, eos_token_ids=frozenset(), created=0)
    front_end = FrontEndConfig("127.0.0.1", 8000, "tiny", card, "test", needs_prefill=True)
    application = build_application(config, front_end, config.threads or 2, "test", role_resource("front-end"))
    root = application._bound_deployment
    engines = [argument._bound_deployment for argument in root.init_args if isinstance(argument, Application)]
    return {deployment.name: deployment for deployment in (root, *engines)}


def bundles(deployment: Deployment) -> list[dict[str, float]]:
    return deployment._replica_config.placement_group_bundles


def test_by_role() -> None:
    made = deployments(ClusterConfig(model="tiny", placement="role"))
    assert made["front-end"].ray_actor_options["resources"] == {"crosskv-front-end": 1.0}
    assert bundles(made["prefill"])[1] == {"CPU": 2.0, "crosskv-prefill": 1.0}
    assert bundles(made["decode"])[1] == {"CPU": 2.0, "crosskv-decode": 1.0}


def test_by_role_with_a_gpu() -> None:
    made = deployments(ClusterConfig(model="tiny", placement="role", mode="colocated", device="cuda"))
    assert bundles(made["colocated"])[1] == {"CPU": 2.0, "GPU": 1.0, "crosskv-colocated": 1.0}


@pytest.mark.parametrize("ranks", range(1, 65))
def test_by_role_every_rank_has_a_part_and_all_fit_on_one_node(ranks: int) -> None:
    """In Ray's unit of a ten-thousandth. A second replica would not fit beside."""
    made = deployments(ClusterConfig(model="tiny", placement="role", tensor_parallel_size=ranks))
    _, *parts = bundles(made["decode"])
    assert len(parts) == ranks
    taken = sum(round(part["crosskv-decode"] * 10_000) for part in parts)
    assert 10_000 - ranks < taken <= 10_000


def test_a_role_that_may_grow_is_scaled_by_serve() -> None:
    config = ClusterConfig(
        model="tiny",
        prefill_replicas=2,
        max_prefill_replicas=5,
        scale_prefill_at=700,
        decode_replicas=3,
        max_decode_replicas=3,
        scale_up_seconds=4,
        scale_down_seconds=40,
    )
    made = deployments(config)
    scaling = made["prefill"]._deployment_config.autoscaling_config
    assert (scaling.min_replicas, scaling.max_replicas) == (2, 5)
    assert (scaling.upscale_delay_s, scaling.downscale_delay_s) == (4, 40)
    assert scaling.policy.policy_function == "cluster.autoscaling.RolePolicy"
    assert scaling.policy.policy_kwargs == {"target": 700}
    assert made["decode"]._deployment_config.autoscaling_config is None
    assert made["decode"].num_replicas == 3
    assert config.ranks == 8, "room for all that may be"


def test_no_more_at_first_than_there_may_be() -> None:
    config = ClusterConfig(model="tiny", mode="colocated", decode_replicas=3, max_decode_replicas=2)
    with pytest.raises(ConfigError, match="--max-decode-replicas is 2, less than --decode-replicas, which is 3"):
        deployments(config)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_anywhere(role: str) -> None:
    assert bundles(deployments(ClusterConfig(model="tiny"))[role])[1] == {"CPU": 2.0}
