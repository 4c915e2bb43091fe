"""A Hugging Face checkpoint directory; opened by ``open_checkpoint``, read while an engine fills its weights."""

import hashlib
import json
import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open

from worker.checkpoint.checkpoint_error import CheckpointError
from worker.checkpoint.end_tokens import end_tokens
from worker.checkpoint.json_file import read_json_object
from worker.checkpoint.tensor_part import resolve_part

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
"""Files that are refused because reading one can run any code."""

_FLOAT_TYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

_CHUNK = 1 << 22  # values copied at a time: bounds what a conversion or a copy to a device needs besides
_SAMPLE_VALUES = 32


class _StoredTensor(Protocol):
    """What safetensors' ``get_slice`` returns: indexing it gives a tensor in the mapped file, nothing is copied."""

    def get_shape(self) -> list[int]: ...
    def get_dtype(self) -> str: ...
    def __getitem__(self, index: object) -> torch.Tensor: ...


class SafetensorsCheckpoint:
    """See ``Checkpoint``. The safetensors package checks each file's header against its size, and maps its data."""

    def __init__(self, directory: Path) -> None:
        self.path = directory
        self.config: Mapping[str, object] = read_json_object(directory / "config.json")
        if (quantization := self.config.get("quantization_config")) is not None:
            method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
            raise CheckpointError(
                f"{directory}: weights quantized by {method!r} are not supported; use an unquantized checkpoint or GGUF"
            )
        self.eos_token_ids = self._end_tokens()
        self._tensors = _open_tensors(directory)

    def names(self) -> frozenset[str]:
        """Every tensor's Hugging Face name."""
        return frozenset(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """The tensor's shape."""
        return tuple(self._tensor(name).get_shape())

    def dtype(self) -> torch.dtype:
        """That of most values; float32 instead of float64."""
        values: Counter[str] = Counter()
        for tensor in self._tensors.values():
            if tensor.get_dtype() in _FLOAT_TYPES:
                values[tensor.get_dtype()] += math.prod(tensor.get_shape())
        if not values:
            raise CheckpointError(f"{self.path} holds no floating-point weights")
        majority = _FLOAT_TYPES[values.most_common(1)[0][0]]
        return torch.float32 if majority is torch.float64 else majority

    def read_into(self, name: str, destination: torch.Tensor, part: tuple[slice, ...] | None = None) -> None:
        """Copy the tensor, or its part, into ``destination``."""
        tensor = self._tensor(name)
        if tensor.get_dtype() not in _FLOAT_TYPES:
            raise CheckpointError(
                f"{self.path}: tensor {name!r} is stored as {tensor.get_dtype()}; "
                f"supported are {', '.join(_FLOAT_TYPES)}"
            )
        bounds = resolve_part(self.path, name, tuple(tensor.get_shape()), part, tuple(destination.shape))
        if not bounds:
            destination.copy_(tensor[...])
            return
        rows, others = bounds[0], bounds[1:]
        step = max(1, _CHUNK // max(1, math.prod(one.stop - one.start for one in others)))
        for start in range(rows.start, rows.stop, step):
            stop = min(start + step, rows.stop)
            destination[start - rows.start : stop - rows.start].copy_(tensor[(slice(start, stop), *others)])

    def fingerprint(self) -> str:
        """sha256 over config.json's content, the list of tensors, and three samples of each."""
        digest = hashlib.sha256(json.dumps(self.config, sort_keys=True).encode())
        for name in sorted(self._tensors):
            tensor = self._tensors[name]
            digest.update(f"\n{name} {tensor.get_dtype()} {tensor.get_shape()}\n".encode())
            for sample in _samples(tensor.get_shape()):
                digest.update(tensor[sample].contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def _tensor(self, name: str) -> _StoredTensor:
        tensor = self._tensors.get(name)
        if tensor is None:
            raise CheckpointError(f"{self.path} has no tensor {name!r}")
        return tensor

    def _end_tokens(self) -> tuple[int, ...]:
        generation = self.path / "generation_config.json"
        if generation.exists():
            ends = end_tokens(generation, read_json_object(generation).get("eos_token_id"))
            if ends:
                return ends
        return end_tokens(self.path / "config.json", self.config.get("eos_token_id"))


def _samples(shape: list[int]) -> list[tuple[slice, ...]]:
    """Up to ``_SAMPLE_VALUES`` values of the first, the middle, and the last row."""
    if math.prod(shape) == 0 or not shape:
        return []
    inner = tuple(slice(0, 1) for _ in shape[1:-1])
    if len(shape) == 1:
        starts = (0, shape[0] // 2, max(0, shape[0] - _SAMPLE_VALUES))
        return [(slice(start, start + _SAMPLE_VALUES),) for start in starts]
    rows = (0, shape[0] // 2, shape[0] - 1)
    return [(slice(row, row + 1), *inner, slice(0, _SAMPLE_VALUES)) for row in rows]


def _open_tensors(directory: Path) -> dict[str, _StoredTensor]:
    """Every tensor of the directory, by name."""
    index = _read_index(directory)
    tensors: dict[str, _StoredTensor] = {}
    origin: dict[str, str] = {}
    for file in sorted(set(index.values())) if index is not None else _unindexed(directory):
        for name, tensor in _open_file(directory / file).items():
            if name in tensors:
                raise CheckpointError(f"{directory}: tensor {name!r} is both in {origin[name]} and in {file}")
            tensors[name], origin[name] = tensor, file
    for name, file in (index or {}).items():
        if origin.get(name) != file:
            raise CheckpointError(f"{directory}: tensor {name!r} is not in {file}, where {_INDEX} says that it is")
    return tensors


def _open_file(path: Path) -> dict[str, _StoredTensor]:
    try:
        # Of a file that may not be read safetensors says that it is not there.
        path.open("rb").close()
        file = safe_open(path, framework="pt")
        return {name: file.get_slice(name) for name in file.keys()}  # type: ignore[no-untyped-call]  # noqa: SIM118
    except SafetensorError as error:
        raise CheckpointError(f"{path} is truncated or corrupt: {error}") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error


def _read_index(directory: Path) -> dict[str, str] | None:
    """Which file holds which tensor, None without an index."""
    path = directory / _INDEX
    if not path.exists():
        return None
    files = read_json_object(path).get("weight_map")
    if not isinstance(files, dict) or not files:
        raise CheckpointError(f"{path} has no weight_map that names a file for each tensor")
    for file in files.values():
        if not isinstance(file, str) or Path(file).name != file:
            raise CheckpointError(f"{path} names {file!r}, which is not a file of this directory")
    if missing := sorted(file for file in set(files.values()) if not (directory / file).is_file()):
        raise CheckpointError(f"{directory} lacks {', '.join(missing)}, which {_INDEX} names")
    return files


def _unindexed(directory: Path) -> list[str]:
    if (directory / _SINGLE).is_file():
        return [_SINGLE]
    found = sorted(path.name for path in directory.iterdir() if path.is_file())
    if files := [name for name in found if name.endswith(".safetensors")]:
        return files
    if others := [name for name in found if name.endswith(PICKLE_SUFFIXES)]:
        raise CheckpointError(
            f"{directory} has no *.safetensors, and {others[0]} is a pickle, which can run any code when it is read; "
            "convert it to safetensors"
        )
    if others := [name for name in found if name.endswith(".gguf")]:
        raise CheckpointError(f"{directory} has no *.safetensors; to use its GGUF file name {directory / others[0]}")
    raise CheckpointError(f"{directory} has no *.safetensors")
