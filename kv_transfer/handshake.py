"""The handshake: two replicas compare what their KV must have in common before the first request."""

from dataclasses import dataclass

from kv_transfer.layout import WIRE_VERSION, CacheLayout, Lifetime, OwnerLayer, Section
from kv_transfer.rank_pair import check_ranks
from kv_transfer.wire import kv_transfer_pb2 as wire

MAX_NAME = 200
"""Characters of a peer's name that are repeated to it."""
_MAX_BYTES = 4 << 20
_MAX_OWNERS = 1 << 15
_SHOWN = 400


class HandshakeMismatch(Exception):
    """Two replicas that must not exchange KV; the message names field, both values and what to change."""


@dataclass(frozen=True, slots=True)
class _Field:
    name: str
    ours: object
    theirs: object
    remedy: str


def layout_message(layout: CacheLayout) -> wire.Layout:
    """A layout as it crosses the wire."""
    return wire.Layout(
        fingerprint=layout.fingerprint,
        kv_dtype=layout.kv_dtype,
        sections=[_section_message(section) for section in layout.sections],
        sharing_digest=layout.sharing_digest,
        sharing_layers=layout.sharing_layers,
    )


def parse_layout(message: wire.Layout) -> CacheLayout:
    """The inverse of ``layout_message``. Raises ``HandshakeMismatch`` for one that no model has or we do not know."""
    parts = len(message.sections) + sum(len(section.owners) for section in message.sections)
    if parts > _MAX_OWNERS:
        raise HandshakeMismatch(f"the peer says that it has {parts} sections and owner layers; no model has as many")
    return CacheLayout(
        fingerprint=message.fingerprint,
        kv_dtype=message.kv_dtype,
        sections=tuple(_parse_section(section) for section in message.sections),
        sharing_digest=message.sharing_digest,
        sharing_layers=message.sharing_layers,
    )


def _section_message(section: Section) -> wire.Section:
    return wire.Section(
        lifetime=wire.Lifetime.Name(section.lifetime.value),
        window=section.window,
        sinks=section.sinks,
        owners=[
            wire.Owner(name=o.name, kv_heads=o.kv_heads, bytes_per_slot=o.bytes_per_slot, sharers=o.sharers)
            for o in section.owners
        ],
    )


def _parse_section(message: wire.Section) -> Section:
    try:
        lifetime = Lifetime(message.lifetime)
    except ValueError as error:
        raise HandshakeMismatch(
            f"the peer has layers of lifetime {message.lifetime}, which this version does not know; upgrade the older "
            f"one"
        ) from error
    owners = tuple(OwnerLayer(o.name, o.kv_heads, o.bytes_per_slot, o.sharers) for o in message.owners)
    return Section(lifetime, message.window, message.sinks, owners)


def require_match(ours: CacheLayout, theirs: CacheLayout, their_version: int, peer: str) -> None:
    """Raise ``HandshakeMismatch`` for the first field in which the peer differs.

    Wire versions may differ by one. Block size and tensor-parallel size are not compared.
    """
    if abs(their_version - WIRE_VERSION) > 1 or their_version < 1:
        raise HandshakeMismatch(
            f"{peer} speaks wire version {their_version}, this replica {WIRE_VERSION}; only neighbouring versions "
            f"understand each other: upgrade the older one"
        )
    fields = (
        _Field("kv_dtype", ours.kv_dtype, theirs.kv_dtype, "start both with the same --dtype"),
        _Field("fingerprint", ours.fingerprint, theirs.fingerprint, "start both with the same --model"),
        _Field("owner layers", _map(ours), _map(theirs), "start both with the same --kv-sharing"),
        _Field("sharing map", ours.sharing_digest, theirs.sharing_digest, "start both with the same --kv-sharing"),
        _Field("what owner layers store", ours.sections, theirs.sections, "start both with the same --model"),
    )
    for field in fields:
        if field.ours != field.theirs:
            theirs_shown, ours_shown = _excerpts(str(field.theirs), str(field.ours))
            raise HandshakeMismatch(
                f"{peer} differs in {field.name}: {theirs_shown} there, {ours_shown} here; {field.remedy}"
            )


def require_size(message_bytes: int) -> None:
    """Raise ``HandshakeMismatch`` for a message that is larger than any model's layout."""
    if message_bytes > _MAX_BYTES:
        raise HandshakeMismatch(f"the peer's layout has {message_bytes} bytes; at most {_MAX_BYTES} are read")


def require_transport(ours: str, theirs: str, peer: str) -> None:
    """Raise ``HandshakeMismatch`` unless payloads travel the same way; a peer that names no way uses gRPC."""
    if ours != (theirs or "grpc"):
        raise HandshakeMismatch(
            f"{peer} differs in transport: {theirs[:MAX_NAME] or 'grpc'} there, {ours} here; start both with the same "
            f"--transport and --device"
        )


def require_ranks(layout: CacheLayout, rank: int, ranks: int, peer: str) -> None:
    """Raise ``HandshakeMismatch`` unless a peer of so many ranks can hold this layout."""
    problem = f"rank {rank} does not exist" if rank >= ranks else check_ranks(layout, ranks)
    if problem is not None:
        raise HandshakeMismatch(f"{peer} says that it has {ranks} ranks: {problem}; see --tensor-parallel-size")


def _excerpts(theirs: str, ours: str) -> tuple[str, str]:
    """Both from a little before they differ, short enough for gRPC's trailers."""
    same = next((i for i, (a, b) in enumerate(zip(theirs, ours, strict=False)) if a != b), 0)
    begin = max(0, same - _SHOWN // 4)

    def excerpt(text: str) -> str:
        if len(text) <= _SHOWN:
            return text
        return ("…" if begin else "") + text[begin : begin + _SHOWN] + ("…" if begin + _SHOWN < len(text) else "")

    return excerpt(theirs), excerpt(ours)


def _map(layout: CacheLayout) -> str:
    names = list(dict.fromkeys(owner.name for owner in layout.owners))
    ends = f"{names[0]} … {names[-1]}" if names else "none"
    return f"{len(names)} owners of {len(names) + layout.sharing_layers} layers ({ends})"
