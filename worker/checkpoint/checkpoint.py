"""A model's weights and configuration on disk, whatever the format.

``open_checkpoint`` makes one for an engine that starts; the engine reads each tensor that it needs into its own weights
and lets the checkpoint go.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch

from worker.checkpoint.checkpoint_error import CheckpointError
from worker.checkpoint.safetensors_checkpoint import PICKLE_SUFFIXES, SafetensorsCheckpoint

__all__ = ["Checkpoint", "CheckpointError", "open_checkpoint"]


class Checkpoint(Protocol):
    """Named tensors and the configuration they belong to.

    ``config`` is the content of a Hugging Face ``config.json``; ``eos_token_ids`` end a generation. Tensor names are
    Hugging Face's: ``model.layers.0.self_attn.q_proj.weight``. Files are memory-mapped: opening reads headers only.
    """

    path: Path
    config: Mapping[str, object]
    eos_token_ids: tuple[int, ...]

    def names(self) -> frozenset[str]:
        """The tensors that exist. A model that shares its embedding with its head has no ``lm_head.weight``."""

    def shape(self, name: str) -> tuple[int, ...]:
        """The tensor's shape; ``CheckpointError`` if there is no such tensor."""

    def dtype(self) -> torch.dtype:
        """The dtype to compute in unless told otherwise: that of most values, bfloat16 if those are quantized."""

    def read_into(self, name: str, destination: torch.Tensor, part: tuple[slice, ...] | None = None) -> None:
        """Copy a tensor, or a part of it (one slice of step 1 per leading dimension), into ``destination``.

        ``destination`` may be a view, of any floating-point dtype, on any device. Values are dequantized and converted
        a few rows at a time. Raises ``CheckpointError`` if the tensor does not exist, has a type that is not supported,
        or has another shape than the destination.
        """

    def fingerprint(self) -> str:
        """A hex digest that is equal for the same files anywhere: configuration, tensor list, samples of each tensor.

        It tells models apart, cheaply; it does not prove that every byte is intact.
        """


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a ``.gguf`` file, or a directory with config.json and safetensors; ``CheckpointError`` if that fails."""
    try:
        return _open(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def _open(path: Path) -> Checkpoint:
    if path.is_dir():
        return SafetensorsCheckpoint(path)
    if not path.exists():
        raise CheckpointError(f"{path} does not exist")
    if path.suffix == ".gguf":
        # Other formats need not wait for the gguf package.
        from worker.checkpoint.gguf_checkpoint import GgufCheckpoint  # noqa: PLC0415

        return GgufCheckpoint(path)
    if path.suffix in PICKLE_SUFFIXES:
        raise CheckpointError(
            f"{path} is a pickle, which can run any code when it is read; convert it to safetensors or GGUF"
        )
    if path.suffix == ".safetensors":
        raise CheckpointError(f"{path} is one file of a checkpoint; name the directory that also holds its config.json")
    raise CheckpointError(f"{path} is neither a directory with config.json and *.safetensors nor a .gguf file")
