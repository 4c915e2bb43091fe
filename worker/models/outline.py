"""A model's outline: what its configuration alone says of its cached layers, without weights or memory.

Made by commands that inspect a model or check a cluster's settings before anything is started; ends with the command.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from worker.checkpoint.checkpoint import Checkpoint, open_checkpoint
from worker.checkpoint.json_file import read_json_object
from worker.dtype import DTYPES, SERVED_DTYPES
from worker.kv_cache.groups import CachePlan, plan_cache
from worker.kv_cache.sharing import NoSharing, parse_sharing
from worker.layers.cache_format import CacheFormat
from worker.layers.cached_layer import CachedLayer
from worker.layers.weights import WeightFormat
from worker.models.config_checks import UnsupportedModel
from worker.models.config_reader import parse_config
from worker.models.model import ModelContext
from worker.models.registry import ModelConfig
from worker.ranks.rank_group import SOLO, DescribedRank
from worker.weight_loader import require_tensors


@dataclass(frozen=True, slots=True)
class ModelOutline:
    """``layers`` in the order in which they run, ``cache`` as an engine would plan it; sizes in tokens.

    ``prefix_tokens`` are in the cache of every sequence before its prompt.
    """

    architecture: str
    vocab_size: int
    longest_context: int
    prefix_tokens: int
    dtype: torch.dtype
    layers: tuple[CachedLayer, ...]
    cache: CachePlan


def outline_model(
    path: Path, *, kv_sharing: str, dtype: str, block_size: int, tensor_parallel_size: int = 1
) -> ModelOutline:
    """Describe the model of a directory with config.json, of a config.json file, or of a ``.gguf`` file.

    ``dtype`` may be ``auto``. Of a model on several ranks, ``layers`` and ``cache`` are those of one. Where weights
    are, their names and shapes are checked as well, without reading them. Raises ``CheckpointError``,
    ``UnsupportedModel``, ``SharingError`` or ``WeightMismatch``, like an engine.
    """
    checkpoint, config, chosen = open_model(path, dtype)
    context = describe(chosen, kv_sharing, block_size, tensor_parallel_size)
    model = config.build(context)
    if checkpoint is not None:
        whole = config.build(replace(context, sharing=NoSharing()))
        known = [slot.name for slot in whole.slots()]
        require_tensors(model, checkpoint, known, config.architecture.unserved)
    return ModelOutline(
        architecture=config.name,
        vocab_size=model.vocab_size,
        longest_context=config.longest_context,
        prefix_tokens=len(config.prefix_tokens),
        dtype=chosen,
        layers=tuple(model.cached_layers),
        cache=plan_cache(model.cached_layers, block_size),
    )


def open_model(path: Path, dtype: str) -> tuple[Checkpoint | None, ModelConfig, torch.dtype]:
    """Weights if there are any, the configuration, and what ``dtype`` means; errors as of ``outline_model``."""
    checkpoint = _open_weights(path)
    content, own_dtype = _read(path) if checkpoint is None else (checkpoint.config, _name(checkpoint.dtype()))
    return checkpoint, parse_config(content), DTYPES[own_dtype if dtype == "auto" else dtype]


def describe(dtype: torch.dtype, kv_sharing: str, block_size: int, tensor_parallel_size: int = 1) -> ModelContext:
    """How to build the first rank's part of a model that has shapes but no memory."""
    meta = torch.device("meta")
    ranks = SOLO if tensor_parallel_size == 1 else DescribedRank(0, tensor_parallel_size)
    return ModelContext(
        weights=WeightFormat(dtype, meta, ranks),
        cache=CacheFormat(block_size, dtype),
        sharing=parse_sharing(kv_sharing),
        max_model_len=2,
    )


def _open_weights(path: Path) -> Checkpoint | None:
    """The checkpoint, if there are weights and not only a configuration."""
    if path.suffix != ".json" and (path.is_file() or any(path.glob("*.safetensors"))):
        return open_checkpoint(path)
    return None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _read(path: Path) -> tuple[Mapping[str, object], str]:
    """The configuration and the dtype that it names."""
    content = read_json_object(path if path.suffix == ".json" else path / "config.json")
    dtype = content.get("dtype", content.get("torch_dtype")) or "bfloat16"
    if not (isinstance(dtype, str) and dtype in SERVED_DTYPES):
        raise UnsupportedModel(f"{path}: dtype {dtype!r} is not supported; choose --dtype {', '.join(SERVED_DTYPES)}")
    return content, str(dtype)
