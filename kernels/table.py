"""Which kernel runs where: the only place that looks at the device.

A CUDA device has Triton's kernels if Triton is installed and the device is new enough; every device has the plain
PyTorch ones. Triton is imported when a CUDA device is first asked for, never before.
"""

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Protocol

import torch

from kernels import pages
from kernels import pointwise as plain_pointwise
from kernels.attention.gather import GatherAttention
from kernels.attention.segments import AttentionBackend
from kernels.pages import IntArray

OLDEST_ARCHITECTURE = 8, 0
"""The first compute capability whose matrix units take bfloat16."""


class TokenCopies(Protocol):
    """Tokens of many layers out of their pages and into them; see ``kernels.pages``."""

    def gather_tokens(
        self, caches: Sequence[torch.Tensor], blocks: IntArray, begin: int, end: int, out: Sequence[torch.Tensor]
    ) -> None:
        """Copy tokens ``[begin, end)`` of every given layer out of its pages."""
        ...

    def scatter_tokens(
        self, caches: Sequence[torch.Tensor], blocks: IntArray, begin: int, end: int, values: Sequence[torch.Tensor]
    ) -> None:
        """Copy tokens ``[begin, end)`` into the pages of every given layer."""
        ...


class Pointwise(Protocol):
    """Small operations of a decoder layer; see ``kernels.pointwise``."""

    def rms_norm(
        self, hidden: torch.Tensor, weight: torch.Tensor | None, epsilon: float, *, offset: float = 0.0
    ) -> torch.Tensor:
        """Root-mean-square normalisation over the last dimension."""
        ...

    def apply_rotary(self, heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """Rotate halves in place."""
        ...

    def apply_rotary_interleaved(self, heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """Rotate neighbours in place."""
        ...

    def silu_and_multiply(self, gate_up: torch.Tensor) -> torch.Tensor:
        """``silu(gate) * up``."""
        ...

    def gelu_and_multiply(self, gate_up: torch.Tensor) -> torch.Tensor:
        """``gelu(gate) * up``."""
        ...


def has_triton_kernels(device: torch.device) -> bool:
    """Whether Triton's kernels serve ``device``."""
    return (
        device.type == "cuda"
        and torch.version.cuda is not None
        and torch.cuda.get_device_capability(device) >= OLDEST_ARCHITECTURE
        and find_spec("triton") is not None
    )


def attention_backend(device: torch.device) -> AttentionBackend:
    """Attention for ``device``."""
    if not has_triton_kernels(device):
        return GatherAttention()
    from kernels.attention.paged import PagedAttention  # noqa: PLC0415 - see the module
    from kernels.tuning import Gpu  # noqa: PLC0415

    return PagedAttention(Gpu.of(device))


def token_copies(device: torch.device) -> TokenCopies:
    """What packs and unpacks transfers on ``device``."""
    if not has_triton_kernels(device):
        return pages
    from kernels import page_copies  # noqa: PLC0415 - see the module

    return page_copies


def pointwise(device: torch.device) -> Pointwise:
    """Small operations of a decoder layer on ``device``."""
    if not has_triton_kernels(device):
        return plain_pointwise
    from kernels import fused_pointwise  # noqa: PLC0415 - see the module

    return fused_pointwise
