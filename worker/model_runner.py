"""The model runner: one rank's model and KV memory, and the only code that touches their tensors.

Built when an engine starts: opens the checkpoint, builds and loads the model, plans the cache, allocates it, and binds
each layer's view. Then it computes steps and copies, packs and unpacks blocks until the process ends. It is called from
the engine's thread only, which makes that thread the one writer of the pages.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from kernels.attention.segments import Segment
from kernels.pages import IntArray, gather_tokens, scatter_tokens
from kernels.table import attention_backend
from kv_transfer.layout import CacheLayout, OwnerLayer, Piece
from worker.checkpoint.checkpoint import open_checkpoint
from worker.config import EngineConfig, Role
from worker.dtype import choose_device, choose_dtype
from worker.kv_cache.groups import KVCacheGroup, count_blocks, group_layers
from worker.kv_cache.manager import BlockCopy
from worker.kv_cache.sharing import NoSharing, parse_sharing
from worker.kv_cache.specs import LayerName
from worker.kv_cache.tensors import allocate_kv_cache_tensors, reshape_kv_cache_tensors
from worker.layers.cache_format import CacheFormat
from worker.layers.weights import WeightFormat
from worker.models.model import ModelContext, RowSet, StepInputs
from worker.models.registry import build_model, choose_context, parse_config
from worker.scheduler import ScheduledRows
from worker.weight_loader import load_weights


class DoesNotFit(ValueError):
    """Not enough memory for what was asked; the message names the flag to change."""


class ModelRunner:
    """See the module."""

    def __init__(self, config: EngineConfig, *, fill: int = 0) -> None:
        checkpoint = open_checkpoint(Path(config.model))
        self.device = choose_device(config.device)
        dtype = choose_dtype(config.dtype, checkpoint.dtype(), self.device)
        model_config = parse_config(checkpoint.config)
        context = ModelContext(
            weights=WeightFormat(dtype, self.device),
            cache=CacheFormat(config.block_size, dtype),
            backend=attention_backend(self.device),
            sharing=parse_sharing(config.kv_sharing),
            max_model_len=choose_context(model_config, config.max_model_len),
            headless=config.role is Role.PREFILL,
        )
        self.model = build_model(model_config, context)
        self._layers = self.model.attention_layers
        self.groups = group_layers(self._layers)
        self.num_blocks = count_blocks(self.groups, config.kv_cache_memory)
        self.max_model_len = _fitting_context(config, context.max_model_len, self.num_blocks)
        self.eos_token_ids = frozenset(checkpoint.eos_token_ids)
        whole = build_model(model_config, _described(context))
        load_weights(self.model, checkpoint, (slot.name for slot in whole.slots()))
        raw = allocate_kv_cache_tensors(self.groups, self.num_blocks, self.device, fill)
        self.kv_caches = reshape_kv_cache_tensors(raw, self._layers, self.groups, self.num_blocks)
        for layer in self._layers:
            layer.kv_cache = self.kv_caches[layer.name]
        self.layout = _layout(self.groups, self._layers_map(), dtype, checkpoint.fingerprint())
        self.unshared_bytes_per_token = sum(
            2 * layer.kv_heads * layer.head_dim * dtype.itemsize for layer in self._layers
        )

    @property
    def group(self) -> KVCacheGroup:
        """The one group of a model whose layers all have the same spec."""
        return self.groups[0]

    def execute(self, scheduled: Sequence[ScheduledRows]) -> torch.Tensor | None:
        """Compute one step; returns float32 logits ``[sum of logit_rows, vocab]``, or None if none were wanted."""
        return self.model.forward(self._inputs(scheduled))

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copy whole pages of every owner."""
        if copies:
            sources = torch.tensor([copy.source for copy in copies], device=self.device)
            destinations = torch.tensor([copy.destination for copy in copies], device=self.device)
            for name in self.group.owners:
                cache = self.kv_caches[name]
                cache.index_copy_(0, destinations, cache.index_select(0, sources))

    def read_piece(self, piece: Piece, blocks: IntArray) -> memoryview:
        """Pack a piece of one sequence into contiguous bytes, in the wire's order."""
        caches = self._owner_caches(piece)
        packed = gather_tokens(caches, self.group.spec.page_shape, blocks, piece.token_begin, piece.token_end)
        return memoryview(packed.cpu().view(torch.uint8).reshape(-1).numpy())  # type: ignore[arg-type]

    def write_piece(self, piece: Piece, blocks: IntArray, payload: memoryview) -> None:
        """Unpack a piece into the pages of one sequence; ``payload`` has exactly the piece's bytes."""
        caches = self._owner_caches(piece)
        shape = self.group.spec.page_shape
        tokens = piece.token_end - piece.token_begin
        values = torch.frombuffer(payload, dtype=caches[0].dtype).to(self.device)
        values = values.view(len(caches), 2, shape.kv_heads, tokens, shape.head_dim)
        scatter_tokens(caches, shape, blocks, piece.token_begin, piece.token_end, values)

    def _owner_caches(self, piece: Piece) -> list[torch.Tensor]:
        return [self.kv_caches[name] for name in self.group.owners[piece.layer_begin : piece.layer_end]]

    def _layers_map(self) -> dict[LayerName, LayerName]:
        return {
            layer.name: layer.kv_sharing_target_layer_name
            for layer in self._layers
            if layer.kv_sharing_target_layer_name is not None
        }

    def _inputs(self, scheduled: Sequence[ScheduledRows]) -> StepInputs:
        tokens = np.concatenate([np.array(s.sequence.tokens[s.first : s.first + s.rows]) for s in scheduled])
        segments = []
        logit_segments = []
        logit_index: list[IntArray] = []
        row = logit_row = 0
        for s in scheduled:
            blocks = s.sequence.block_table()
            segments.append(Segment(row, s.rows, s.first + s.rows, blocks))
            row += s.rows
            if s.logit_rows:
                logit_segments.append(Segment(logit_row, s.logit_rows, s.first + s.rows, blocks))
                logit_index.append(np.arange(row - s.logit_rows, row))
                logit_row += s.logit_rows
        rows = self._row_set(segments)
        if not logit_segments:
            return StepInputs(self._tensor(tokens), rows, None, None)
        if logit_row == row:
            return StepInputs(self._tensor(tokens), rows, rows, None)
        index = self._tensor(np.concatenate(logit_index))
        return StepInputs(self._tensor(tokens), rows, self._row_set(logit_segments), index)

    def _row_set(self, segments: Sequence[Segment]) -> RowSet:
        positions = np.concatenate([np.arange(s.context - s.rows, s.context) for s in segments])
        backend = attention_backend(self.device)
        plans = {}
        for group in self.groups:
            plan = backend.plan(segments, group.spec.page_shape, self.device)
            plans.update(dict.fromkeys(group.members, plan))
        return RowSet(self._tensor(positions), plans)

    def _tensor(self, values: IntArray) -> torch.Tensor:
        return torch.from_numpy(values).to(self.device)


def _described(context: ModelContext) -> ModelContext:
    """The complete, unshared model, without memory: it knows every tensor that a checkpoint may hold."""
    return ModelContext(
        weights=WeightFormat(context.weights.dtype, torch.device("meta")),
        cache=context.cache,
        backend=context.backend,
        sharing=NoSharing(),
        max_model_len=2,
    )


def _fitting_context(config: EngineConfig, longest: int, num_blocks: int) -> int:
    """The longest sequence that both the model and the cache can hold."""
    room = num_blocks * config.block_size
    if room < 2 or (config.max_model_len is not None and room < config.max_model_len):
        raise DoesNotFit(
            f"--kv-cache-memory {config.kv_cache_memory} bytes holds {room} tokens in {num_blocks} blocks, less than "
            f"--max-model-len {config.max_model_len or 2}; raise the former or lower the latter"
        )
    return min(longest, room)


def _layout(
    groups: Sequence[KVCacheGroup], targets: dict[LayerName, LayerName], dtype: torch.dtype, fingerprint: str
) -> CacheLayout:
    owners = tuple(
        OwnerLayer(name, group.spec.kv_heads, group.spec.bytes_per_token) for group in groups for name in group.owners
    )
    layer_map = json.dumps([[*map(str, pair)] for pair in targets.items()])
    return CacheLayout(
        fingerprint=fingerprint,
        kv_dtype=str(dtype).removeprefix("torch."),
        owners=owners,
        sharing_digest=hashlib.sha256(layer_map.encode()).hexdigest()[:16],
        sharing_layers=len(targets),
    )
