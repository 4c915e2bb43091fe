"""What one layer stores. A layer that owns KV has a spec; a layer that shares another's cache has none.

Specs are made by the model's layers, compared to form groups, and turned into page sizes, tensors and transfer layouts.
They never change. Everything above depends only on what ``KVCacheSpec`` states: a new kind of layer is a new spec here,
not a new case elsewhere.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import NewType, Self

import torch

LayerName = NewType("LayerName", str)
"""Fully qualified, such as ``model.layers.18.self_attn.attn``; one block of a model can hold two attention layers."""


@dataclass(frozen=True, slots=True)
class TokenRegion:
    """Part of a page that holds something of every token: ``[parts, kv_heads, block_size, head_dim]``."""

    parts: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one token."""
        return self.parts * self.kv_heads * self.head_dim * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class StateRegion:
    """Part of a page that holds one tensor of a sequence's recurrent state; its first dimension is split over ranks."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class EveryToken:
    """Every token's slot is needed as long as the sequence lives."""


@dataclass(frozen=True, slots=True)
class LastTokens:
    """A query at position ``p`` needs the slots of ``[0, sinks)`` and ``(p - window, p]``; those between are dead."""

    window: int
    sinks: int = 0


@dataclass(frozen=True, slots=True)
class LastState:
    """There is one slot, overwritten by every step: the state after the last token."""


Retention = EveryToken | LastTokens | LastState
"""How long a slot is needed. Layers with equal retention share a block table."""


class KVCacheSpec(ABC):
    """What one layer stores per block, heads and channels of one rank."""

    __slots__ = ()

    @property
    @abstractmethod
    def tokens_per_block(self) -> int:
        """Tokens whose slots one block holds; 0 for a state, which belongs to no number of tokens."""

    @property
    @abstractmethod
    def retention(self) -> Retention:
        """How long a slot is needed."""

    @property
    @abstractmethod
    def regions(self) -> tuple[TokenRegion | StateRegion, ...]:
        """What a page consists of, in order, without gaps."""

    @abstractmethod
    def with_block_size(self, block_size: int) -> Self:
        """The same layer in blocks of another number of tokens."""

    @abstractmethod
    def sharded(self, ranks: int) -> Self:
        """One rank's share of a whole layer. Raises ``ValueError`` naming what does not divide."""

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token; 0 for a state."""
        return sum(r.bytes_per_slot for r in self.regions if isinstance(r, TokenRegion))

    @property
    def state_bytes(self) -> int:
        """Bytes of one sequence's state; 0 where slots belong to tokens."""
        return sum(r.bytes_per_slot for r in self.regions if isinstance(r, StateRegion))

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block of one layer: ``tokens * bytes per token``, or the state's."""
        return self.tokens_per_block * self.bytes_per_token + self.state_bytes


@dataclass(frozen=True, slots=True)
class TokenSpec(KVCacheSpec):
    """A layer that stores something of every token."""

    block_size: int

    @property
    def tokens_per_block(self) -> int:
        """``block_size``."""
        return self.block_size

    @property
    def retention(self) -> Retention:
        """Every token, unless there is a window."""
        return EveryToken()

    def with_block_size(self, block_size: int) -> Self:
        """Only ``block_size`` changes."""
        return replace(self, block_size=block_size)


@dataclass(frozen=True, slots=True)
class FullAttentionSpec(TokenSpec):
    """Keys and values of every token: pages of ``2 * block * kv_heads * head_dim * size``.

    Heads are split over ranks, or replicated when there are fewer heads than ranks. Values ``value_parts`` times as
    wide as keys are that many parts of a page.
    """

    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    value_parts: int = field(default=1, kw_only=True)

    @property
    def regions(self) -> tuple[TokenRegion | StateRegion, ...]:
        """Keys and values."""
        return (TokenRegion(1 + self.value_parts, self.kv_heads, self.head_dim, self.dtype),)

    def sharded(self, ranks: int) -> Self:
        """Heads split, or replicated."""
        if self.kv_heads % ranks and ranks % self.kv_heads:
            raise ValueError(f"{self.kv_heads} KV heads can neither be split over nor replicated on {ranks} ranks")
        return replace(self, kv_heads=max(1, self.kv_heads // ranks))


@dataclass(frozen=True, slots=True)
class SlidingWindowSpec(FullAttentionSpec):
    """Keys and values of the last ``window`` tokens, and of the first ``sinks`` (StreamingLLM, Xiao et al. 2023)."""

    window: int
    sinks: int = 0

    @property
    def retention(self) -> Retention:
        """The window."""
        return LastTokens(self.window, self.sinks)


@dataclass(frozen=True, slots=True)
class MLASpec(TokenSpec):
    """Multi-head latent attention (DeepSeek-V2, 2024): one latent per token, the same for every head.

    ``latent_dim`` is ``kv_lora_rank + qk_rope_head_dim``. Replicated on every rank.
    """

    latent_dim: int
    dtype: torch.dtype

    @property
    def regions(self) -> tuple[TokenRegion | StateRegion, ...]:
        """The latent."""
        return (TokenRegion(1, 1, self.latent_dim, self.dtype),)

    def sharded(self, ranks: int) -> Self:
        """The same."""
        del ranks
        return self


@dataclass(frozen=True, slots=True)
class SparseMLASpec(MLASpec):
    """MLA with a sparse indexer (DeepSeek-V3.2, 2025): the indexer's key of ``index_dim`` beside the latent."""

    index_dim: int

    @property
    def regions(self) -> tuple[TokenRegion | StateRegion, ...]:
        """The latent, then the index key."""
        return (TokenRegion(1, 1, self.latent_dim, self.dtype), TokenRegion(1, 1, self.index_dim, self.dtype))


@dataclass(frozen=True, slots=True)
class IndexKeySpec(TokenSpec):
    """A sparse indexer's keys alone, of a layer that reads another's latents. Replicated on every rank."""

    index_dim: int
    dtype: torch.dtype

    @property
    def regions(self) -> tuple[TokenRegion | StateRegion, ...]:
        """The index key."""
        return (TokenRegion(1, 1, self.index_dim, self.dtype),)

    def sharded(self, ranks: int) -> Self:
        """The same."""
        del ranks
        return self


@dataclass(frozen=True, slots=True)
class RecurrentStateSpec(KVCacheSpec):
    """Linear attention or Mamba: a recurrent matrix and a convolution's last inputs, one of each per sequence.

    Wider types come first, so that every tensor is aligned in a page.
    """

    tensors: tuple[StateRegion, ...]

    @property
    def tokens_per_block(self) -> int:
        """None: 0."""
        return 0

    @property
    def retention(self) -> Retention:
        """The last state."""
        return LastState()

    @property
    def regions(self) -> tuple[TokenRegion | StateRegion, ...]:
        """Its tensors."""
        return self.tensors

    def with_block_size(self, block_size: int) -> Self:
        """The same: a state has no tokens."""
        del block_size
        return self

    def sharded(self, ranks: int) -> Self:
        """Every tensor's first dimension, heads or channels, is split."""
        for tensor in self.tensors:
            if tensor.shape[0] % ranks:
                raise ValueError(f"a state of {tensor.shape[0]} heads or channels cannot be split over {ranks} ranks")
        return replace(self, tensors=tuple(replace(t, shape=(t.shape[0] // ranks, *t.shape[1:])) for t in self.tensors))
