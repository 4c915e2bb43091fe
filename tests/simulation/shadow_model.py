"""A model whose KV slots are words instead of tensors, and whose next token is a function of the words that it reads.

A layer stores a hash of all that its token has read so far: salt, token, position, and what layers before it read,
which are the same hashes of the tokens before. So a word identifies the request's prefix, the layer and the position,
and no step can go right with a slot that is missing, stale, somebody else's or of another layer: every token after it
changes.

Pages are laid out like real ones: groups of a hybrid model use the same buffers, a block's id says whose it is.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Sequences
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

from kernels.pages import IntArray
from kv_transfer.layout import CacheLayout, Piece
from kv_transfer.rank_pair import PairLayout
from tests.worker.kv_cache.plans import StatedLayer, full, owners, sharer
from worker.config import EngineConfig, Role
from worker.kv_cache.block_pool import BlockId
from worker.kv_cache.block_table import NO_BLOCK
from worker.kv_cache.group_blocks import BlockCopy
from worker.kv_cache.groups import CachePlan, longest_sequence, plan_cache
from worker.kv_cache.manager import KVCacheManager
from worker.kv_cache.specs import (
    KVCacheSpec,
    LastTokens,
    LayerName,
    RecurrentStateSpec,
    SlidingWindowSpec,
    StateRegion,
)
from worker.kv_cache.transfer_layout import OwnerPlace, transfer_layout
from worker.layers.cached_layer import Stored, nobody_asks
from worker.ranks.commands import SequenceRows
from worker.sequence import Sequence

VOCAB_SIZE = 8
"""A byte of a word is one token's logit."""
EOS = 7
WORD = 8
"""Bytes of a slot."""
LONGEST = 48

Page = list[int]


class Misread(AssertionError):
    """A layer would read a slot that its sequence has no block for."""


class BrokenStep(Exception):
    """A step failed because a schedule wanted it to."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a layer reads, and if it is an owner writes, its slots. ``block_size`` 0: a state."""

    number: int
    layer: LayerName
    owner: bool
    buffer: int
    group: int
    block_size: int
    window: int
    sinks: int


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Everything about a model that does not change: made once for each kind of layers and block size."""

    plan: CachePlan
    layout: CacheLayout
    sections: tuple[tuple[OwnerPlace, ...], ...]
    places: tuple[_Place, ...]
    headless: int
    """Layers up to the last owner."""
    slots_per_page: int
    """Words of a page of any group."""


def _layers(family: str, block_size: int) -> list[StatedLayer]:
    """Owners of eight bytes a slot, layers that share some of them, and the last of all shares."""
    every, window = full(block_size, 2), SlidingWindowSpec(block_size, 1, 2, torch.bfloat16, 5)
    sinks = SlidingWindowSpec(block_size, 1, 2, torch.bfloat16, 4, 2)
    state = RecurrentStateSpec((StateRegion((1, 2), torch.float32),))
    specs: dict[str, list[KVCacheSpec]] = {
        "full": [every, every],
        "window": [window, window],
        "full+window": [every, window],
        "full+sinks": [sinks, every],
        "full+state": [state, every],
        "full+window+state": [every, window, state],
    }
    layers: list[StatedLayer] = []
    for owner in owners(*specs[family]):
        layers += [owner] if owner.spec == state else [owner, sharer(f"sharing.{owner.name}", owner)]
    # A prefill replica leaves out what comes behind the last owner.
    layers.append(layers.pop(max(i for i, layer in enumerate(layers) if layer.spec is None)))
    return layers


FAMILIES = ("full", "window", "full+window", "full+sinks", "full+state", "full+window+state")
"""Kinds of models, by what their layers keep."""


@cache
def model_shape(family: str, block_size: int) -> ModelShape:
    """Plan a family's cache. The same objects each time: nothing of them changes."""
    layers = _layers(family, block_size)
    plan = plan_cache(layers, block_size)
    layout, sections = transfer_layout(plan, layers, torch.bfloat16, "shadow")
    buffers = {name: index for index, buffer in enumerate(plan.buffers) for name in buffer.shared_by}
    groups = {name: index for index, group in enumerate(plan.groups) for name in group.owners}
    places = []
    for number, layer in enumerate(layers):
        target = layer.kv_sharing_target_layer_name or layer.name
        group = plan.groups[groups[target]]
        window, sinks = 0, 0
        if isinstance(group.retention, LastTokens):
            window, sinks = group.retention.window, group.retention.sinks
        owner = layer.spec is not None
        places.append(
            _Place(number, layer.name, owner, buffers[target], groups[target], group.block_size, window, sinks)
        )
    headless = 1 + max(place.number for place in places if place.owner)
    largest = max(1, *(group.block_size for group in plan.groups), 1)
    return ModelShape(plan, layout, sections, tuple(places), headless, largest)


class WatchedCache(KVCacheManager):
    """The real manager, which also knows whose the blocks are: a rank is not told a sequence's salt."""

    def __init__(self, plan: CachePlan, num_blocks: int, config: EngineConfig) -> None:
        super().__init__(
            plan,
            num_blocks,
            prefix_caching=config.prefix_caching,
            max_chunk=config.max_batched_tokens,
            checkpoint_blocks=config.state_checkpoint_blocks,
        )
        self.total = num_blocks
        self.forks = 0
        self._first_group_size = plan.groups[0].block_size
        self._holders: dict[int, Sequence] = {}

    def admit(self, sequence: Sequence, *, reusable: int, tokens: int) -> bool:
        admitted = super().admit(sequence, reusable=reusable, tokens=tokens)
        if admitted:
            self._holders[id(sequence)] = sequence
        return admitted

    def admit_received(self, sequence: Sequence, *, tokens: int) -> bool:
        admitted = super().admit_received(sequence, tokens=tokens)
        if admitted:
            self._holders[id(sequence)] = sequence
        return admitted

    def fork(self, parent: Sequence, child: Sequence) -> list[BlockCopy] | None:
        copies = super().fork(parent, child)
        if copies is not None:
            self._holders[id(child)] = child
            self.forks += 1
        return copies

    def release(self, sequence: Sequence) -> None:
        self._holders.pop(id(sequence), None)
        super().release(sequence)

    def salts(self) -> dict[int, str]:
        """By the block of the first group that a sequence writes to next, which nobody else may write to."""
        found: dict[int, str] = {}
        for sequence in self._holders.values():
            blocks = sequence.tables[0].blocks
            index = sequence.computed // self._first_group_size if self._first_group_size else 1
            if index < len(blocks):
                found[blocks[index]] = sequence.salt
        return found

    def require_rest(self) -> None:
        """Nobody holds a block or was promised one."""
        self.pool.check()
        counts = self.counts()
        assert counts.held == 0, f"nobody is there, and blocks are held: {counts}"
        assert self.pool.available == counts.total == self.total, f"something is still promised: {counts}"


class ShadowRunner:
    """Stands for one rank's ``ModelRunner``. Those that follow a leading one share its ``cache``."""

    eos_token_ids = frozenset({EOS})
    vocab_size = VOCAB_SIZE

    def __init__(
        self,
        config: EngineConfig,
        shape: ModelShape,
        num_blocks: int,
        prefix_tokens: tuple[int, ...] = (),
        leader: "ShadowRunner | None" = None,
    ) -> None:
        self._shape = shape
        self.layout = shape.layout
        self.model = self
        self.num_blocks = num_blocks
        self.prefix_tokens = prefix_tokens
        longest = config.max_model_len or LONGEST
        self.max_model_len = longest_sequence(shape.plan, num_blocks, longest, config.max_batched_tokens)
        self.attention_layers = len(shape.places)
        self.owner_layers = sum(place.owner for place in shape.places)
        self.cache: WatchedCache = WatchedCache(shape.plan, num_blocks, config) if leader is None else leader.cache
        self._places = shape.places[: shape.headless] if config.role is Role.PREFILL else shape.places
        self._buffers: list[list[Page]] = [
            [[0] * shape.slots_per_page for _ in range(num_blocks)] for _ in shape.plan.buffers
        ]
        self._by_name = {place.layer: place for place in shape.places}
        self.words: list[int] = []
        """Of the last step, what ranks must agree on."""
        self.broken = False
        """Whether the next step fails after its first layer."""

    def cache_manager(self) -> KVCacheManager:
        return self.cache

    def group_of_section(self, section: int) -> int:
        return self._shape.sections[section][0].group

    def execute(self, scheduled: Sequences[SequenceRows], stored: Stored = nobody_asks) -> torch.Tensor | None:
        words = self.compute(scheduled, stored)
        return logits_of(words) if words else None

    def compute(self, scheduled: Sequences[SequenceRows], stored: Stored = nobody_asks) -> list[int]:
        """A step; the words of the rows that want logits."""
        broken, self.broken = self.broken, False
        salts = self.cache.salts()
        size = self._shape.plan.groups[0].block_size
        tables = [[table.tolist() for table in rows.tables] for rows in scheduled]
        hidden = []
        for rows, blocks in zip(scheduled, tables, strict=True):
            salt = salts[blocks[0][rows.first // size if size else 1]]
            hidden.append([_word(salt, token, position) for position, token in rows_of(rows)])
        for place in self._places:
            for rows, blocks, words in zip(scheduled, tables, hidden, strict=True):
                if place.block_size:
                    self._attend(place, blocks[place.group], rows.first, words)
                else:
                    self._recur(place, blocks[place.group], rows.first, words)
            if place.owner:
                stored(place.layer)
            if broken:
                raise BrokenStep
        self.words = [word for words in hidden for word in words]
        return [
            words[-(rows.logit_rows - row)]
            for rows, words in zip(scheduled, hidden, strict=True)
            for row in range(rows.logit_rows)
        ]

    def copy_blocks(self, copies: Sequences[BlockCopy]) -> None:
        for pages in self._buffers:
            before = [list(pages[copy.source]) for copy in copies]
            for copy, page in zip(copies, before, strict=True):
                pages[copy.destination] = page

    def clear_blocks(self, blocks: Sequences[BlockId]) -> None:
        for pages in self._buffers:
            for block in blocks:
                pages[block] = [0] * len(pages[block])

    def read_piece(self, passing: PairLayout, piece: Piece, tables: Sequences[IntArray]) -> memoryview:
        words: list[int] = []
        for place in self._owners(passing, piece):
            pages, table = self._buffers[place.buffer], tables[place.group].tolist()
            if place.block_size:
                words += self._gather(place, table, piece.slot_begin, piece.slot_end)
            else:
                words.append(pages[table[0]][0])
        payload = np.array(words, dtype=np.int64).tobytes()
        assert len(payload) == piece.payload_bytes(passing.layout)
        return memoryview(payload)

    def write_piece(self, passing: PairLayout, piece: Piece, tables: Sequences[IntArray], payload: memoryview) -> None:
        words = iter(np.frombuffer(payload, dtype=np.int64).tolist())
        for place in self._owners(passing, piece):
            pages, table = self._buffers[place.buffer], tables[place.group].tolist()
            if place.block_size:
                for slot in range(piece.slot_begin, piece.slot_end):
                    block = table[slot // place.block_size]
                    assert block != NO_BLOCK, f"slot {slot} of {place.layer} is received, and has no block"
                    pages[block][slot % place.block_size] = next(words)
            else:
                pages[table[-1]][0] = next(words)

    def _owners(self, passing: PairLayout, piece: Piece) -> Iterator[_Place]:
        section = passing.sections[piece.section]
        for owner in section.owners[piece.layer_begin : piece.layer_end]:
            yield self._by_name[self._shape.sections[section.section][owner.index].name]

    def _attend(self, place: _Place, table: list[int], first: int, words: list[int]) -> None:
        """Store one slot per row if the layer is an owner, then read what every row sees, itself included."""
        size, pages, end = place.block_size, self._buffers[place.buffer], first + len(words)
        if place.owner:
            for slot, word in enumerate(words, first):
                block = table[slot // size]
                if block == NO_BLOCK:
                    raise Misread(f"slot {slot} of {place.layer} is computed, and has no block")
                pages[block][slot % size] = hash((place.number, word))
        low = max(0, first - place.window + 1) if place.window else 0
        slots = self._gather(place, table, low, end)
        sinks = self._gather(place, table, 0, min(place.sinks, low)) if place.sinks else []
        for index, word in enumerate(words):
            position = first + index
            begin = max(0, position - place.window + 1) if place.window else 0
            # Sinks that the window covers are read with it.
            seen = [*sinks, *slots[: max(0, min(place.sinks, begin) - low)]] if place.sinks else sinks
            words[index] = hash((place.number, word, *seen, *slots[begin - low : position + 1 - low]))

    def _recur(self, place: _Place, table: list[int], first: int, words: list[int]) -> None:
        pages = self._buffers[place.buffer]
        state = pages[table[0]][0] if first else 0
        for index, word in enumerate(words):
            state = hash((place.number, state, word))
            words[index] = hash((state, word))
        pages[table[-1]][0] = state

    def _gather(self, place: _Place, table: list[int], begin: int, end: int) -> list[int]:
        if begin >= end:
            return []
        size, pages = place.block_size, self._buffers[place.buffer]
        first = begin // size
        words: list[int] = []
        for block in table[first : -(-end // size)]:
            if block == NO_BLOCK:
                raise Misread(f"slots {begin}–{end} of {place.layer} are seen, and some were given back: {table}")
            words += pages[block][:size]
        return words[begin - first * size : end - first * size]


def rows_of(rows: SequenceRows) -> Iterator[tuple[int, int]]:
    """Position and token of each row."""
    return enumerate(rows.token_ids.tolist(), rows.first)


def logits_of(words: Sequences[int]) -> torch.Tensor:
    """A byte of each word is a token's logit, float32 ``[words, vocab]``; no two of a row are equal."""
    values = np.array(words, dtype=np.int64).view(np.uint8).reshape(-1, VOCAB_SIZE).astype(np.float32)
    return torch.from_numpy(values / 32 + np.arange(VOCAB_SIZE, dtype=np.float32) / 512)


def _word(salt: str, token: int, position: int) -> int:
    """What the first layer sees. Hashes of numbers, unlike those of strings, are the same in every process."""
    return hash((*salt.encode(), token, position))
