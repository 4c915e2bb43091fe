import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.openai import json_bounds
from cluster.openai.errors import ApiError
from cluster.openai.json_bounds import require_few_containers

VALUES = st.recursive(
    st.none() | st.integers() | st.text('ab"\\[]{}, é', max_size=12),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text('"\\{[a', max_size=3), inner, max_size=4),
    max_leaves=25,
)


def containers(value: object) -> int:
    if isinstance(value, dict):
        return 1 + sum(map(containers, value.values()))
    return 1 + sum(map(containers, value)) if isinstance(value, list) else 0


def drive(body: bytes) -> bool:
    """Whether a body is let through. It is not waited for: nothing happens elsewhere."""
    running = require_few_containers(body)
    try:
        while True:
            running.send(None)
    except StopIteration:
        return True
    except ApiError:
        return False


@settings(max_examples=300, deadline=None)
@given(value=VALUES, limit=st.integers(0, 12), size=st.integers(1, 9), ascii_only=st.booleans())
def test_what_is_counted_are_arrays_and_objects_wherever_a_body_is_cut(
    value: object, limit: int, size: int, ascii_only: bool
) -> None:
    body = json.dumps(value, ensure_ascii=ascii_only).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_bounds, "MAX_CONTAINERS", limit)
        patch.setattr(json_bounds, "_SLICE_BYTES", size)
        assert drive(body) == (containers(value) <= limit)


@pytest.mark.parametrize(
    "unit", [b"{}", b"[", b'"\\"[', b'"[', b"\\", b'"a",[],', b'"\\\\",{"":[]},'], ids=lambda unit: unit.decode()
)
def test_no_text_takes_long(unit: bytes) -> None:
    body = unit * ((2 << 20) // len(unit))
    started = time.process_time()
    drive(body)
    assert time.process_time() - started < 10.0, "it is linear, and takes tenths of a second"
