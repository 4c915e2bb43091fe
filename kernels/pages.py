"""Pages of KV memory: how one block of one layer is laid out, and the reads and writes that depend on it.

What a layer stores per token is a ``[num_blocks, parts, kv_heads, block_size, head_dim]`` view of its memory: ``parts``
is 2 for keys and values, 1 for a latent or an index key. A block's page is contiguous, but consecutive pages may lie
further apart than their size, because a page may hold something else as well, or belong to a buffer that layers of
several kinds use. Heads come before tokens because decode attention wants ``[heads, tokens, head_dim]``: one gather of
``block_size * head_dim`` runs gives it, with no transposing copy.

The functions here are the plain PyTorch reference and the CPU path. Transfers use a payload layout that does not know
blocks, ``[parts, kv_heads, tokens, head_dim]``, so both sides may have different block sizes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

IntArray = npt.NDArray[np.int64]

KEY_VALUE = 2
"""Parts of a page that holds keys and values."""


@dataclass(frozen=True, slots=True)
class PageShape:
    """Sizes of one page in elements; ``stride`` is the distance between consecutive pages."""

    parts: int
    kv_heads: int
    block_size: int
    head_dim: int
    stride: int

    @classmethod
    def of(cls, cache: torch.Tensor) -> "PageShape":
        """The shape of an existing view."""
        _, parts, kv_heads, block_size, head_dim = cache.shape
        return cls(parts, kv_heads, block_size, head_dim, cache.stride(0))

    @property
    def unit(self) -> int:
        """The largest step, in elements, of which every run begins at a multiple."""
        return math.gcd(self.stride, self.head_dim)

    def run_starts(self, blocks: IntArray) -> IntArray:
        """Where the runs of whole blocks begin, in units.

        ``blocks`` is int64 ``[..., n]``; the result is ``[parts, ..., kv_heads, n]``.
        """
        lanes = np.arange(self.parts * self.kv_heads) * (self.block_size * self.head_dim)
        lanes = lanes.reshape((self.parts,) + (1,) * (blocks.ndim - 1) + (self.kv_heads, 1))
        return ((blocks * self.stride)[None, ..., None, :] + lanes) // self.unit

    def runs(self, cache: torch.Tensor) -> torch.Tensor:
        """The cache as overlapping rows, one per unit; row ``run_starts(...)`` is a run of whole heads of one block."""
        width = self.block_size * self.head_dim
        last = (cache.shape[0] - 1) * self.stride + (self.parts * self.kv_heads - 1) * width
        return cache.as_strided((last // self.unit + 1, width), (self.unit, 1))


@dataclass(frozen=True, slots=True)
class Slots:
    """Where some tokens are: int64 ``blocks`` and ``offsets`` within them, ``[tokens]`` each."""

    blocks: torch.Tensor
    offsets: torch.Tensor

    @classmethod
    def of_range(cls, blocks: IntArray, begin: int, end: int, block_size: int, device: torch.device) -> "Slots":
        """Slots of tokens ``[begin, end)`` of a block table."""
        return cls.of_positions(*locate(blocks, begin, end, block_size), device)

    @classmethod
    def of_positions(cls, blocks: IntArray, offsets: IntArray, device: torch.device) -> "Slots":
        """The same pairs as tensors."""
        return cls(torch.from_numpy(blocks).to(device), torch.from_numpy(offsets).to(device))


def locate(blocks: IntArray, begin: int, end: int, block_size: int) -> tuple[IntArray, IntArray]:
    """Blocks of tokens ``[begin, end)`` of a block table, and the offsets within them."""
    positions = np.arange(begin, end)
    return blocks[positions // block_size], positions % block_size


def write_slots(cache: torch.Tensor, slots: Slots, values: torch.Tensor) -> None:
    """Store ``[tokens, parts, kv_heads, head_dim]`` of the cache's dtype."""
    cache.permute(0, 3, 1, 2, 4).index_put_((slots.blocks, slots.offsets), values)


def gather_tokens(
    caches: Sequence[torch.Tensor], blocks: IntArray, begin: int, end: int, out: Sequence[torch.Tensor]
) -> None:
    """Copy tokens ``[begin, end)`` of every given layer out of its pages.

    All ``caches`` have one shape; each ``out`` is ``[parts, kv_heads, end - begin, head_dim]``.
    """
    shape = PageShape.of(caches[0])
    first, last = begin // shape.block_size, (end - 1) // shape.block_size + 1
    starts = torch.from_numpy(shape.run_starts(blocks[first:last]).reshape(-1)).to(caches[0].device)
    offset, span = begin - first * shape.block_size, (last - first) * shape.block_size
    for cache, destination in zip(caches, out, strict=True):
        whole = shape.runs(cache).index_select(0, starts).view(shape.parts, shape.kv_heads, span, shape.head_dim)
        destination.copy_(whole[:, :, offset : offset + end - begin])


def scatter_tokens(
    caches: Sequence[torch.Tensor], blocks: IntArray, begin: int, end: int, values: Sequence[torch.Tensor]
) -> None:
    """Copy tokens ``[begin, end)`` into the pages of every given layer: the inverse of ``gather_tokens``."""
    shape = PageShape.of(caches[0])
    slots = Slots.of_range(blocks, begin, end, shape.block_size, caches[0].device)
    for cache, source in zip(caches, values, strict=True):
        if source.shape != (shape.parts, shape.kv_heads, end - begin, shape.head_dim):
            raise ValueError(f"values have shape {tuple(source.shape)}, which tokens [{begin}, {end}) do not")
        write_slots(cache, slots, source.permute(2, 0, 1, 3))
