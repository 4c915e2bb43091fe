"""What must move for one request, and in which pieces. Pure functions of a layout and slot ranges."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from kv_transfer.layout import CacheLayout, Lifetime, Piece, SlotRange


def lacking(layout: CacheLayout, prompt_len: int, held: Sequence[int]) -> tuple[SlotRange, ...]:
    """What a decode replica lacks of each section, when it holds the slots before ``held``.

    It computes the last prompt token itself, so it needs what that step sees of the tokens before.
    """
    ranges = []
    for section, first in zip(layout.sections, held, strict=True):
        needed = section.needed(prompt_len)
        ranges.append(SlotRange(min(max(needed.begin, first), needed.end), needed.end))
    return tuple(ranges)


def lower_bound(layout: CacheLayout, ranges: Sequence[SlotRange]) -> int:
    """The fewest payload bytes that any connector could send for the slots in ``ranges``, one per section."""
    return sum(section.bytes_per_slot * len(slots) for section, slots in zip(layout.sections, ranges, strict=True))


def plan_pieces(layout: CacheLayout, whole: Piece, max_piece_bytes: int) -> Iterator[Piece]:
    """Cut a piece of any size into some that are small enough, in producing order.

    As many consecutive owners as fit ``max_piece_bytes`` share a piece; an owner that alone is larger is cut by slots.
    A piece holds at least one slot of one owner, however small the limit.
    """
    if whole.slot_begin == whole.slot_end:
        return
    owners = layout.sections[whole.section].owners
    layer = whole.layer_begin
    while layer < whole.layer_end:
        end = layer + 1
        while end < whole.layer_end:
            wider = replace(whole, layer_begin=layer, layer_end=end + 1)
            if wider.payload_bytes(layout) > max_piece_bytes:
                break
            end += 1
        per_slot = sum(owner.bytes_per_slot for owner in owners[layer:end])
        step = max(1, max_piece_bytes // per_slot)
        for begin in range(whole.slot_begin, whole.slot_end, step):
            yield Piece(whole.section, layer, end, begin, min(begin + step, whole.slot_end))
        layer = end


def whole_section(layout: CacheLayout, section: int, slots: SlotRange) -> Piece:
    """Slots of all owners of a section as one piece."""
    return Piece(section, 0, len(layout.sections[section].owners), slots.begin, slots.end)


def check_request(layout: CacheLayout, prompt_len: int, ranges: Sequence[SlotRange]) -> str | None:
    """Why a decode replica cannot be given these slots of a prompt, or None if it can.

    A prefill replica has, when it is done, exactly what the last prompt token's step needs.
    """
    if len(ranges) != len(layout.sections):
        return f"{len(ranges)} slot ranges for {len(layout.sections)} sections"
    for index, (section, slots) in enumerate(zip(layout.sections, ranges, strict=True)):
        needed = section.needed(prompt_len)
        if not (needed.begin <= slots.begin <= slots.end == needed.end):
            kind = "state" if section.lifetime is Lifetime.STATE else "tokens"
            return (
                f"{kind} {slots.begin}–{slots.end} of section {index}, of which a prompt of {prompt_len} tokens "
                f"needs {needed.begin}–{needed.end}"
            )
    return None
