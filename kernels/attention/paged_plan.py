"""The plan of ``PagedAttention``: made for every step and kind of page, on the CPU or where the kernels run.

A decode graph keeps one of its own, which every later step is loaded into.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kernels.attention.segments import KeepablePlan, Segment, copy_to_kept
from kernels.pages import PageShape, Slots


@dataclass(frozen=True, slots=True)
class Batch:
    """Sequences that one launch answers.

    ``sequences`` int32 ``[n, 3]``: first row, rows, context. ``tables`` int32 ``[n, blocks]``, -1 where no row sees.
    """

    sequences: torch.Tensor
    tables: torch.Tensor
    most_rows: int
    longest_context: int

    @classmethod
    def of(cls, segments: Sequence[Segment], block_size: int, device: torch.device) -> "Batch | None":
        """One copy to the device; None without segments."""
        if not segments:
            return None
        longest = max(segment.context for segment in segments)
        packed = np.full((len(segments), 3 + -(-longest // block_size)), -1, dtype=np.int32)
        for row, segment in zip(packed, segments, strict=True):
            blocks = segment.blocks[: -(-segment.context // block_size)]
            row[:3] = segment.first_row, segment.rows, segment.context
            row[3 : 3 + len(blocks)] = blocks
        on_device = torch.from_numpy(packed).to(device)
        return cls(on_device[:, :3], on_device[:, 3:], max(segment.rows for segment in segments), longest)


@dataclass(frozen=True, slots=True)
class PagedPlan(KeepablePlan):
    """Everything that ``PagedAttention`` needs for one step of one kind of page."""

    shape: PageShape
    window: int | None
    sinks: int
    slots: Slots
    decodes: Batch | None
    chunks: Batch | None

    @property
    def longest_context(self) -> int:
        """Tokens that the row which sees most may see."""
        return max((batch.longest_context for batch in (self.decodes, self.chunks) if batch is not None), default=0)

    def kept(self, rows: int, context: int, device: torch.device) -> "PagedPlan":
        """See ``KeepablePlan``."""

        def full(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.full(shape, -1, dtype=dtype, device=device)

        return PagedPlan(
            shape=self.shape,
            window=self.window,
            sinks=self.sinks,
            slots=Slots(full(rows, dtype=torch.int64), full(rows, dtype=torch.int64)),
            decodes=Batch(
                sequences=full(rows, 3, dtype=torch.int32),
                tables=full(rows, -(-context // self.shape.block_size), dtype=torch.int32),
                most_rows=1,
                longest_context=context,
            ),
            chunks=None,
        )

    def load(self, plan: KeepablePlan, real: int) -> None:
        """See ``KeepablePlan``."""
        assert isinstance(plan, PagedPlan)
        assert self.decodes is not None
        assert plan.decodes is not None
        plan.slots.blocks[real:] = -1
        copy_to_kept(self.slots.blocks, plan.slots.blocks)
        copy_to_kept(self.slots.offsets, plan.slots.offsets)
        copy_to_kept(self.decodes.sequences, plan.decodes.sequences)
        # Beyond a sequence's context nobody reads its table.
        copy_to_kept(self.decodes.tables[:, : plan.decodes.tables.shape[1]], plan.decodes.tables)

    def most_tiles(self, batch: Batch, tile: int) -> int:
        """A bound on how many tiles of tokens a single row visits."""
        everything = -(-batch.longest_context // tile)
        if self.window is None:
            return everything
        # The window's first and last tile may be partial.
        return min(everything, -(-self.sinks // tile) + -(-self.window // tile) + 1)
