"""What has arrived of one transfer: every (owner, slot) exactly once, and nothing that was not expected.

Made with a manifest when a transfer starts, ticked by the engine for every piece, dropped when the transfer ends. A
request runs only after its ledger is complete.
"""

from kv_transfer.layout import Piece
from kv_transfer.manifest import Manifest


class UnexpectedPiece(ValueError):
    """A piece that the manifest does not cover, that has the wrong size, or that came before."""


class Ledger:
    """One bit per (owner, slot), in one integer per owner."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._arrived = [[0] * len(section.owners) for section in manifest.layout.sections]
        self.received_bytes = 0

    def check(self, piece: Piece, payload_bytes: int) -> None:
        """Raise ``UnexpectedPiece`` unless the piece is expected, still missing, and of the right size.

        Called before a byte of it is written.
        """
        manifest = self._manifest
        if not 0 <= piece.section < len(self._arrived):
            raise UnexpectedPiece(f"section {piece.section} of {len(self._arrived)}")
        arrived, slots = self._arrived[piece.section], manifest.ranges[piece.section]
        if not (0 <= piece.layer_begin < piece.layer_end <= len(arrived)):
            raise UnexpectedPiece(f"layers {piece.layer_begin}–{piece.layer_end} of {len(arrived)} owners")
        if not (slots.begin <= piece.slot_begin < piece.slot_end <= slots.end):
            raise UnexpectedPiece(
                f"slots {piece.slot_begin}–{piece.slot_end}, expected within {slots.begin}–{slots.end}"
            )
        expected = piece.payload_bytes(manifest.layout)
        if payload_bytes != expected:
            raise UnexpectedPiece(f"{payload_bytes} payload bytes, expected {expected}")
        bits = self._bits(piece)
        if any(owner & bits for owner in arrived[piece.layer_begin : piece.layer_end]):
            raise UnexpectedPiece(f"slots {piece.slot_begin}–{piece.slot_end} of a layer arrived twice")

    def record(self, piece: Piece) -> None:
        """Tick a piece that was checked and written."""
        for layer in range(piece.layer_begin, piece.layer_end):
            self._arrived[piece.section][layer] |= self._bits(piece)
        self.received_bytes += piece.payload_bytes(self._manifest.layout)

    @property
    def complete(self) -> bool:
        """Whether every expected slot has arrived."""
        return all(
            owner == (1 << len(slots)) - 1
            for owners, slots in zip(self._arrived, self._manifest.ranges, strict=True)
            for owner in owners
        )

    def _bits(self, piece: Piece) -> int:
        first = self._manifest.ranges[piece.section].begin
        return ((1 << (piece.slot_end - piece.slot_begin)) - 1) << (piece.slot_begin - first)
