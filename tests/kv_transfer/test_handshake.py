from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given

from kv_transfer.handshake import HandshakeMismatch, layout_message, parse_layout, require_match
from kv_transfer.layout import WIRE_VERSION, CacheLayout, Lifetime, Section
from kv_transfer.wire import kv_transfer_pb2 as wire
from tests.kv_transfer.layouts import HYBRID, layout_of, layouts, make_layout

OURS = make_layout(8, 8, 8)


@given(layout=layouts)
def test_a_layout_survives_the_wire(layout: CacheLayout) -> None:
    message = wire.Layout.FromString(layout_message(layout).SerializeToString())
    assert parse_layout(message) == layout
    require_match(layout, parse_layout(message), WIRE_VERSION, "peer")


def with_section(layout: CacheLayout, index: int, **changes: Any) -> CacheLayout:
    sections = list(layout.sections)
    sections[index] = replace(sections[index], **changes)
    return replace(layout, sections=tuple(sections))


def with_owner(layout: CacheLayout, section: int, index: int, **changes: Any) -> CacheLayout:
    owners = list(layout.sections[section].owners)
    owners[index] = replace(owners[index], **changes)
    return with_section(layout, section, owners=tuple(owners))


@pytest.mark.parametrize(
    ("theirs", "field", "here", "there", "flag"),
    [
        (replace(OURS, kv_dtype="float16"), "kv_dtype", "bfloat16", "float16", "--dtype"),
        (replace(OURS, fingerprint="another"), "fingerprint", "fingerprint", "another", "--model"),
        (
            replace(with_section(OURS, 0, owners=OURS.owners[:2]), sharing_layers=3),
            "owner layers", "3 owners of 5 layers", "2 owners of 5 layers", "--kv-sharing",
        ),
        (with_owner(OURS, 0, 2, name="layers.4"), "owner layers", "layers.2", "layers.4", "--kv-sharing"),
        (replace(OURS, sharing_layers=7), "owner layers", "of 5 layers", "of 10 layers", "--kv-sharing"),
        (replace(OURS, sharing_digest="other"), "sharing map", "digest", "other", "--kv-sharing"),
        (with_owner(OURS, 0, 1, kv_heads=4), "what owner layers store", "kv_heads=2", "kv_heads=4", "--model"),
        (
            with_owner(OURS, 0, 1, bytes_per_slot=16),
            "what owner layers store", "bytes_per_slot=8", "bytes_per_slot=16", "--model",
        ),
        (
            replace(OURS, sections=(), sharing_layers=0),
            "owner layers", "3 owners", "0 owners", "--kv-sharing",
        ),
    ],
)  # fmt: skip
def test_a_mismatch_names_field_values_and_flag(
    theirs: CacheLayout, field: str, here: str, there: str, flag: str
) -> None:
    require_refusal(OURS, theirs, field, here, there, flag)


@pytest.mark.parametrize(
    ("theirs", "here", "there"),
    [
        (with_section(HYBRID, 1, window=8), "window=4", "window=8"),
        (with_section(HYBRID, 1, sinks=2), "sinks=0", "sinks=2"),
        (with_section(HYBRID, 1, lifetime=Lifetime.EVERY_TOKEN), "LAST_TOKENS", "<Lifetime.EVERY_TOKEN: 1>, window=4"),
        (with_owner(HYBRID, 2, 1, bytes_per_slot=60), "bytes_per_slot=50", "bytes_per_slot=60"),
        (with_owner(HYBRID, 0, 1, sharers=2), "sharers=3", "sharers=2"),
    ],
)
def test_what_is_stored_for_how_long_must_be_equal(theirs: CacheLayout, here: str, there: str) -> None:
    require_match(HYBRID, HYBRID, WIRE_VERSION, "10.0.0.7:5000")
    require_refusal(HYBRID, theirs, "what owner layers store", here, there, "--model")


def test_the_same_owners_in_other_sections_are_refused() -> None:
    full, window, state = HYBRID.sections
    merged = layout_of(Section(Lifetime.EVERY_TOKEN, 0, 0, full.owners + window.owners), state)
    with pytest.raises(HandshakeMismatch, match="differs in what owner layers store"):
        require_match(HYBRID, merged, WIRE_VERSION, "peer")


def require_refusal(ours: CacheLayout, theirs: CacheLayout, field: str, here: str, there: str, flag: str) -> None:
    with pytest.raises(HandshakeMismatch) as error:
        require_match(ours, theirs, WIRE_VERSION, "10.0.0.7:5000")
    message = str(error.value)
    assert message.startswith(f"10.0.0.7:5000 differs in {field}: ")
    before, after = message.split(" there, ")
    assert there in before
    assert here in after
    assert flag in after


@pytest.mark.parametrize("lifetime", [0, 5, 99])
def test_a_lifetime_that_is_not_known_is_refused_by_its_number(lifetime: int) -> None:
    message = layout_message(HYBRID)
    # Enums are open on the wire: a newer peer's value arrives as a number.
    message.sections[1].lifetime = lifetime  # type: ignore[assignment]
    message = wire.Layout.FromString(message.SerializeToString())
    with pytest.raises(HandshakeMismatch, match=f"lifetime {lifetime}, which this version does not know.*upgrade"):
        parse_layout(message)


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
