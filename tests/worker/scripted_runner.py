"""A model runner without a model: logits are a function of the tokens before them, which pages remember."""

import hashlib
from collections.abc import Sequence as Sequences

import torch

from kernels.pages import IntArray
from kv_transfer.layout import CacheLayout, Lifetime, Piece
from kv_transfer.rank_pair import PairLayout
from tests.worker.kv_cache.plans import StatedLayer, full, owners, sharer, state, window
from worker.config import EngineConfig
from worker.kv_cache.block_pool import BlockId
from worker.kv_cache.block_table import NO_BLOCK
from worker.kv_cache.group_blocks import BlockCopy
from worker.kv_cache.groups import longest_sequence, plan_cache
from worker.kv_cache.manager import KVCacheManager
from worker.kv_cache.specs import EveryToken, LastState, LayerName
from worker.kv_cache.transfer_layout import OwnerPlace, transfer_layout
from worker.layers.cached_layer import Stored, nobody_asks
from worker.ranks.commands import SequenceRows

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


def stored_byte(value: int) -> bytes:
    """What every byte is that a layer stores of a token with this id, or of a state after that many tokens."""
    return bytes([1 + value % 255])


class ScriptedRunner:
    """Stands for a ``ModelRunner``. While it is ``broken``, steps fail after their first layer."""

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
        places = {place.name: place for section in self._places for place in section}
        self._owners = [places[layer.name] for layer in layers if layer.name in places]
        self._pages: dict[tuple[LayerName, int], dict[int, int]] = {}

    def cache_manager(self) -> KVCacheManager:
        return KVCacheManager(
            self._plan,
            self.num_blocks,
            prefix_caching=self._config.prefix_caching,
            max_chunk=self._config.max_batched_tokens,
            checkpoint_blocks=self._config.state_checkpoint_blocks,
        )

    def execute(self, scheduled: Sequences[SequenceRows], stored: Stored = nobody_asks) -> torch.Tensor | None:
        for place in self._owners:
            for rows in scheduled:
                self._store(place, rows)
            stored(place.name)
            if self.broken:
                raise RuntimeError("out of memory")
        logits = [
            logits_after(self._tokens(rows, index + 1))
            for rows in scheduled
            for index in range(rows.context - rows.logit_rows, rows.context)
        ]
        return torch.stack(logits) if logits else None

    def copy_blocks(self, copies: Sequences[BlockCopy]) -> None:
        before = {key: dict(page) for key, page in self._pages.items()}
        for copy in copies:
            for place in self._owners:
                self._pages[place.name, copy.destination] = dict(before.get((place.name, copy.source), {}))

    def clear_blocks(self, blocks: Sequences[BlockId]) -> None:
        for block in blocks:
            for place in self._owners:
                self._pages.pop((place.name, block), None)

    def group_of_section(self, section: int) -> int:
        return self._places[section][0].group

    def read_piece(self, passing: PairLayout, piece: Piece, tables: Sequences[IntArray]) -> memoryview:
        """The ``stored_byte`` of every slot as often as is passing of it, owner by owner."""
        section = passing.sections[piece.section]
        sizes = [owner.bytes_per_slot for owner in passing.layout.sections[piece.section].owners]
        payload = b""
        for owner in range(piece.layer_begin, piece.layer_end):
            place = self._places[section.section][section.owners[owner].index]
            table = tables[place.group]
            if self.layout.sections[section.section].lifetime is Lifetime.STATE:
                payload += stored_byte(self._pages[place.name, int(table[0])][0]) * sizes[owner]
            else:
                for slot in range(piece.slot_begin, piece.slot_end):
                    payload += stored_byte(self._slot(place, table, slot)) * sizes[owner]
        return memoryview(payload)

    def _store(self, place: OwnerPlace, rows: SequenceRows) -> None:
        table, group = rows.tables[place.group], self._plan.groups[place.group]
        if isinstance(group.retention, LastState):
            self._pages[place.name, int(table[-1])] = {0: rows.context}
            return
        for slot, token in enumerate(rows.token_ids.tolist(), rows.first):
            block = int(table[slot // group.block_size])
            assert block != NO_BLOCK, f"slot {slot} has no block"
            self._pages.setdefault((place.name, block), {})[slot % group.block_size] = token

    def _slot(self, place: OwnerPlace, table: IntArray, slot: int) -> int:
        size = self._plan.groups[place.group].block_size
        block = int(table[slot // size])
        assert block != NO_BLOCK, f"slot {slot} was given back before it was read"
        return self._pages[place.name, block][slot % size]

    def _tokens(self, rows: SequenceRows, count: int) -> list[int]:
        """The first tokens of a sequence, as a layer that keeps them all finds them in its pages."""
        place = next(p for p in self._owners if isinstance(self._plan.groups[p.group].retention, EveryToken))
        return [self._slot(place, rows.tables[place.group], slot) for slot in range(count)]
