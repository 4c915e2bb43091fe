"""A checkpoint in one GGUF file; opened by ``open_checkpoint``, read while an engine fills its weights."""

import hashlib
import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from gguf.constants import GGML_QUANT_SIZES

from worker.checkpoint.checkpoint_error import CheckpointError
from worker.checkpoint.end_tokens import end_tokens
from worker.checkpoint.gguf_config import hugging_face_config
from worker.checkpoint.gguf_dequantize import FLOAT_TYPES, SUPPORTED_TYPES, dequantize
from worker.checkpoint.gguf_file import GgufFile, GgufTensor
from worker.checkpoint.gguf_names import role_of
from worker.checkpoint.gguf_rope import ROPE_FACTORS
from worker.checkpoint.tensor_part import resolve_part

# Values dequantized at a time. The gguf package makes several float32 temporaries of this many; when they are larger
# than this, the allocator maps new pages for each, which costs more than the arithmetic.
_CHUNK = 1 << 16
_SAMPLE_BYTES = 64


class GgufCheckpoint:
    """See ``Checkpoint``. Tensors are dequantized as they are read, a few rows at a time, straight into place."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = GgufFile.open(path)
        self.config: Mapping[str, object] = hugging_face_config(self._file)
        self.eos_token_ids = end_tokens(path, self.config["eos_token_id"])
        self._tensors: dict[str, GgufTensor] = {}
        self._interleaved: dict[str, int] = {}  # the size of a head, for tensors whose rows are stored interleaved
        heads = self._interleaved_heads()
        for tensor in self._file.tensors.values():
            if tensor.name != ROPE_FACTORS:
                self._admit(tensor, heads)

    def names(self) -> frozenset[str]:
        """Every tensor's Hugging Face name."""
        return frozenset(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """The tensor's shape."""
        return self._tensor(name).shape

    def dtype(self) -> torch.dtype:
        """That of most values, where quantized ones count as bfloat16."""
        values: Counter[torch.dtype] = Counter()
        for tensor in self._tensors.values():
            values[FLOAT_TYPES.get(tensor.type, torch.bfloat16)] += math.prod(tensor.shape)
        return values.most_common(1)[0][0]

    def read_into(self, name: str, destination: torch.Tensor, part: tuple[slice, ...] | None = None) -> None:
        """Copy the tensor, or its part, into ``destination``."""
        tensor = self._tensor(name)
        bounds = resolve_part(self.path, name, tensor.shape, part, tuple(destination.shape))
        if len(bounds) == 1:
            bounds, destination = (*bounds, slice(0, 1)), destination.unsqueeze(1)  # a matrix of one column
        rows, columns = bounds
        step = max(1, _CHUNK // max(1, columns.stop - columns.start))
        for start in range(rows.start, rows.stop, step):
            stop = min(start + step, rows.stop)
            destination[start - rows.start : stop - rows.start].copy_(self._rows(name, slice(start, stop), columns))

    def fingerprint(self) -> str:
        """sha256 over the whole header and three samples of each tensor."""
        digest = hashlib.sha256(self._file.header_digest().encode())
        for name in sorted(self._tensors):
            tensor = self._tensors[name]
            data = self._file.data(tensor)
            for start in (0, tensor.nbytes // 2, max(0, tensor.nbytes - _SAMPLE_BYTES)):
                digest.update(data[start : start + _SAMPLE_BYTES].tobytes())
        return digest.hexdigest()

    def _tensor(self, name: str) -> GgufTensor:
        tensor = self._tensors.get(name)
        if tensor is None:
            raise CheckpointError(f"{self.path} has no tensor {name!r}")
        return tensor

    def _rows(self, name: str, rows: slice, columns: slice) -> torch.Tensor:
        """Rows in Hugging Face's order, cut to the given columns, as floating-point values."""
        tensor = self._tensors[name]
        block, block_bytes = GGML_QUANT_SIZES[tensor.type]
        first, last = columns.start // block, -(-columns.stop // block)
        stored = np.arange(rows.start, rows.stop)
        if name in self._interleaved:
            stored = interleaved_rows(stored, self._interleaved[name])
        data = self._file.data(tensor).reshape(tensor.shape[0], -1)
        values = dequantize(data[stored, first * block_bytes : last * block_bytes], tensor.type)
        return values[:, columns.start - first * block : columns.stop - first * block]

    def _admit(self, tensor: GgufTensor, interleaved_heads: Mapping[str, int]) -> None:
        """Enter a tensor under its Hugging Face name, or refuse it by its GGUF name."""
        described = f"{self.path}: tensor {tensor.name!r}"
        layers = self.config["num_hidden_layers"]
        assert isinstance(layers, int)
        role = role_of(tensor.name)
        if role is None or (role.layer is not None and role.layer >= layers):
            raise CheckpointError(f"{described} belongs to no part of a {self.config['model_type']} of {layers} layers")
        if tensor.type not in SUPPORTED_TYPES:
            known = ", ".join(sorted(type_.name for type_ in SUPPORTED_TYPES))
            raise CheckpointError(f"{described} is quantized as {tensor.type.name}; supported are {known}")
        if len(tensor.shape) > 2 or (len(tensor.shape) == 1 and tensor.type not in FLOAT_TYPES):
            raise CheckpointError(
                f"{described} of shape {list(tensor.shape)} and type {tensor.type.name} is not supported"
            )
        self._tensors[role.name] = tensor
        heads = interleaved_heads.get(role.stem)
        if heads is not None:
            if tensor.shape[0] % (2 * heads):
                raise CheckpointError(f"{described} has {tensor.shape[0]} rows, which {heads} heads cannot share")
            self._interleaved[role.name] = tensor.shape[0] // heads

    def _interleaved_heads(self) -> dict[str, int]:
        """How many heads share the rows of what is stored interleaved, by GGUF stem."""
        if self._file.metadata["general.architecture"] != "llama":
            return {}
        heads, kv_heads = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        assert isinstance(heads, int)
        assert isinstance(kv_heads, int)
        return {"attn_q": heads, "attn_k": kv_heads}


def interleaved_rows(rows: npt.NDArray[np.int64], head_dim: int) -> npt.NDArray[np.int64]:
    """Where a llama GGUF file keeps these rows of a q or k projection.

    Rope turns pairs of rows. Hugging Face keeps a pair's rows half a head apart, ``(i, i + head_dim / 2)``; llama.cpp's
    rope wants them as neighbours, ``(2 i, 2 i + 1)``, and its converter reorders them within each head.
    """
    row = rows % head_dim
    member, pair = row // (head_dim // 2), row % (head_dim // 2)
    return rows - row + 2 * pair + member
