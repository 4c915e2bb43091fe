"""What every layer of one engine's cache has in common."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class CacheFormat:
    """``block_size`` in tokens, ``dtype`` of the stored keys and values."""

    block_size: int
    dtype: torch.dtype
