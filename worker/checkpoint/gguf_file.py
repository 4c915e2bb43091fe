"""A GGUF file, opened and checked: made by ``GgufFile.open`` for a checkpoint or for tokenizer conversion, read through
a memory map for as long as its maker lives.

Files come from strangers. Every count and length is compared with the file's size before anything of that size is
made or walked, and every tensor's bytes are known to lie inside the file, apart from all others, before ``open``
returns. Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import hashlib
import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from gguf.constants import (
    GGML_QUANT_SIZES,
    GGUF_DEFAULT_ALIGNMENT,
    GGUF_MAGIC,
    GGMLQuantizationType,
    GGUFValueType,
)

from worker.checkpoint.checkpoint_error import CheckpointError

_VERSIONS = (2, 3)
_MAX_METADATA_KEYS = 1 << 16
_MAX_TENSORS = 1 << 20
_MAX_STRINGS = 1 << 24
_MAX_DIMENSIONS = 4

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_NUMBERS = {
    GGUFValueType.UINT8: struct.Struct("<B"),
    GGUFValueType.INT8: struct.Struct("<b"),
    GGUFValueType.UINT16: struct.Struct("<H"),
    GGUFValueType.INT16: struct.Struct("<h"),
    GGUFValueType.UINT32: _U32,
    GGUFValueType.INT32: struct.Struct("<i"),
    GGUFValueType.FLOAT32: struct.Struct("<f"),
    GGUFValueType.BOOL: struct.Struct("<?"),
    GGUFValueType.UINT64: _U64,
    GGUFValueType.INT64: struct.Struct("<q"),
    GGUFValueType.FLOAT64: struct.Struct("<d"),
}

Number: TypeAlias = bool | int | float


@dataclass(frozen=True, slots=True)
class StringArray:
    """A metadata array of strings. Vocabularies are large and nothing here reads them: only their length is kept."""

    count: int


MetadataValue: TypeAlias = Number | str | StringArray | npt.NDArray[np.generic]


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where one tensor lies: ``nbytes`` from ``offset`` in the file. ``shape`` has the slowest dimension first."""

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    offset: int
    nbytes: int


class GgufFile:
    """One open GGUF file: ``metadata`` by key, ``tensors`` by GGUF name, and the bytes of each tensor.

    ``header_size`` counts the bytes before the tensor data: metadata and the list of tensors.
    """

    def __init__(
        self,
        path: Path,
        data: mmap.mmap,
        metadata: Mapping[str, MetadataValue],
        tensors: Mapping[str, GgufTensor],
        header_size: int,
    ) -> None:
        self.path = path
        self.metadata = metadata
        self.tensors = tensors
        self.header_size = header_size
        self._data = data

    @classmethod
    def open(cls, path: Path) -> "GgufFile":
        """Map and check the file. Raises ``CheckpointError`` when it cannot be read, or is not a sound GGUF file."""
        try:
            with path.open("rb") as file:
                if path.stat().st_size == 0:
                    raise CheckpointError(f"{path} is empty")
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
        header = _HeaderReader(path, data)
        metadata, tensors = header.read()
        return cls(path, data, metadata, tensors, header.position)

    def data(self, tensor: GgufTensor) -> npt.NDArray[np.uint8]:
        """The tensor's stored bytes, a read-only view of the file."""
        return np.frombuffer(self._data, np.uint8, tensor.nbytes, tensor.offset)

    def header_digest(self) -> str:
        """sha256 of the metadata and the list of tensors: configuration, tokenizer, names, shapes and types."""
        with memoryview(self._data) as view:
            return hashlib.sha256(view[: self.header_size]).hexdigest()


class _HeaderReader:
    """Reads the header from front to back; used once, by ``GgufFile.open``. ``position`` is the next byte to read."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.size = len(data)
        self.position = 0

    def read(self) -> tuple[dict[str, MetadataValue], dict[str, GgufTensor]]:
        if self._u32() != GGUF_MAGIC:
            raise CheckpointError(f"{self.path} is not a GGUF file: it does not start with 'GGUF'")
        version = self._u32()
        if version not in _VERSIONS:
            order = ", or a big-endian file" if version & 0xFFFF == 0 else ""
            raise CheckpointError(
                f"{self.path} is GGUF version {version}{order}; versions 2 and 3, little-endian, are supported"
            )
        tensor_count = self._count("tensors", _MAX_TENSORS, least_bytes=24)
        key_count = self._count("metadata keys", _MAX_METADATA_KEYS, least_bytes=13)

        metadata: dict[str, MetadataValue] = {}
        for _ in range(key_count):
            key = self._string()
            if key in metadata:
                raise self._corrupt(f"metadata key {key!r} occurs twice")
            metadata[key] = self._value(self._value_type())

        infos = [self._tensor_info() for _ in range(tensor_count)]
        alignment = metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise self._corrupt(f"general.alignment is {alignment!r}, not a power of two")
        data_start = -(-self.position // alignment) * alignment
        return metadata, self._place(infos, data_start, alignment)

    def _place(self, infos: list[GgufTensor], data_start: int, alignment: int) -> dict[str, GgufTensor]:
        tensors: dict[str, GgufTensor] = {}
        for info in infos:
            if info.name in tensors:
                raise self._corrupt(f"tensor {info.name!r} occurs twice")
            start = data_start + info.offset
            if info.offset % alignment:
                raise self._corrupt(f"tensor {info.name!r} starts at {info.offset}, not a multiple of {alignment}")
            if start + info.nbytes > self.size:
                raise CheckpointError(
                    f"{self.path} is truncated or corrupt: tensor {info.name!r} ends at byte {start + info.nbytes}, "
                    f"the file has {self.size}"
                )
            tensors[info.name] = GgufTensor(info.name, info.shape, info.type, start, info.nbytes)
        for before, after in pairwise(sorted(tensors.values(), key=lambda tensor: tensor.offset)):
            if before.offset + before.nbytes > after.offset:
                raise self._corrupt(f"tensors {before.name!r} and {after.name!r} overlap")
        return tensors

    def _tensor_info(self) -> GgufTensor:
        """One entry of the list of tensors; its offset still counts from the start of the tensor data."""
        name = self._string()
        dimensions = self._u32()
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            raise self._corrupt(f"tensor {name!r} has {dimensions} dimensions")
        shape = tuple(self._u64() for _ in range(dimensions))[::-1]
        raw_type = self._u32()
        offset = self._u64()
        try:
            type_ = GGMLQuantizationType(raw_type)
        except ValueError:
            raise CheckpointError(
                f"{self.path}: tensor {name!r} has the unknown quantization type {raw_type}"
            ) from None
        block, block_bytes = GGML_QUANT_SIZES[type_]
        if 0 in shape:
            raise self._corrupt(f"tensor {name!r} of shape {list(shape)} is empty")
        if shape[-1] % block:
            raise self._corrupt(
                f"tensor {name!r} has rows of {shape[-1]} values, not a multiple of {type_.name}'s {block}"
            )
        return GgufTensor(name, shape, type_, offset, math.prod(shape) // block * block_bytes)

    def _value(self, type_: GGUFValueType) -> MetadataValue:
        if type_ is GGUFValueType.STRING:
            return self._string()
        if type_ is not GGUFValueType.ARRAY:
            return self._number(_NUMBERS[type_])
        element = self._value_type()
        if element is GGUFValueType.ARRAY:
            raise CheckpointError(f"{self.path}: arrays of arrays in the metadata are not supported")
        if element is GGUFValueType.STRING:
            count = self._count("strings in an array", _MAX_STRINGS, least_bytes=8)
            for _ in range(count):
                self._skip(self._u64())
            return StringArray(count)
        number = _NUMBERS[element]
        count = self._count("values in an array", self.size, least_bytes=number.size)
        start = self._skip(count * number.size)
        return np.frombuffer(self.data, np.dtype(number.format), count, start)

    def _value_type(self) -> GGUFValueType:
        raw = self._u32()
        try:
            return GGUFValueType(raw)
        except ValueError:
            raise self._corrupt(f"metadata value type {raw} is unknown") from None

    def _count(self, what: str, limit: int, least_bytes: int) -> int:
        count = self._u64()
        most = min(limit, (self.size - self.position) // least_bytes)
        if count > most:
            raise self._corrupt(f"it claims {count} {what}, at most {most} are possible")
        return count

    def _string(self) -> str:
        length = self._u64()
        start = self._skip(length)
        try:
            return self.data[start : start + length].decode()
        except UnicodeDecodeError:
            raise self._corrupt(f"a string at byte {start} is not UTF-8") from None

    def _u32(self) -> int:
        return int(self._number(_U32))

    def _u64(self) -> int:
        return int(self._number(_U64))

    def _number(self, number: struct.Struct) -> Number:
        value: Number = number.unpack_from(self.data, self._skip(number.size))[0]
        return value

    def _skip(self, length: int) -> int:
        start = self.position
        if length > self.size - start:
            raise CheckpointError(
                f"{self.path} is truncated or corrupt: {length} bytes are expected at byte {start} of {self.size}"
            )
        self.position = start + length
        return start

    def _corrupt(self, reason: str) -> CheckpointError:
        return CheckpointError(f"{self.path} is corrupt: {reason}")
