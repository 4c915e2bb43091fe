from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings

from kv_transfer.handshake import HandshakeMismatch, layout_message, parse_layout, require_match
from kv_transfer.layout import WIRE_VERSION, CacheLayout, OwnerLayer
from kv_transfer.wire import kv_transfer_pb2 as wire
from tests.kv_transfer.layouts import layouts, make_layout

OURS = make_layout(8, 8, 8)


@given(layout=layouts)
@settings(deadline=None)
def test_a_layout_survives_the_wire(layout: CacheLayout) -> None:
    message = wire.Layout.FromString(layout_message(layout).SerializeToString())
    assert parse_layout(message) == layout
    require_match(layout, parse_layout(message), WIRE_VERSION, "peer")


def owner(index: int, **changes: Any) -> tuple[OwnerLayer, ...]:
    owners = list(OURS.owners)
    owners[index] = replace(owners[index], **changes)
    return tuple(owners)


@pytest.mark.parametrize(
    ("theirs", "field", "here", "there", "flag"),
    [
        (replace(OURS, kv_dtype="float16"), "kv_dtype", "bfloat16", "float16", "--dtype"),
        (replace(OURS, fingerprint="another"), "fingerprint", "fingerprint", "another", "--model"),
        (
            replace(OURS, owners=OURS.owners[:2], sharing_layers=3),
            "owner layers", "3 owners of 5 layers", "2 owners of 5 layers", "--kv-sharing",
        ),
        (
            replace(OURS, owners=owner(2, name="layers.4")),
            "owner layers", "layers.2", "layers.4", "--kv-sharing",
        ),
        (replace(OURS, sharing_layers=7), "owner layers", "of 5 layers", "of 10 layers", "--kv-sharing"),
        (replace(OURS, sharing_digest="other"), "sharing map", "digest", "other", "--kv-sharing"),
        (replace(OURS, owners=owner(1, kv_heads=4)), "owner layer sizes", "kv_heads=2", "kv_heads=4", "--model"),
        (
            replace(OURS, owners=owner(1, bytes_per_token=16)),
            "owner layer sizes", "bytes_per_token=8", "bytes_per_token=16", "--model",
        ),
        (replace(OURS, owners=(), sharing_layers=0), "owner layers", "3 owners", "0 owners", "--kv-sharing"),
    ],
)  # fmt: skip
def test_a_mismatch_names_field_values_and_flag(
    theirs: CacheLayout, field: str, here: str, there: str, flag: str
) -> None:
    with pytest.raises(HandshakeMismatch) as error:
        require_match(OURS, theirs, WIRE_VERSION, "10.0.0.7:5000")
    message = str(error.value)
    assert message.startswith(f"10.0.0.7:5000 differs in {field}: ")
    before, after = message.split(" there, ")
    assert there in before
    assert here in after
    assert flag in after


def test_neighbouring_wire_versions_understand_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kv_transfer.handshake.WIRE_VERSION", 5)
    for version in (4, 5, 6):
        require_match(OURS, OURS, version, "peer")
    for version in (0, 3, 7, 2**32 - 1):
        with pytest.raises(HandshakeMismatch, match=f"wire version {version}, this replica 5; .*upgrade"):
            require_match(OURS, OURS, version, "peer")


def test_a_peer_without_a_version_is_refused() -> None:
    with pytest.raises(HandshakeMismatch, match="wire version 0"):
        require_match(OURS, OURS, 0, "peer")
