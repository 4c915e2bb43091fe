"""Which kernel runs where: the only place that looks at the device.

A CUDA device has Triton's kernels if Triton is installed and the device is new enough; a CPU has the compiled ones if
the machine has a compiler; every device has the plain PyTorch ones. Triton is imported when a CUDA device is first
asked for, never before, and nothing is compiled before a CPU is.
"""

import functools
import logging
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from kernels import delta_rule as plain_delta_rule
from kernels import pages
from kernels import pointwise as plain_pointwise
from kernels.attention import latent as plain_latent
from kernels.attention.gather import GatherAttention
from kernels.attention.latent import Expansion, LatentPlan, Selection
from kernels.attention.segments import AttentionBackend, AttentionPlan, Segment
from kernels.delta_rule import DeltaRows
from kernels.experts import routed_experts as plain_routed_experts
from kernels.gated_product import GatedProduct
from kernels.mkldnn_matrix import MkldnnMatrix
from kernels.native.kernel import TYPES
from kernels.native.library import NoCompiledKernels, has_matrix_unit, library
from kernels.pages import ALL_HEADS, IntArray, PageShape
from kernels.plain_matrix import PlainMatrix
from kernels.sampling import RowFilters
from kernels.sampling import draw_tokens as plain_draw_tokens
from kernels.wide_product import WideProduct

log = logging.getLogger(__name__)

OLDEST_ARCHITECTURE = 8, 0
"""The first compute capability whose matrix units take bfloat16."""


class Matrix(Protocol):
    """A matrix to multiply with, and a bias to add."""

    def __call__(self, hidden: torch.Tensor, added: torch.Tensor | None = None, /) -> torch.Tensor:
        """``[rows, inputs]`` to ``[rows, outputs]``, of the weight's dtype or wide; ``added`` is one summand more."""
        ...


class LatentBackend(Protocol):
    """Multi-head latent attention over pages, and its sparse indexer; see ``kernels.attention.latent``."""

    def plan_latents(
        self, segments: Sequence[Segment], latents: PageShape, index_keys: PageShape | None, device: torch.device
    ) -> LatentPlan:
        """Prepare one step; both pages have the same block size."""
        ...

    def write_vectors(self, cache: torch.Tensor, vectors: torch.Tensor, plan: AttentionPlan) -> None:
        """Store every row's latent or index key, ``[rows, head_dim]``."""
        ...

    def longest_context(self, plan: AttentionPlan) -> int:
        """Tokens that the row which sees most may see, or somewhat more."""
        ...

    def select_tokens(
        self, query: torch.Tensor, weights: torch.Tensor, index_keys: torch.Tensor, plan: AttentionPlan, topk: int
    ) -> Selection | None:
        """The tokens that each row attends to; None: all that it sees."""
        ...

    def attend_heads(
        self,
        query: torch.Tensor,
        expansion: Expansion,
        cache: torch.Tensor,
        plan: AttentionPlan,
        *,
        scale: float,
        selection: Selection | None = None,
    ) -> torch.Tensor:
        """From heads' own queries to heads' own values."""
        ...


class TokenCopies(Protocol):
    """Tokens of many layers out of their pages and into them; see ``kernels.pages``."""

    def gather_tokens(
        self,
        caches: Sequence[torch.Tensor],
        blocks: IntArray,
        begin: int,
        end: int,
        out: Sequence[torch.Tensor],
        heads: slice = ALL_HEADS,
    ) -> None:
        """Copy ``heads`` of tokens ``[begin, end)`` of every given layer out of its pages."""
        ...

    def scatter_tokens(
        self,
        caches: Sequence[torch.Tensor],
        blocks: IntArray,
        begin: int,
        end: int,
        values: Sequence[torch.Tensor],
        heads: slice = ALL_HEADS,
    ) -> None:
        """Copy ``heads`` of tokens ``[begin, end)`` into the pages of every given layer."""
        ...


class RoutedExperts(Protocol):
    """Rows through the experts chosen for them; see ``kernels.experts``."""

    def __call__(
        self,
        hidden: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        experts: torch.Tensor,
        weights: torch.Tensor,
        activate: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """``[rows, hidden]`` in and out."""
        ...


class DeltaRule(Protocol):
    """The gated delta rule; see ``kernels.delta_rule``."""

    def delta_rule_row(self, rows: DeltaRows, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """One row of each of many sequences: outputs and new states."""
        ...

    def delta_rule_chunk(self, rows: DeltaRows, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Consecutive rows of one sequence: outputs and the new state."""
        ...


class TokenDraws(Protocol):
    """Random draws from filtered logits; see ``kernels.sampling``."""

    def __call__(
        self, logits: torch.Tensor, filters: Sequence[RowFilters], numbers: npt.NDArray[np.float64], /
    ) -> torch.Tensor:
        """One token per row."""
        ...


class Pointwise(Protocol):
    """Small operations of a decoder layer; see ``kernels.pointwise``."""

    def rms_norm(
        self, hidden: torch.Tensor, weight: torch.Tensor | None, epsilon: float, *, offset: float = 0.0
    ) -> torch.Tensor:
        """Root-mean-square normalisation over the last dimension."""
        ...

    def rms_norm_in_place(
        self, hidden: torch.Tensor, weight: torch.Tensor | None, epsilon: float, *, offset: float = 0.0
    ) -> None:
        """The same, written where it was read."""
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

    def take_rows(self, table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """``table[index]``."""
        ...


def has_triton_kernels(device: torch.device) -> bool:
    """Whether Triton's kernels serve ``device``."""
    return (
        device.type == "cuda"
        and torch.version.cuda is not None
        and torch.cuda.get_device_capability(device) >= OLDEST_ARCHITECTURE
        and find_spec("triton") is not None
    )


@functools.cache
def has_compiled_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the compiled kernels serve tensors of ``dtype`` on ``device``; says why not, once."""
    if device.type != "cpu" or dtype not in TYPES:
        return False
    try:
        library()
    except NoCompiledKernels as error:
        log.warning("slower without compiled kernels: %s", error)
        return False
    return True


def matrix(weight: torch.Tensor, bias: torch.Tensor | None) -> Matrix:
    """``weight`` ``[outputs, inputs]`` and ``bias`` as what multiplies fastest where they are; may copy both."""
    if has_only_compiled_kernels(weight.device, weight.dtype):
        from kernels.native.linear import PackedMatrix  # noqa: PLC0415 - see the module

        return PackedMatrix(weight, bias, in_matrix_unit=_is_for_matrix_unit(weight))
    if _is_multiplied_by_onednn(weight.device, weight.dtype):
        return MkldnnMatrix(weight, bias)
    return PlainMatrix(weight, bias)


def gated_matrix(weight: torch.Tensor, bias: torch.Tensor | None) -> Matrix:
    """The same for ``weight`` ``[2 * width, inputs]``, gates first: ``silu(gate) * other``, ``[rows, width]``."""
    if _is_for_matrix_unit(weight):
        from kernels.native.linear import PackedMatrix  # noqa: PLC0415 - see the module

        return PackedMatrix(weight, bias, in_matrix_unit=True, gated=True)
    return GatedProduct(matrix(weight, bias), pointwise(weight.device, weight.dtype).silu_and_multiply)


def wide_matrix(weight: torch.Tensor, bias: torch.Tensor | None) -> Matrix:
    """The same with a float32 result: the sums as they are from compiled kernels, from others rounded before."""
    if has_only_compiled_kernels(weight.device, weight.dtype):
        from kernels.native.linear import PackedMatrix  # noqa: PLC0415 - see the module

        return PackedMatrix(weight, bias, in_matrix_unit=_is_for_matrix_unit(weight), wide=True)
    return WideProduct(matrix(weight, bias))


def _is_for_matrix_unit(weight: torch.Tensor) -> bool:
    is_narrow = weight.dtype is torch.bfloat16
    return is_narrow and has_compiled_kernels(weight.device, weight.dtype) and has_matrix_unit()


def has_only_compiled_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether products are compiled kernels, too, so that all of a plain decoder's step is."""
    return has_compiled_kernels(device, dtype) and (not _is_multiplied_by_onednn(device, dtype) or has_matrix_unit())


def _is_multiplied_by_onednn(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the processor has 16-bit arithmetic for it to use."""
    is_supported: bool = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return device.type == "cpu" and dtype is torch.bfloat16 and is_supported


def attention_backend(device: torch.device, dtype: torch.dtype) -> AttentionBackend:
    """Attention over a cache of ``dtype`` on ``device``."""
    if has_compiled_kernels(device, dtype):
        from kernels.native.attention import NativeAttention  # noqa: PLC0415 - see the module

        return NativeAttention(dtype)
    if not has_triton_kernels(device):
        return GatherAttention()
    from kernels.attention.paged import PagedAttention  # noqa: PLC0415 - see the module
    from kernels.tuning import Gpu  # noqa: PLC0415

    return PagedAttention(Gpu.of(device))


def latent_backend(device: torch.device) -> LatentBackend:
    """Multi-head latent attention on ``device``."""
    if not has_triton_kernels(device):
        return plain_latent
    from kernels.attention.paged_latent import PagedLatentAttention  # noqa: PLC0415 - see the module
    from kernels.tuning import Gpu  # noqa: PLC0415

    return PagedLatentAttention(Gpu.of(device))


def token_copies(device: torch.device) -> TokenCopies:
    """What packs and unpacks transfers on ``device``."""
    if not has_triton_kernels(device):
        return pages
    from kernels import page_copies  # noqa: PLC0415 - see the module

    return page_copies


def pointwise(device: torch.device, dtype: torch.dtype) -> Pointwise:
    """Small operations of a decoder layer on tensors of ``dtype`` on ``device``."""
    if has_compiled_kernels(device, dtype):
        from kernels.native import pointwise as native_pointwise  # noqa: PLC0415 - see the module

        return native_pointwise
    if not has_triton_kernels(device):
        return plain_pointwise
    from kernels import fused_pointwise  # noqa: PLC0415 - see the module

    return fused_pointwise


def routed_experts(device: torch.device) -> RoutedExperts:
    """A mixture's experts on ``device``."""
    if not has_triton_kernels(device):
        return plain_routed_experts
    from kernels.grouped_experts import GroupedExperts  # noqa: PLC0415 - see the module
    from kernels.tuning import Gpu  # noqa: PLC0415

    return GroupedExperts(Gpu.of(device))


def delta_rule(device: torch.device) -> DeltaRule:
    """The gated delta rule on float32 states on ``device``."""
    if not has_triton_kernels(device):
        return plain_delta_rule
    from kernels.fused_delta_rule import FusedDeltaRule  # noqa: PLC0415 - see the module
    from kernels.tuning import Gpu  # noqa: PLC0415

    return FusedDeltaRule(Gpu.of(device))


def token_draws(device: torch.device) -> TokenDraws:
    """Random draws from logits on ``device``."""
    if not has_triton_kernels(device):
        return plain_draw_tokens
    from kernels.fused_sampling import draw_tokens  # noqa: PLC0415 - see the module

    return draw_tokens
