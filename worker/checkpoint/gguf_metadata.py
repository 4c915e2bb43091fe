"""Typed access to a GGUF file's metadata; made by whoever translates it, dropped when that is done."""

import math

import numpy as np

from worker.checkpoint.checkpoint_error import CheckpointError
from worker.checkpoint.gguf_file import GgufFile, MetadataValue


class GgufMetadata:
    """The keys that a file holds about its model: ``block_count`` means ``llama.block_count`` in a llama file.

    Every accessor returns the key's value, the default when the key is absent, or raises ``CheckpointError`` that
    names the key: when it is absent and there is no default, or when its value is of another type or out of range.
    """

    def __init__(self, file: GgufFile) -> None:
        self.path = file.path
        self._values = file.metadata
        self.architecture = self._text("general.architecture")

    def size(self, key: str, default: int | None = None) -> int:
        """A positive count. A value for each layer is accepted when all layers agree."""
        name, value = self._lookup(key)
        if isinstance(value, np.ndarray) and value.dtype.kind in "iu" and value.size and (value == value[0]).all():
            value = int(value[0])
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 1 << 31:
            raise self._wrong(name, value, "a positive whole number, the same in every layer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive, finite number."""
        name, value = self._lookup(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
            raise self._wrong(name, value, "a positive number")
        return float(value)

    def text(self, key: str, default: str) -> str:
        """A string."""
        name, value = self._lookup(key)
        return default if value is None else self._text(name)

    def token_id(self, key: str, vocab_size: int) -> int | None:
        """A token id of the tokenizer (``eos`` means ``tokenizer.ggml.eos_token_id``), None when the file has none."""
        name = f"tokenizer.ggml.{key}_token_id"
        value = self._values.get(name)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < vocab_size:
            raise self._wrong(name, value, f"a token id below {vocab_size}")
        return value

    def has(self, key: str) -> bool:
        """Whether the file says anything about it."""
        return self._lookup(key)[1] is not None

    def refuse_unless(self, key: str, neutral: float) -> None:
        """Raise ``CheckpointError`` if the file sets the key to anything else than the value that changes nothing."""
        name, value = self._lookup(key)
        if value is not None and not (isinstance(value, int | float) and value == neutral):
            raise CheckpointError(f"{self.path}: {name} = {value} is not supported for {self.architecture} models")

    def _lookup(self, key: str) -> tuple[str, MetadataValue | None]:
        name = f"{self.architecture}.{key}"
        return name, self._values.get(name)

    def _text(self, name: str) -> str:
        value = self._values.get(name)
        if not isinstance(value, str):
            raise self._wrong(name, value, "a string")
        return value

    def _wrong(self, name: str, value: MetadataValue | None, wanted: str) -> CheckpointError:
        if value is None:
            return CheckpointError(f"{self.path} has no {name} in its metadata")
        return CheckpointError(f"{self.path}: {name} = {value} is not {wanted}")
