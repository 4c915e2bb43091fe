"""What the collector looks at once a process has started."""

import gc

import pytest

from cluster.garbage import made_to_stay


@pytest.fixture(autouse=True)
def _thawed():
    yield
    gc.unfreeze()


def test_what_is_made_in_the_block_is_not_looked_at_again() -> None:
    with made_to_stay():
        assert not gc.isenabled()
        made = [[index] for index in range(1000)]
    assert gc.isenabled()
    assert not {id(each) for each in made} & {id(each) for each in gc.get_objects()}
    assert gc.get_freeze_count() >= len(made)


def test_garbage_of_the_block_is_not_kept() -> None:
    class Ring:
        alive = 0

        def __init__(self) -> None:
            Ring.alive += 1
            self.ring = self

        def __del__(self) -> None:
            Ring.alive -= 1

    with made_to_stay():
        Ring()
    assert Ring.alive == 0


def test_an_error_leaves_the_collector_on() -> None:
    with pytest.raises(ValueError, match="no model"), made_to_stay():
        raise ValueError("no model")
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
