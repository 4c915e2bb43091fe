"""A model runner without a model: logits are a function of the tokens before them, pages remember nothing."""

import hashlib
from collections.abc import Sequence as Sequences

import torch

from kernels.pages import IntArray
from kv_transfer.layout import CacheLayout, Lifetime, Piece
from tests.worker.kv_cache.plans import StatedLayer, full, owners, sharer, state, window
from worker.config import EngineConfig
from worker.kv_cache.block_pool import BlockId
from worker.kv_cache.block_table import NO_BLOCK
from worker.kv_cache.group_blocks import BlockCopy
from worker.kv_cache.groups import longest_sequence, plan_cache
from worker.kv_cache.manager import KVCacheManager
from worker.kv_cache.transfer_layout import transfer_layout
from worker.scheduler import ScheduledRows

VOCAB_SIZE = 32


def uniform_layers(block_size: int) -> list[StatedLayer]:
    """Two owners of 4 and 8 bytes of every token, and a layer that shares the first."""
    layers = owners(full(block_size), full(block_size, 2))
    return [*layers, sharer("sharing", layers[0])]


def hybrid_layers(block_size: int) -> list[StatedLayer]:
    """Two owners of 4 bytes of every token, one of the last 5, one of the first 2 and the last 3, and a state of 8."""
    kinds = full(block_size), full(block_size), window(block_size, 5), window(block_size, 3, sinks=2), state(2)
    return owners(*kinds)


def layout_of(layers: Sequences[StatedLayer], block_size: int = 4) -> CacheLayout:
    """What transfers of these layers are planned from, whatever the block size."""
    return transfer_layout(plan_cache(layers, block_size), layers, torch.bfloat16, "model")[0]


LAYOUT = layout_of(uniform_layers(4))
HYBRID_LAYOUT = layout_of(hybrid_layers(4))


def logits_after(tokens: Sequences[int]) -> torch.Tensor:
    """What the scripted model thinks of the token after ``tokens``, float32 ``[vocab]``."""
    seed = int.from_bytes(hashlib.sha256(repr(list(tokens)).encode()).digest()[:8], "little") >> 1
    return torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 3


class ScriptedRunner:
    """Stands for a ``ModelRunner``. The steps of which ``broken`` says so fail."""

    eos_token_ids = frozenset[int]()
    vocab_size = VOCAB_SIZE
    owner_layers = 2
    attention_layers = 3

    def __init__(
        self,
        config: EngineConfig,
        num_blocks: int,
        *,
        layers: Sequences[StatedLayer] | None = None,
        prefix_tokens: tuple[int, ...] = (),
    ) -> None:
        layers = uniform_layers(config.block_size) if layers is None else layers
        self._config = config
        self._plan = plan_cache(layers, config.block_size)
        self.layout, self._places = transfer_layout(self._plan, layers, torch.bfloat16, "model")
        self.num_blocks = num_blocks
        self.prefix_tokens = prefix_tokens
        self.max_model_len = longest_sequence(self._plan, num_blocks, 1 << 20, config.max_batched_tokens)
        self.model = self
        self.broken = False

    def cache_manager(self) -> KVCacheManager:
        return KVCacheManager(
            self._plan,
            self.num_blocks,
            prefix_caching=self._config.prefix_caching,
            max_chunk=self._config.max_batched_tokens,
            checkpoint_blocks=self._config.state_checkpoint_blocks,
        )

    def execute(self, scheduled: Sequences[ScheduledRows]) -> torch.Tensor | None:
        if self.broken:
            raise RuntimeError("out of memory")
        rows = [
            logits_after(s.sequence.tokens[: index + 1])
            for s in scheduled
            for index in range(s.first + s.rows - s.logit_rows, s.first + s.rows)
        ]
        return torch.stack(rows) if rows else None

    def copy_blocks(self, copies: Sequences[BlockCopy]) -> None:
        pass

    def clear_blocks(self, blocks: Sequences[BlockId]) -> None:
        pass

    def group_of_section(self, section: int) -> int:
        return self._places[section][0].group

    def read_piece(self, piece: Piece, tables: Sequences[IntArray]) -> memoryview:
        """Nothing but zeros, of slots that are there."""
        section = self.layout.sections[piece.section]
        for place in self._places[piece.section][piece.layer_begin : piece.layer_end]:
            table, size = tables[place.group], self._plan.groups[place.group].block_size
            if section.lifetime is Lifetime.STATE:
                assert table[0] != NO_BLOCK, "there is no state to send"
            else:
                for slot in range(piece.slot_begin, piece.slot_end):
                    assert table[slot // size] != NO_BLOCK, f"slot {slot} was given back before it was sent"
        return memoryview(bytes(piece.payload_bytes(self.layout)))
