"""What an attention kernel is told about one step: which query rows belong to which sequence, and where its keys are.

The model runner makes one tuple of segments per KV cache group and step; a backend turns it into a plan of index
tensors once, and every layer of the group that stores the same uses that plan.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from kernels.pages import IntArray, PageShape


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive query rows of one sequence.

    Rows ``[first_row, first_row + rows)`` of the step are the tokens ``[context - rows, context)`` of the sequence; row
    ``i`` sees every token up to its own, or the last ``window`` and the first ``sinks`` of them. ``blocks`` is the
    sequence's block table, int64; entries that no row can see are -1.
    """

    first_row: int
    rows: int
    context: int
    blocks: IntArray


class AttentionPlan(Protocol):
    """A backend's index tensors for one step. Opaque to everybody else."""


class KeepablePlan(ABC):
    """The plan of a step with one row of each sequence, whose place in memory another such step can take."""

    __slots__ = ()

    @abstractmethod
    def kept(self, rows: int, context: int, device: torch.device) -> "KeepablePlan":
        """A plan of this kind with room for ``rows`` sequences of up to ``context`` tokens, at addresses that stay."""

    @abstractmethod
    def load(self, plan: "KeepablePlan", real: int) -> None:
        """Become ``plan``, which was made on the CPU for as many rows; those from ``real`` on store nothing."""


class AttentionBackend(Protocol):
    """Causal attention over a paged cache, and the writes that feed it."""

    def plan(
        self, segments: Sequence[Segment], shape: PageShape, window: int | None, device: torch.device, *, sinks: int = 0
    ) -> AttentionPlan:
        """Prepare one step. Called once per kind of page and step, not per layer.

        With ``window`` a row at position ``p`` sees the tokens ``(p - window, p]`` only, and ``[0, sinks)``.
        """
        ...

    def write(self, cache: torch.Tensor, key_value: torch.Tensor, plan: AttentionPlan) -> None:
        """Store ``key_value`` ``[rows, parts, kv_heads, head_dim]`` of every row into its slots."""
        ...

    def attend(self, query: torch.Tensor, cache: torch.Tensor, plan: AttentionPlan, scale: float) -> torch.Tensor:
        """Attend with ``query`` ``[rows, heads, head_dim]``.

        Part 0 of the cache is the keys; values are the others side by side, one unless they are wider than keys.
        Returns ``[rows, heads, (parts - 1) * head_dim]`` of the same dtype.
        """
        ...


def copy_to_kept(target: torch.Tensor, values: torch.Tensor) -> None:
    """From the CPU to where a plan is kept, without waiting: pinned memory is used again only when its copy is over."""
    target.copy_(values.pin_memory() if target.is_cuda else values, non_blocking=True)
