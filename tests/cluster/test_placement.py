"""What each replica asks of the node that it is placed on."""

import pytest
from ray.serve import Application, Deployment

from cluster.config import ClusterConfig
from cluster.deployments import build_application, role_resource
from cluster.front_end import FrontEndConfig
from cluster.openai.limits import ModelCard


def deployments(config: ClusterConfig) -> dict[str, Deployment]:
    card = ModelCard("tiny", max_model_len=8, vocab_size=8, eos_token_ids=frozenset(), created=0)
    front_end = FrontEndConfig("127.0.0.1", 8000, "tiny", card, "test", needs_prefill=True)
    application = build_application(config, front_end, 2, "test", role_resource("front-end"))
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


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_anywhere(role: str) -> None:
    assert bundles(deployments(ClusterConfig(model="tiny"))[role])[1] == {"CPU": 2.0}
