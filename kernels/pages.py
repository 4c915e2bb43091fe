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

ALL_HEADS = slice(None)


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
    caches: Sequence[torch.Tensor],
    blocks: IntArray,
    begin: int,
    end: int,
    out: Sequence[torch.Tensor],
    heads: slice = ALL_HEADS,
) -> None:
    """Copy ``heads`` of tokens ``[begin, end)`` of every given layer out of its pages.

    All ``caches`` have one dtype, shape and strides. So have all ``out``: ``[parts, heads, end - begin, head_dim]``.
    """
    copies = _Copies.of(caches, blocks, begin, end, out, heads)
    for cache, destination in zip(caches, out, strict=True):
        pages, values = cache.view(copies.word), destination.view(copies.word)
        if copies.whole is not None:
            torch.index_select(copies.whole.of_pages(pages), 0, copies.blocks, out=copies.whole.of_values(values))
        for part in copies.parts:
            part.of_values(values).copy_(part.of_pages(pages))


def scatter_tokens(
    caches: Sequence[torch.Tensor],
    blocks: IntArray,
    begin: int,
    end: int,
    values: Sequence[torch.Tensor],
    heads: slice = ALL_HEADS,
) -> None:
    """Copy tokens ``[begin, end)`` into the pages of every given layer: the inverse of ``gather_tokens``."""
    copies = _Copies.of(caches, blocks, begin, end, values, heads)
    for cache, source in zip(caches, values, strict=True):
        pages, words = cache.view(copies.word), source.view(copies.word)
        if copies.whole is not None:
            copies.whole.of_pages(pages).index_copy_(0, copies.blocks, copies.whole.of_values(words))
        for part in copies.parts:
            part.of_pages(pages).copy_(part.of_values(words))


@dataclass(frozen=True, slots=True)
class _Rows:
    """The same rows, each of neighbouring tokens of one head, in a layer's pages and in its values; all in words.

    A size, strides and an offset say where they are.
    """

    pages: tuple[tuple[int, ...], tuple[int, ...], int]
    values: tuple[tuple[int, ...], tuple[int, ...], int]

    def of_pages(self, tensor: torch.Tensor) -> torch.Tensor:
        size, stride, offset = self.pages
        return tensor.as_strided(size, stride, tensor.storage_offset() + offset)

    def of_values(self, tensor: torch.Tensor) -> torch.Tensor:
        size, stride, offset = self.values
        return tensor.as_strided(size, stride, tensor.storage_offset() + offset)


@dataclass(frozen=True, slots=True)
class _Copies:
    """What is copied of every layer: ``whole`` blocks, which ``blocks`` names, and ``parts`` of at most two others.

    PyTorch stores by index one element at a time, so they are ``word``s of 16 bytes where everything is a multiple.
    """

    word: torch.dtype
    blocks: torch.Tensor
    whole: _Rows | None
    parts: tuple[_Rows, ...]

    @classmethod
    def of(
        cls,
        caches: Sequence[torch.Tensor],
        blocks: IntArray,
        begin: int,
        end: int,
        values: Sequence[torch.Tensor],
        heads: slice,
    ) -> "_Copies":
        num_blocks, parts, kv_heads, block_size, head_dim = caches[0].shape
        first_head, last_head, _ = heads.indices(kv_heads)
        lanes = (parts, last_head - first_head)
        for tensor in values:
            if tensor.shape != (*lanes, end - begin, head_dim) or tensor.stride() != values[0].stride():
                raise ValueError(
                    f"values have shape {tuple(tensor.shape)} and strides {tensor.stride()}, which tokens "
                    f"[{begin}, {end}) of {lanes[1]} heads and the other layers do not"
                )
        if values[0].stride()[2:] != (head_dim, 1):
            raise ValueError(f"values have strides {values[0].stride()}, in which heads are not contiguous")
        word = _word(caches, values)
        size = word.itemsize // caches[0].dtype.itemsize
        page, part, head = (stride // size for stride in caches[0].stride()[:3])
        value_lanes = tuple(stride // size for stride in values[0].stride()[:2])
        width, lead = head_dim // size, first_head * head

        def rows(first: int, last: int) -> _Rows:
            """Of tokens ``[first, last)``, which are all in one block."""
            block, offset = divmod(first, block_size)
            shape = (*lanes, (last - first) * width)
            return _Rows(
                (shape, (part, head, 1), int(blocks[block]) * page + lead + offset * width),
                (shape, (*value_lanes, 1), (first - begin) * width),
            )

        first, last = -(-begin // block_size), end // block_size
        whole, run = None, block_size * width
        if first < last:
            whole = _Rows(
                ((num_blocks, *lanes, run), (page, part, head, 1), lead),
                ((last - first, *lanes, run), (run, *value_lanes, 1), (first * block_size - begin) * width),
            )
        edges = [(begin, min(end, first * block_size))]
        if first <= last:
            edges.append((last * block_size, end))
        return cls(
            word,
            torch.from_numpy(blocks[first : max(first, last)]).to(caches[0].device),
            whole,
            tuple(rows(*edge) for edge in edges if edge[0] < edge[1]),
        )


def _word(caches: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> torch.dtype:
    """The type as which they can be copied in the fewest steps: all are of one, with the same strides on each side."""
    own, word = caches[0].dtype, torch.complex128
    # Instructions for whole words end the process at an address that is no multiple: bytes from outside begin anywhere.
    if any(tensor.data_ptr() % word.itemsize for tensor in (*caches, *values)):
        return own
    steps = [tensor.storage_offset() for tensor in (*caches, *values)]
    for tensor in (caches[0], values[0]):
        steps += (*tensor.stride()[:-1], tensor.shape[-1])
    return own if any(step % (word.itemsize // own.itemsize) for step in steps) else word
