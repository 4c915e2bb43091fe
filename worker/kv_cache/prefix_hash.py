"""Names of block contents: a hash over a block's tokens and everything before them.

Equal hashes mean equal KV, wherever they were computed: replicas, the front end's router and both prefix caches use the
same function. The chain starts from the request's cache salt, so prefixes never match across salts.
"""

import hashlib
from array import array
from collections.abc import Iterator, Sequence

from worker.kv_cache.block_pool import BlockHash

HASH_BYTES = 16


def first_parent(salt: str) -> BlockHash:
    """The parent of a sequence's first block."""
    return BlockHash(hashlib.blake2b(salt.encode(), digest_size=HASH_BYTES, person=b"crosskv-salt").digest())


def block_hash(parent: BlockHash, tokens: Sequence[int]) -> BlockHash:
    """Hash one full block of token ids after its parent (BLAKE2b, 16 bytes: collisions cannot be sought cheaply)."""
    return BlockHash(hashlib.blake2b(parent + array("I", tokens).tobytes(), digest_size=HASH_BYTES).digest())


def chain(tokens: Sequence[int], block_size: int, salt: str) -> Iterator[BlockHash]:
    """Hashes of all full blocks of ``tokens``, in order."""
    parent = first_parent(salt)
    for end in range(block_size, len(tokens) + 1, block_size):
        parent = block_hash(parent, tokens[end - block_size : end])
        yield parent
