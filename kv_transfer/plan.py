"""What must move for one request, and in which pieces. Pure functions of a layout and token ranges."""

from collections.abc import Iterator

from kv_transfer.layout import CacheLayout, Piece


def lower_bound(layout: CacheLayout, prompt_len: int, held: int) -> int:
    """The fewest payload bytes that any connector could send.

    The decode side computes the last prompt token itself and holds the first ``held``, so it lacks the tokens
    ``[held, prompt_len - 1)`` of every owner layer.
    """
    return max(0, prompt_len - 1 - held) * layout.bytes_per_token


def plan_pieces(layout: CacheLayout, token_begin: int, token_end: int, max_piece_bytes: int) -> Iterator[Piece]:
    """Cut ``[token_begin, token_end)`` of all owners into pieces, in producing order.

    As many consecutive layers as fit ``max_piece_bytes`` share a piece; a layer that alone is larger is cut by tokens.
    A piece holds at least one token of one layer, however small the limit.
    """
    if token_begin >= token_end:
        return
    layer = 0
    while layer < len(layout.owners):
        end = layer + 1
        while end < len(layout.owners):
            wider = Piece(layer, end + 1, token_begin, token_end)
            if wider.payload_bytes(layout) > max_piece_bytes:
                break
            end += 1
        per_token = sum(owner.bytes_per_token for owner in layout.owners[layer:end])
        step = max(1, max_piece_bytes // per_token)
        for begin in range(token_begin, token_end, step):
            yield Piece(layer, end, begin, min(begin + step, token_end))
        layer = end
