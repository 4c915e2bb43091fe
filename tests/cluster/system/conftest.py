"""Two prefill and two decode replicas of a tiny model."""

from collections.abc import Iterator

import pytest

from tests.serving import Serving

__all__ = ["Serving"]


@pytest.fixture(scope="session")
def serving(one_cluster: Serving) -> Serving:
    """The session's cluster as it was configured at first; what redeploys it puts it back."""
    one_cluster.require(one_cluster.config)
    return one_cluster


@pytest.fixture(autouse=True)
def conservation(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whatever a test did, nothing may be left of it."""
    yield
    if "one_cluster" in request.fixturenames:
        request.getfixturevalue("one_cluster").wait_until_idle()
