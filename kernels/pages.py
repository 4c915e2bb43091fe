"""Pages of KV memory: how one block of one layer is laid out, and the reads and writes that depend on it.

A layer's cache is one contiguous tensor ``[num_blocks, parts, kv_heads, block_size, head_dim]``; ``parts`` is 2, keys
and values. One block is one page, contiguous, so a buffer can be shared by layers of different kinds that use different
blocks. Heads come before tokens because decode attention wants ``[heads, tokens, head_dim]``: one gather of
``block_size * head_dim`` runs gives it, with no transposing copy.

The functions here are the plain PyTorch reference and the CPU path. Transfers use a payload layout that does not know
blocks, ``[layers, parts, kv_heads, tokens, head_dim]``, so both sides may have different block sizes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

IntArray = npt.NDArray[np.int64]

PARTS = 2


@dataclass(frozen=True, slots=True)
class PageShape:
    """Sizes of one page: ``parts * kv_heads * block_size * head_dim`` elements."""

    kv_heads: int
    block_size: int
    head_dim: int

    def cache_shape(self, num_blocks: int) -> tuple[int, int, int, int, int]:
        """Shape of a layer's whole cache tensor."""
        return (num_blocks, PARTS, self.kv_heads, self.block_size, self.head_dim)

    def slot_rows(self, blocks: IntArray, begin: int, end: int) -> IntArray:
        """Rows of the cache viewed as ``[-1, head_dim]`` that hold tokens ``[begin, end)`` of a block table.

        Returns int64 ``[end - begin, parts, kv_heads]``.
        """
        positions = np.arange(begin, end)
        page = PARTS * self.kv_heads * self.block_size
        first = blocks[positions // self.block_size] * page + positions % self.block_size
        lanes = np.arange(PARTS * self.kv_heads) * self.block_size
        return (first[:, None] + lanes[None, :]).reshape(-1, PARTS, self.kv_heads)

    def run_rows(self, blocks: IntArray) -> IntArray:
        """Rows of the cache viewed as ``[-1, block_size * head_dim]`` that hold whole blocks.

        ``blocks`` is int64 ``[..., n]``; the result is ``[parts, ..., kv_heads, n]``.
        """
        lanes = np.arange(PARTS * self.kv_heads).reshape((PARTS,) + (1,) * (blocks.ndim - 1) + (self.kv_heads, 1))
        return (blocks * (PARTS * self.kv_heads))[None, ..., None, :] + lanes


def write_slots(cache: torch.Tensor, rows: torch.Tensor, key_value: torch.Tensor) -> None:
    """Store new keys and values.

    ``cache`` is a layer's cache; ``rows`` int64 ``[tokens * parts * kv_heads]`` from ``PageShape.slot_rows``;
    ``key_value`` is ``[tokens, parts, kv_heads, head_dim]`` of the cache's dtype.
    """
    head_dim = cache.shape[-1]
    cache.view(-1, head_dim).index_copy_(0, rows, key_value.reshape(-1, head_dim))


def gather_tokens(
    caches: Sequence[torch.Tensor], shape: PageShape, blocks: IntArray, begin: int, end: int
) -> torch.Tensor:
    """Copy tokens ``[begin, end)`` of every given layer out of its pages.

    Returns a contiguous ``[layers, parts, kv_heads, end - begin, head_dim]``.
    """
    first, last = begin // shape.block_size, (end - 1) // shape.block_size + 1
    runs = torch.from_numpy(shape.run_rows(blocks[first:last]).reshape(-1)).to(caches[0].device)
    offset, width = begin - first * shape.block_size, shape.block_size * shape.head_dim
    span = (last - first) * shape.block_size
    out = caches[0].new_empty((len(caches), PARTS, shape.kv_heads, end - begin, shape.head_dim))
    for index, cache in enumerate(caches):
        whole = cache.view(-1, width).index_select(0, runs).view(PARTS, shape.kv_heads, span, shape.head_dim)
        out[index].copy_(whole[:, :, offset : offset + end - begin])
    return out


def scatter_tokens(
    caches: Sequence[torch.Tensor], shape: PageShape, blocks: IntArray, begin: int, end: int, payload: torch.Tensor
) -> None:
    """Copy tokens ``[begin, end)`` into the pages of every given layer: the inverse of ``gather_tokens``."""
    if payload.shape != (len(caches), PARTS, shape.kv_heads, end - begin, shape.head_dim):
        raise ValueError(f"payload has shape {tuple(payload.shape)}, which tokens [{begin}, {end}) do not")
    rows = torch.from_numpy(shape.slot_rows(blocks, begin, end).transpose(1, 2, 0).reshape(-1)).to(caches[0].device)
    for cache, values in zip(caches, payload, strict=True):
        cache.view(-1, shape.head_dim).index_copy_(0, rows, values.reshape(-1, shape.head_dim))
