"""Plain records that describe what a transfer is about: which layers own KV, how large a token is, which part moves.

The worker translates its specs into a ``CacheLayout`` once, when an engine starts. Planning, checking and accounting
need nothing else: no tensor, no model, no name of a model.
"""

from dataclasses import dataclass

WIRE_VERSION = 1
"""Raised with every change of the messages. A replica understands its own version and the one before.

1: first version.
"""


@dataclass(frozen=True, slots=True)
class OwnerLayer:
    """A layer that owns KV: global ``kv_heads``, and the bytes of one token's keys and values."""

    name: str
    kv_heads: int
    bytes_per_token: int


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """Everything about a replica's KV that its peer must agree with. ``owners`` are in producing order.

    ``sharing_digest`` stands for the map from sharing layers to targets. Block size and tensor-parallel size are
    absent: they may differ.
    """

    fingerprint: str
    kv_dtype: str
    owners: tuple[OwnerLayer, ...]
    sharing_digest: str
    sharing_layers: int

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token over all owners."""
        return sum(owner.bytes_per_token for owner in self.owners)


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens ``[token_begin, token_end)`` of owner layers ``[layer_begin, layer_end)``."""

    layer_begin: int
    layer_end: int
    token_begin: int
    token_end: int

    def payload_bytes(self, layout: CacheLayout) -> int:
        """Exact size of its payload."""
        per_token = sum(owner.bytes_per_token for owner in layout.owners[self.layer_begin : self.layer_end])
        return per_token * (self.token_end - self.token_begin)
