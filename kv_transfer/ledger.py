"""What has arrived of one transfer: every (layer, token) exactly once, and nothing that was not expected.

Made with a manifest when a transfer starts, ticked by the engine for every piece, dropped when the transfer ends. A
request runs only after its ledger is complete.
"""

from kv_transfer.layout import Piece
from kv_transfer.manifest import Manifest


class UnexpectedPiece(ValueError):
    """A piece that the manifest does not cover, that has the wrong size, or that came before."""


class Ledger:
    """One bit per (layer, token), in one integer per layer."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._arrived = [0] * len(manifest.layout.owners)
        self.received_bytes = 0

    def check(self, piece: Piece, payload_bytes: int) -> None:
        """Raise ``UnexpectedPiece`` unless the piece is expected, still missing, and of the right size.

        Called before a byte of it is written.
        """
        manifest = self._manifest
        if not (0 <= piece.layer_begin < piece.layer_end <= len(self._arrived)):
            raise UnexpectedPiece(f"layers {piece.layer_begin}–{piece.layer_end} of {len(self._arrived)} owners")
        if not (manifest.held <= piece.token_begin < piece.token_end <= manifest.end):
            raise UnexpectedPiece(
                f"tokens {piece.token_begin}–{piece.token_end}, expected within {manifest.held}–{manifest.end}"
            )
        expected = piece.payload_bytes(manifest.layout)
        if payload_bytes != expected:
            raise UnexpectedPiece(f"{payload_bytes} payload bytes, expected {expected}")
        bits = self._bits(piece)
        if any(arrived & bits for arrived in self._arrived[piece.layer_begin : piece.layer_end]):
            raise UnexpectedPiece(f"tokens {piece.token_begin}–{piece.token_end} of a layer arrived twice")

    def record(self, piece: Piece) -> None:
        """Tick a piece that was checked and written."""
        for layer in range(piece.layer_begin, piece.layer_end):
            self._arrived[layer] |= self._bits(piece)
        self.received_bytes += piece.payload_bytes(self._manifest.layout)

    @property
    def complete(self) -> bool:
        """Whether every expected slot has arrived."""
        everything = (1 << (self._manifest.end - self._manifest.held)) - 1
        return all(arrived == everything for arrived in self._arrived)

    def _bits(self, piece: Piece) -> int:
        return ((1 << (piece.token_end - piece.token_begin)) - 1) << (piece.token_begin - self._manifest.held)
