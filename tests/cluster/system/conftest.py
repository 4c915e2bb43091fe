"""Two prefill and two decode replicas of a tiny model."""

from collections.abc import Iterator

import pytest

from tests.serving import Serving

__all__ = ["Serving"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What redeploys the cluster comes last: before a test that wants it as it was at first it is put back."""
    items.sort(key=lambda item: isinstance(item, pytest.Function) and "redeployed" in item.fixturenames)


@pytest.fixture
def serving(one_cluster: Serving) -> Iterator[Serving]:
    """The session's cluster as it was configured at first; whatever a test did, nothing may be left of it."""
    one_cluster.require(one_cluster.config)
    yield one_cluster
    one_cluster.wait_until_idle()


@pytest.fixture
def redeployed(one_cluster: Serving) -> Serving:
    """The session's cluster, for a test that deploys it otherwise, and looks itself whether anything is left."""
    return one_cluster
