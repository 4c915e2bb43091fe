"""The model runner: one rank's model and KV memory, and the only code that touches their tensors.

Built when an engine starts: opens the checkpoint, builds and loads the model, plans the cache, allocates it, and binds
each layer's views. Then it computes steps and copies, packs and unpacks blocks until the process ends. It is called
from the engine's thread only, which makes that thread the one writer of the pages. An engine has it made by
``load_model_runner``.
"""

import warnings
from collections.abc import Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from kernels.attention.segments import Segment
from kernels.pages import IntArray
from kernels.table import has_only_compiled_kernels, has_triton_kernels, token_copies
from kv_transfer.layout import Piece
from kv_transfer.rank_pair import HeadRange, PairLayout, heads_of
from worker.captures import Capture, CudaCapture, NativeCapture
from worker.checkpoint.checkpoint import Checkpoint, open_checkpoint
from worker.config import EngineConfig, Role
from worker.cores import Cores
from worker.decode_graphs import DecodeGraphs, can_be_captured
from worker.dtype import choose_device, choose_dtype
from worker.kv_cache.block_pool import BlockId
from worker.kv_cache.group_blocks import BlockCopy
from worker.kv_cache.groups import longest_sequence, plan_cache
from worker.kv_cache.manager import KVCacheManager
from worker.kv_cache.sharing import NoSharing, parse_sharing
from worker.kv_cache.specs import KVCacheSpec, LastState, LayerName, StateRegion, TokenRegion
from worker.kv_cache.tensors import allocate_kv_cache_tensors, reshape_kv_cache_tensors
from worker.kv_cache.transfer_layout import transfer_layout
from worker.layers.cache_format import CacheFormat
from worker.layers.cached_layer import StepPlan, Stored, nobody_asks
from worker.layers.weights import WeightFormat
from worker.models.model import ModelContext, RowSet, StepInputs
from worker.models.registry import ModelConfig
from worker.page_stream import page_stream
from worker.ranks.commands import SequenceRows
from worker.ranks.rank_group import SOLO, RankGroup
from worker.weight_loader import load_weights

# What gRPC delivers is not writable, and nobody writes it.
warnings.filterwarnings("ignore", message="The given buffer is not writable")


class DoesNotFit(ValueError):
    """Not enough memory for what was asked; the message names the flag to change."""


class ModelRunner:
    """See the module."""

    def __init__(self, config: EngineConfig, group: RankGroup = SOLO, *, fill: int = 0) -> None:
        self._config = config
        self._fill = fill
        self._rank, self._ranks = group.rank, group.size
        checkpoint = open_checkpoint(Path(config.model))
        self.device = choose_device(config.device)
        dtype = choose_dtype(config.dtype, checkpoint.dtype(), self.device)
        model_config = _model_config(config, checkpoint)
        self.prefix_tokens = model_config.prefix_tokens
        longest = model_config.choose_context(config.max_model_len) + len(self.prefix_tokens)
        context = ModelContext(
            weights=WeightFormat(dtype, self.device, group),
            cache=CacheFormat(config.block_size, dtype),
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
        # A model's own prefix comes after the vocabulary.
        self._embeddings = self.model.vocab_size + len(self.prefix_tokens)
        self._layers = self.model.cached_layers
        self._listener = _Listener()
        self.eos_token_ids = frozenset(checkpoint.eos_token_ids)
        # The complete, unshared model knows every tensor that a checkpoint may hold.
        whole = model_config.build(replace(described, sharing=NoSharing(), headless=False))
        known_names = [slot.name for slot in whole.slots()]
        load_weights(self.model, checkpoint, known_names, model_config.architecture.unserved)
        self.buffers = allocate_kv_cache_tensors(self.cache, self.num_blocks, self.device, fill)
        self.kv_caches = reshape_kv_cache_tensors(self.buffers, self.cache, self._layers, self.num_blocks)
        for layer in self._layers:
            layer.bind(self.kv_caches[layer.name], self._listener)
        _, self._places = transfer_layout(self.cache, self._layers, dtype, "")
        # Peers may be split over other numbers of ranks, so what they agree on is about whole layers.
        unsplit = replace(described, weights=replace(described.weights, ranks=SOLO))
        layers = model_config.build(unsplit).cached_layers
        self.layout, _ = transfer_layout(plan_cache(layers, config.block_size), layers, dtype, checkpoint.fingerprint())
        keeps_tokens = [
            layer
            for layer in self._layers
            if not any(isinstance(g.retention, LastState) and layer.name in g.members for g in self.cache.groups)
        ]
        self.attention_layers = len(keeps_tokens)
        self.owner_layers = sum(layer.kv_sharing_target_layer_name is None for layer in keeps_tokens)
        self._group_of = {name: index for index, group in enumerate(self.cache.groups) for name in group.members}
        self.pages = page_stream(self.device)
        self._copies = token_copies(self.device)
        self._graphs = self._decode_graphs(dtype)

    def cache_manager(self) -> KVCacheManager:
        """The bookkeeping of this runner's blocks, for the one engine that drives it."""
        return KVCacheManager(
            self.cache,
            self.num_blocks,
            prefix_caching=self._config.prefix_caching,
            max_chunk=self._config.max_batched_tokens,
            checkpoint_blocks=self._config.state_checkpoint_blocks,
        )

    def execute(self, scheduled: Sequence[SequenceRows], stored: Stored = nobody_asks) -> torch.Tensor | None:
        """Compute one step; returns float32 logits ``[sum of logit_rows, vocab]``.

        None if none were wanted, or on a rank that does not lead. ``stored`` is told of every owner, while later layers
        are still to be computed.
        """
        self.pages.settle()
        if self._graphs is not None and stored is nobody_asks and (size := self._graphs.size_of(scheduled)) is not None:
            step = self._inputs(self._graphs.pad(scheduled, size), torch.device("cpu"))
            logits = self._graphs.forward(step, size, len(scheduled))
            if logits is not None:
                return logits
        self._listener.stored = stored
        try:
            return self.model.forward(self._inputs(scheduled, self.device))
        finally:
            self._listener.stored = nobody_asks

    def warm_up(self) -> None:
        """Compute one token for nobody: weights are arranged for the processor, which otherwise the first request pays.

        Called before anything is cached; afterwards every block is as it was.
        """
        # Of a recurrent state, the first entry is what was and the second what will be.
        tables = tuple(np.zeros(2, np.int64) for _ in self.cache.groups)
        logit_rows = 0 if self._config.role is Role.PREFILL else 1
        self.execute([SequenceRows(np.zeros(1, np.int64), 0, logit_rows, tables)])
        for buffer, raw in self.buffers.items():
            raw.view(self.num_blocks, buffer.page_bytes)[0].fill_(self._fill)

    def clear_blocks(self, blocks: Sequence[BlockId]) -> None:
        """Zero whole blocks: bytes that one kind of layer left need not be numbers to another."""
        if blocks:
            self.pages.settle()
            index = torch.tensor(blocks, device=self.device)
            for buffer, raw in self.buffers.items():
                raw.view(self.num_blocks, buffer.page_bytes).index_fill_(0, index, 0)

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copy whole blocks, whoever uses them."""
        if copies:
            self.pages.settle()
            sources = torch.tensor([copy.source for copy in copies], device=self.device)
            destinations = torch.tensor([copy.destination for copy in copies], device=self.device)
            for buffer, raw in self.buffers.items():
                pages = raw.view(self.num_blocks, buffer.page_bytes)
                pages.index_copy_(0, destinations, pages.index_select(0, sources))

    def read_piece(self, passing: PairLayout, piece: Piece, tables: Sequence[IntArray]) -> memoryview:
        """Pack a piece of one sequence into contiguous bytes, in the wire's order; ``tables`` has one per group.

        ``passing`` is what the piece counts in. A state is read where the next step would read it, and received where
        the next step would write it. The bytes are there when ``pages.staged()`` says so.
        """
        with self.pages.touching_pages():
            packed = torch.empty(piece.payload_bytes(passing.layout), dtype=torch.uint8, device=self.device)
            for run in self._runs(passing, piece, packed):
                table = tables[run.group]
                if isinstance(run.region, StateRegion):
                    for cache, part in zip(run.caches, run.parts, strict=True):
                        part.copy_(cache[table[0]][run.rows].contiguous().view(torch.uint8).view(-1))
                else:
                    self._copies.gather_tokens(
                        run.caches, table, piece.slot_begin, piece.slot_end, run.values(), run.heads
                    )
        return memoryview(self.pages.to_host(packed).numpy())  # type: ignore[arg-type]

    def write_piece(self, passing: PairLayout, piece: Piece, tables: Sequence[IntArray], payload: memoryview) -> None:
        """Unpack a piece into the pages of one sequence; ``payload`` has exactly the piece's bytes."""
        packed = self.pages.to_device(payload)
        with self.pages.touching_pages():
            for run in self._runs(passing, piece, packed):
                table = tables[run.group]
                if isinstance(run.region, StateRegion):
                    for cache, part in zip(run.caches, run.parts, strict=True):
                        state = cache[table[-1]][run.rows]
                        # A copy, because a part may begin anywhere.
                        state.copy_(part.clone().view(run.region.dtype).view(state.shape))
                else:
                    self._copies.scatter_tokens(
                        run.caches, table, piece.slot_begin, piece.slot_end, run.values(), run.heads
                    )

    def group_of_section(self, section: int) -> int:
        """A KV cache group whose tables say what a section's owners lack."""
        return self._places[section][0].group

    def _runs(self, passing: PairLayout, piece: Piece, packed: torch.Tensor) -> Iterator["_Run"]:
        """A piece's owners by where they lie and which of their regions is meant, with every one's part of ``packed``.

        The wire's order is: owner by owner, region by region, ``[parts, kv_heads, tokens, head_dim]`` or a state.
        """
        alike: dict[tuple[int, int, KVCacheSpec, HeadRange], _Run] = {}
        offset = 0
        slots = piece.slot_end - piece.slot_begin
        section = passing.sections[piece.section]
        for owner in section.owners[piece.layer_begin : piece.layer_end]:
            place = self._places[section.section][owner.index]
            here = heads_of(self.layout.sections[section.section].owners[owner.index].heads, self._rank, self._ranks)
            heads = HeadRange(owner.heads.begin - here.begin, owner.heads.end - here.begin)
            for index, region in enumerate(place.spec.regions):
                size = region.bytes_per_slot * len(heads) // len(here) * slots
                key = (place.group, index, place.spec, heads)
                if key not in alike:
                    alike[key] = _Run(place.group, region, heads, len(here), [], [])
                # What a layer itself owns comes last among its views.
                alike[key].caches.append(self.kv_caches[place.name][index - len(place.spec.regions)])
                alike[key].parts.append(packed[offset : offset + size])
                offset += size
        yield from alike.values()

    def _decode_graphs(self, dtype: torch.dtype) -> DecodeGraphs | None:
        """For a whole model that decodes, where kernels are Triton's or compiled."""
        is_whole = self._ranks == 1 and self._config.role is not Role.PREFILL
        if not (self._config.decode_graphs and is_whole and can_be_captured(self.model)):
            return None
        capture: Capture
        if has_triton_kernels(self.device):
            capture = CudaCapture(self.device)
        elif has_only_compiled_kernels(self.device, dtype):
            capture = NativeCapture(self.max_model_len)
        else:
            return None
        return DecodeGraphs(self.model, self.device, [group.block_size for group in self.cache.groups], capture)

    def _inputs(self, scheduled: Sequence[SequenceRows], device: torch.device) -> StepInputs:
        tokens = np.concatenate([s.token_ids for s in scheduled])
        every = [_Rows(s, s.rows) for s in scheduled]
        wanted = [_Rows(s, s.logit_rows) for s in scheduled if s.logit_rows]
        rows = self._row_set(every, device, states=True)
        # Compiled kernels would read whatever lies there.
        assert 0 <= tokens.min() <= tokens.max() < self._embeddings, "a token that has no embedding"
        token_ids = torch.from_numpy(tokens).to(device)
        if not wanted:
            return StepInputs(token_ids, rows, None, None)
        if sum(s.count for s in wanted) == len(tokens):
            return StepInputs(token_ids, rows, rows, None)
        index: list[IntArray] = []
        end = 0
        for s in scheduled:
            end += s.rows
            index.append(np.arange(end - s.logit_rows, end))
        logit_index = torch.from_numpy(np.concatenate(index)).to(device)
        return StepInputs(token_ids, rows, self._row_set(wanted, device, states=False), logit_index)

    def _row_set(self, rows: Sequence["_Rows"], device: torch.device, *, states: bool) -> RowSet:
        """Positions and plans of the last ``count`` scheduled rows of every sequence."""
        positions = np.concatenate([np.arange(r.scheduled.context - r.count, r.scheduled.context) for r in rows])
        segments: list[list[Segment]] = []
        for group in range(len(self.cache.groups)):
            first = 0
            segments.append([])
            for r in rows:
                segments[group].append(Segment(first, r.count, r.scheduled.context, r.scheduled.tables[group]))
                first += r.count
        plans: dict[LayerName, StepPlan] = {}
        alike: dict[tuple[int, Hashable], StepPlan] = {}
        for layer in self._layers:
            group = self._group_of[layer.name]
            if states or not isinstance(self.cache.groups[group].retention, LastState):
                key = (group, layer.plan_key)
                if key not in alike:
                    alike[key] = layer.plan(segments[group], device)
                plans[layer.name] = alike[key]
        return RowSet(torch.from_numpy(positions).to(device), plans)

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


class _Listener:
    """What layers tell that they have stored; it knows no runner, so that no circle keeps memory after its end."""

    def __init__(self) -> None:
        self.stored: Stored = nobody_asks

    def __call__(self, layer: LayerName) -> None:
        self.stored(layer)


@dataclass(frozen=True, slots=True)
class _Rows:
    """The last ``count`` rows of what is scheduled of one sequence."""

    scheduled: SequenceRows
    count: int


@dataclass(frozen=True, slots=True)
class _Run:
    """One region of alike owners of one group, local ``heads`` of the ``own_heads`` that this rank holds."""

    group: int
    region: TokenRegion | StateRegion
    head_range: HeadRange
    own_heads: int
    caches: list[torch.Tensor]
    parts: list[torch.Tensor]

    @property
    def heads(self) -> slice:
        """Of a token region, the heads."""
        return slice(self.head_range.begin, self.head_range.end)

    @property
    def rows(self) -> slice:
        """Of a state, the part of its first dimension."""
        assert isinstance(self.region, StateRegion)
        width = self.region.shape[0] // self.own_heads
        return slice(self.head_range.begin * width, self.head_range.end * width)

    def values(self) -> list[torch.Tensor]:
        """Every owner's bytes as ``[parts, heads, tokens, head_dim]``."""
        assert isinstance(self.region, TokenRegion)
        shape = (self.region.parts, len(self.head_range), -1, self.region.head_dim)
        return [part.view(self.region.dtype).view(shape) for part in self.parts]


def load_model_runner(config: EngineConfig, group: RankGroup, cores: Cores, *, fill: int = 0) -> ModelRunner:
    """A warm runner that was made on a thread on ``cores`` which has ended, and the threads that helped it with it.

    Of several ranks none is warm: they load at their own speeds, and a step of theirs is one.

    GNU OpenMP counts those of every thread that has computed and still lives. As soon as they are more than cores, the
    engine's own sleep in the kernel wherever they wait for each other, which a step of a small model does so often that
    it takes three times as long.
    """

    def load() -> ModelRunner:
        runner = ModelRunner(config, group, fill=fill)
        if group.size == 1:
            runner.warm_up()
        return runner

    with ThreadPoolExecutor(1, "load", cores.bind) as pool:
        return pool.submit(load).result()


def _model_config(config: EngineConfig, checkpoint: Checkpoint) -> ModelConfig:
    if config.read_config is not None:
        return ModelConfig.of(config.read_config)
    # It imports transformers.
    from worker.models.config_reader import parse_config  # noqa: PLC0415

    return parse_config(checkpoint.config)


def _without_memory(context: ModelContext) -> ModelContext:
    """The same model, only to be described."""
    weights = WeightFormat(context.weights.dtype, torch.device("meta"), context.weights.ranks)
    return replace(context, weights=weights, max_model_len=2)
