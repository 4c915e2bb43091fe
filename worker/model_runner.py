"""The model runner: one rank's model and KV memory, and the only code that touches their tensors.

Built when an engine starts: opens the checkpoint, builds and loads the model, plans the cache, allocates it, and binds
each layer's views. Then it computes steps and copies, packs and unpacks blocks until the process ends. It is called
from the engine's thread only, which makes that thread the one writer of the pages.
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from kernels.attention.segments import Segment
from kernels.pages import IntArray, gather_tokens, scatter_tokens
from kernels.table import attention_backend
from kv_transfer.layout import Piece
from worker.checkpoint.checkpoint import open_checkpoint
from worker.config import EngineConfig, Role
from worker.dtype import choose_device, choose_dtype
from worker.kv_cache.block_pool import BlockId
from worker.kv_cache.group_blocks import BlockCopy
from worker.kv_cache.groups import longest_sequence, plan_cache
from worker.kv_cache.manager import KVCacheManager
from worker.kv_cache.sharing import NoSharing, parse_sharing
from worker.kv_cache.specs import KVCacheSpec, LastState, LayerName, StateRegion, TokenRegion
from worker.kv_cache.tensors import allocate_kv_cache_tensors, reshape_kv_cache_tensors
from worker.kv_cache.transfer_layout import OwnerPlace, transfer_layout
from worker.layers.cache_format import CacheFormat
from worker.layers.cached_layer import StepPlan
from worker.layers.weights import WeightFormat
from worker.models.model import ModelContext, RowSet, StepInputs
from worker.models.registry import parse_config
from worker.scheduler import ScheduledRows
from worker.weight_loader import load_weights


class DoesNotFit(ValueError):
    """Not enough memory for what was asked; the message names the flag to change."""


class ModelRunner:
    """See the module."""

    def __init__(self, config: EngineConfig, *, fill: int = 0) -> None:
        self._config = config
        checkpoint = open_checkpoint(Path(config.model))
        self.device = choose_device(config.device)
        dtype = choose_dtype(config.dtype, checkpoint.dtype(), self.device)
        model_config = parse_config(checkpoint.config)
        self.prefix_tokens = model_config.prefix_tokens
        longest = model_config.choose_context(config.max_model_len) + len(self.prefix_tokens)
        context = ModelContext(
            weights=WeightFormat(dtype, self.device),
            cache=CacheFormat(config.block_size, dtype),
            backend=attention_backend(self.device),
            sharing=parse_sharing(config.kv_sharing),
            max_model_len=longest,
            headless=config.role is Role.PREFILL,
        )
        # Planned before anything is allocated: tables of positions need not be longer than what the cache can hold.
        described = _without_memory(context)
        self.cache = plan_cache(model_config.build(described).cached_layers, config.block_size)
        self.num_blocks = self.cache.count_blocks(config.kv_cache_memory)
        self.max_model_len = self._fitting_context(config, longest)
        self.model = model_config.build(replace(context, max_model_len=self.max_model_len))
        self._layers = self.model.cached_layers
        self.eos_token_ids = frozenset(checkpoint.eos_token_ids)
        # The complete, unshared model knows every tensor that a checkpoint may hold.
        whole = model_config.build(replace(described, sharing=NoSharing(), headless=False))
        known_names = [slot.name for slot in whole.slots()]
        load_weights(self.model, checkpoint, known_names, model_config.architecture.unserved)
        self.buffers = allocate_kv_cache_tensors(self.cache, self.num_blocks, self.device, fill)
        self.kv_caches = reshape_kv_cache_tensors(self.buffers, self.cache, self._layers, self.num_blocks)
        for layer in self._layers:
            layer.bind(self.kv_caches[layer.name])
        self.layout, self._places = transfer_layout(self.cache, self._layers, dtype, checkpoint.fingerprint())
        keeps_tokens = [
            layer
            for layer in self._layers
            if not any(isinstance(g.retention, LastState) and layer.name in g.members for g in self.cache.groups)
        ]
        self.attention_layers = len(keeps_tokens)
        self.owner_layers = sum(layer.kv_sharing_target_layer_name is None for layer in keeps_tokens)
        self._group_of = {name: index for index, group in enumerate(self.cache.groups) for name in group.members}

    def cache_manager(self) -> KVCacheManager:
        """The bookkeeping of this runner's blocks, for the one engine that drives it."""
        return KVCacheManager(
            self.cache,
            self.num_blocks,
            prefix_caching=self._config.prefix_caching,
            max_chunk=self._config.max_batched_tokens,
            checkpoint_blocks=self._config.state_checkpoint_blocks,
        )

    def execute(self, scheduled: Sequence[ScheduledRows]) -> torch.Tensor | None:
        """Compute one step; returns float32 logits ``[sum of logit_rows, vocab]``, or None if none were wanted."""
        return self.model.forward(self._inputs(scheduled))

    def clear_blocks(self, blocks: Sequence[BlockId]) -> None:
        """Zero whole blocks: bytes that one kind of layer left need not be numbers to another."""
        if blocks:
            index = torch.tensor(blocks, device=self.device)
            for buffer, raw in self.buffers.items():
                raw.view(self.num_blocks, buffer.page_bytes).index_fill_(0, index, 0)

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copy whole blocks, whoever uses them."""
        if copies:
            sources = torch.tensor([copy.source for copy in copies], device=self.device)
            destinations = torch.tensor([copy.destination for copy in copies], device=self.device)
            for buffer, raw in self.buffers.items():
                pages = raw.view(self.num_blocks, buffer.page_bytes)
                pages.index_copy_(0, destinations, pages.index_select(0, sources))

    def read_piece(self, piece: Piece, tables: Sequence[IntArray]) -> memoryview:
        """Pack a piece of one sequence into contiguous bytes, in the wire's order; ``tables`` has one per group.

        A state is read where the next step would read it, and received where the next step would write it.
        """
        packed = torch.empty(piece.payload_bytes(self.layout), dtype=torch.uint8, device=self.device)
        for places, index, parts in self._regions(piece, packed):
            caches, region = self._caches(places, index)
            table = tables[places[0].group]
            if isinstance(region, StateRegion):
                for cache, part in zip(caches, parts, strict=True):
                    part.copy_(cache[table[0]].contiguous().view(torch.uint8).view(-1))
            else:
                values = [_tokens(part, region) for part in parts]
                gather_tokens(caches, table, piece.slot_begin, piece.slot_end, values)
        return memoryview(packed.cpu().numpy())  # type: ignore[arg-type]

    def write_piece(self, piece: Piece, tables: Sequence[IntArray], payload: memoryview) -> None:
        """Unpack a piece into the pages of one sequence; ``payload`` has exactly the piece's bytes."""
        packed = torch.frombuffer(payload, dtype=torch.uint8).to(self.device)
        for places, index, parts in self._regions(piece, packed):
            caches, region = self._caches(places, index)
            table = tables[places[0].group]
            if isinstance(region, StateRegion):
                for cache, part in zip(caches, parts, strict=True):
                    # A copy, because a part may begin anywhere.
                    cache[table[-1]] = part.clone().view(region.dtype).view(region.shape)
            else:
                values = [_tokens(part, region) for part in parts]
                scatter_tokens(caches, table, piece.slot_begin, piece.slot_end, values)

    def group_of_section(self, section: int) -> int:
        """A KV cache group whose tables say what a section's owners lack."""
        return self._places[section][0].group

    def _caches(self, places: Sequence[OwnerPlace], index: int) -> tuple[list[torch.Tensor], TokenRegion | StateRegion]:
        """Every owner's region ``index``, and what it is. What a layer itself owns comes last among its views."""
        regions = places[0].spec.regions
        return [self.kv_caches[place.name][index - len(regions)] for place in places], regions[index]

    def _regions(
        self, piece: Piece, packed: torch.Tensor
    ) -> Iterator[tuple[list[OwnerPlace], int, list[torch.Tensor]]]:
        """A piece's owners by where they lie and which of their regions is meant, with every one's part of ``packed``.

        The wire's order is: owner by owner, region by region, ``[parts, kv_heads, tokens, head_dim]`` or a state.
        """
        alike: dict[tuple[int, int, KVCacheSpec], list[tuple[OwnerPlace, torch.Tensor]]] = {}
        offset = 0
        slots = piece.slot_end - piece.slot_begin
        for place in self._places[piece.section][piece.layer_begin : piece.layer_end]:
            for index, region in enumerate(place.spec.regions):
                size = region.bytes_per_slot * slots
                alike.setdefault((place.group, index, place.spec), []).append((place, packed[offset : offset + size]))
                offset += size
        for (_, index, _), members in alike.items():
            yield [place for place, _ in members], index, [part for _, part in members]

    def _inputs(self, scheduled: Sequence[ScheduledRows]) -> StepInputs:
        tokens = np.concatenate([np.array(s.sequence.tokens[s.first : s.first + s.rows]) for s in scheduled])
        every = [_Rows(s, s.rows) for s in scheduled]
        wanted = [_Rows(s, s.logit_rows) for s in scheduled if s.logit_rows]
        rows = self._row_set(every, states=True)
        if not wanted:
            return StepInputs(self._tensor(tokens), rows, None, None)
        if sum(s.count for s in wanted) == len(tokens):
            return StepInputs(self._tensor(tokens), rows, rows, None)
        index: list[IntArray] = []
        end = 0
        for s in scheduled:
            end += s.rows
            index.append(np.arange(end - s.logit_rows, end))
        return StepInputs(
            self._tensor(tokens), rows, self._row_set(wanted, states=False), self._tensor(np.concatenate(index))
        )

    def _row_set(self, rows: Sequence["_Rows"], *, states: bool) -> RowSet:
        """Positions and plans of the last ``count`` scheduled rows of every sequence."""
        contexts = [r.scheduled.first + r.scheduled.rows for r in rows]
        positions = np.concatenate(
            [np.arange(context - r.count, context) for r, context in zip(rows, contexts, strict=True)]
        )
        segments: list[list[Segment]] = []
        for group in range(len(self.cache.groups)):
            first = 0
            segments.append([])
            for r, context in zip(rows, contexts, strict=True):
                segments[group].append(Segment(first, r.count, context, r.scheduled.sequence.tables[group].array()))
                first += r.count
        plans: dict[LayerName, StepPlan] = {}
        alike: dict[tuple[int, Hashable], StepPlan] = {}
        for layer in self._layers:
            group = self._group_of[layer.name]
            if states or not isinstance(self.cache.groups[group].retention, LastState):
                key = (group, layer.plan_key)
                if key not in alike:
                    alike[key] = layer.plan(segments[group], self.device)
                plans[layer.name] = alike[key]
        return RowSet(self._tensor(positions), plans)

    def _tensor(self, values: IntArray) -> torch.Tensor:
        return torch.from_numpy(values).to(self.device)

    def _fitting_context(self, config: EngineConfig, longest: int) -> int:
        """The longest sequence that both the model and the cache can hold, the model's own prefix included."""
        held = longest_sequence(self.cache, self.num_blocks, longest, config.max_batched_tokens)
        room = held - len(self.prefix_tokens)
        if room < 2 or (config.max_model_len is not None and room < config.max_model_len):
            raise DoesNotFit(
                f"--kv-cache-memory {config.kv_cache_memory} bytes holds {max(0, room)} tokens in {self.num_blocks} "
                f"blocks, less than --max-model-len {config.max_model_len or 2}; raise the former or lower the latter"
            )
        return held


@dataclass(frozen=True, slots=True)
class _Rows:
    """The last ``count`` rows of what is scheduled of one sequence."""

    scheduled: ScheduledRows
    count: int


def _tokens(part: torch.Tensor, region: TokenRegion) -> torch.Tensor:
    """Bytes as ``[parts, kv_heads, tokens, head_dim]``."""
    return part.view(region.dtype).view(region.parts, region.kv_heads, -1, region.head_dim)


def _without_memory(context: ModelContext) -> ModelContext:
    """The same model, only to be described."""
    return replace(context, weights=WeightFormat(context.weights.dtype, torch.device("meta")), max_model_len=2)
