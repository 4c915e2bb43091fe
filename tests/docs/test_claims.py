"""The checks of documented commands find what is wrong with a command."""

import pytest

from tests.docs.claims import Stage, claim_of
from tests.docs.documents import DOCUMENTS, Command

WRONG = (
    "frobnicate the model",
    "crosskv serve smollm2 --no-such-flag",
    "crosskv serve smollm2 --block-size none",
    "crosskv fetch smollm2 --no-such-flag",
    "crosskv inspect smollm2 --kv-sharing sometimes",
    "CROSSKV_KV_SHARING=sometimes crosskv serve smollm2",
    "make no-such-target",
    "python -m cluster.no_such_module",
    "python -m benchmarks.overload --no-such-flag",
    "pytest tests/nowhere",
    "pytest tests/docs --no-such-flag",
    "docker build -f k8s/image/Dockerfile --build-arg NOTHING=1 .",
    "kubectl apply -k k8s/overlays/nowhere",
    "kubectl -n crosskv get pods --no-such-flag",
    "kubectl -n crosskv exec crosskv-nobody -- true",
    "ray start --no-such-flag",
    "ray job submit --working-dir . -- python -m cluster.cli serve smollm2 --no-such-flag",
    "serve deploy k8s/nowhere.yaml",
    "source .venv/bin/nothing",
)


@pytest.mark.parametrize("text", WRONG)
def test_wrong_commands_are_found(stage: Stage, text: str) -> None:
    command = Command(DOCUMENTS[0], 1, text)
    with pytest.raises(Exception):  # noqa: B017, PT011
        claim_of(command).check(stage, command)
