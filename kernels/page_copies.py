"""Triton kernels of ``kernels.pages``: rows into slots, tokens of many layers into a payload and back.

Nothing is calculated, so elements travel as integers of their size, whatever their type. The write by slot follows
``reshape_and_cache`` of PagedAttention (Kwon et al. 2023).
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from kernels.launch import WORDS, Kernel, next_power_of_two
from kernels.pages import ALL_HEADS, IntArray, Slots

ROW_TILE = 1024
"""Elements of one token that one program stores."""

RUN_TILE = 4096
"""Elements of consecutive tokens of one head that one program copies."""

TRITON_WORDS = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}


@Kernel
def store_rows(
    cache: tl.tensor,
    values: tl.tensor,
    blocks: tl.tensor,
    offsets: tl.tensor,
    block_stride: tl.tensor,
    row_stride: tl.tensor,
    part_stride: tl.tensor,
    head_stride: tl.tensor,
    parts: tl.constexpr,
    kv_heads: tl.constexpr,
    block_size: tl.constexpr,
    head_dim: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    """One program per token and ``tile`` elements of it."""
    row = tl.program_id(0).to(tl.int64)
    element = tl.program_id(1) * tile + tl.arange(0, tile)
    lane, dim = element // head_dim, element % head_dim
    block = tl.load(blocks + row)
    inside = (element < parts * kv_heads * head_dim) & (block >= 0)
    source = row * row_stride + (lane // kv_heads) * part_stride + (lane % kv_heads) * head_stride + dim
    destination = block * block_stride + (lane * block_size + tl.load(offsets + row)) * head_dim + dim
    tl.store(cache + destination, tl.load(values + source, mask=inside), mask=inside)


def write_slots(cache: torch.Tensor, slots: Slots, values: torch.Tensor) -> None:
    """Store ``[tokens, parts, kv_heads, head_dim]`` of the cache's dtype.

    Of ``values`` only the last dimension must be contiguous. Tokens whose block is negative are not stored.
    """
    _, parts, kv_heads, block_size, head_dim = cache.shape
    if values.dtype != cache.dtype or values.shape != (len(slots.blocks), parts, kv_heads, head_dim):
        raise ValueError(
            f"values are {values.dtype} {tuple(values.shape)}, but {len(slots.blocks)} slots of the cache take "
            f"{cache.dtype} {(len(slots.blocks), parts, kv_heads, head_dim)}"
        )
    if values.stride(-1) != 1:
        values = values.contiguous()
    word = WORDS[cache.element_size()]
    width = parts * kv_heads * head_dim
    tile = min(ROW_TILE, next_power_of_two(width))
    store_rows.launch(
        (len(values), triton.cdiv(width, tile)),
        cache.view(word),
        values.view(word),
        slots.blocks,
        slots.offsets,
        cache.stride(0),
        *values.stride()[:3],
        parts=parts,
        kv_heads=kv_heads,
        block_size=block_size,
        head_dim=head_dim,
        tile=tile,
    )


@Kernel
def copy_runs(
    places: tl.tensor,
    begin: int,
    tokens: int,
    block_stride: tl.tensor,
    cache_part_stride: tl.tensor,
    cache_head_stride: tl.tensor,
    part_stride: tl.tensor,
    head_stride: tl.tensor,
    token_stride: tl.tensor,
    layers: int,
    kv_heads: tl.constexpr,
    block_size: tl.constexpr,
    head_dim: tl.constexpr,
    padded_dim: tl.constexpr,
    token_tile: tl.constexpr,
    word: tl.constexpr,
    alignment: tl.constexpr,
    is_gather: tl.constexpr,
) -> None:
    """One program per ``token_tile`` tokens, part and head, and layer.

    ``places`` has the addresses of the layers' caches, then of their payloads, then the blocks from token ``begin``'s.
    """
    layer = tl.program_id(2)
    part, head = tl.program_id(1) // kv_heads, tl.program_id(1) % kv_heads
    cache = tl.load(places + layer).to(tl.pointer_type(word))
    payload = tl.load(places + layers + layer).to(tl.pointer_type(word))
    cache = tl.multiple_of(cache, alignment) + part * cache_part_stride + head * cache_head_stride
    payload = tl.multiple_of(payload, alignment) + part.to(tl.int64) * part_stride + head.to(tl.int64) * head_stride

    token = tl.program_id(0) * token_tile + tl.arange(0, token_tile)
    dim = tl.arange(0, padded_dim)
    slot = begin % block_size + token
    block = tl.load(places + 2 * layers + slot // block_size, mask=token < tokens, other=0)
    in_cache = (block * block_stride + (slot % block_size) * head_dim)[:, None] + dim[None, :]
    in_payload = (token.to(tl.int64) * token_stride)[:, None] + dim[None, :]
    inside = (token < tokens)[:, None] & (dim < head_dim)[None, :]
    if is_gather:
        tl.store(payload + in_payload, tl.load(cache + in_cache, mask=inside), mask=inside)
    else:
        tl.store(cache + in_cache, tl.load(payload + in_payload, mask=inside), mask=inside)


def gather_tokens(
    caches: Sequence[torch.Tensor],
    blocks: IntArray,
    begin: int,
    end: int,
    out: Sequence[torch.Tensor],
    heads: slice = ALL_HEADS,
) -> None:
    """Copy ``heads`` of tokens ``[begin, end)`` of every given layer out of its pages, in one launch.

    All ``caches`` have one dtype, shape and strides; each ``out`` is ``[parts, heads, end - begin, head_dim]``, and all
    have the same strides.
    """
    _copy([cache[:, :, heads] for cache in caches], blocks, begin, end, out, is_gather=True)


def scatter_tokens(
    caches: Sequence[torch.Tensor],
    blocks: IntArray,
    begin: int,
    end: int,
    values: Sequence[torch.Tensor],
    heads: slice = ALL_HEADS,
) -> None:
    """Copy ``heads`` of tokens ``[begin, end)`` into the pages of every given layer: ``gather_tokens``' inverse."""
    _copy([cache[:, :, heads] for cache in caches], blocks, begin, end, values, is_gather=False)


def _copy(
    caches: Sequence[torch.Tensor],
    blocks: IntArray,
    begin: int,
    end: int,
    payloads: Sequence[torch.Tensor],
    *,
    is_gather: bool,
) -> None:
    first = caches[0]
    _, parts, kv_heads, block_size, head_dim = first.shape
    payload = payloads[0]
    expected = (parts, kv_heads, end - begin, head_dim)
    for cache, values in zip(caches, payloads, strict=True):
        if values.shape != expected or values.dtype != first.dtype:
            raise ValueError(
                f"values are {values.dtype} {tuple(values.shape)}, which tokens [{begin}, {end}) are not: "
                f"{first.dtype} {expected}"
            )
        if cache.shape != first.shape or cache.dtype != first.dtype or cache.stride() != first.stride():
            raise ValueError("layers of one copy must have caches of one dtype, shape and strides")
        if values.stride() != payload.stride() or values.stride(3) != 1:
            raise ValueError("layers of one copy must have payloads of the same strides, each head contiguous")
    addresses = [tensor.data_ptr() for tensor in (*caches, *payloads)]
    needed = blocks[begin // block_size : (end - 1) // block_size + 1].tolist()
    size = first.element_size()
    padded_dim = next_power_of_two(head_dim)
    tile = max(1, RUN_TILE // padded_dim)
    copy_runs.launch(
        (triton.cdiv(end - begin, tile), parts * kv_heads, len(caches)),
        # The host does not wait: pinned memory is used again only when its copy is over.
        torch.tensor(addresses + needed, pin_memory=first.is_cuda).to(first.device, non_blocking=True),
        begin,
        end - begin,
        *first.stride()[:3],
        *payload.stride()[:3],
        len(caches),
        kv_heads=kv_heads,
        block_size=block_size,
        head_dim=head_dim,
        padded_dim=padded_dim,
        token_tile=tile,
        word=TRITON_WORDS[size],
        alignment=next(n for n in (16, 8, 4, 2, 1) if all(address % n == 0 for address in addresses)),
        is_gather=is_gather,
    )
