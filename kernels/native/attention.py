"""Paged attention by the compiled kernels; see ``attention.cpp``. Keys and values are read where they lie."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kernels.attention.gather import Visible
from kernels.attention.segments import AttentionPlan, KeepablePlan, Segment
from kernels.native.kernel import INTEGER, POINTER, REAL, kernel
from kernels.pages import IntArray, PageShape, locate


@dataclass(frozen=True, slots=True)
class NativePlan(KeepablePlan):
    """One step of one kind of page. ``pages`` and ``segments`` are the structures that the kernel declares, in int64.

    ``blocks`` are all segments' visible blocks, one segment's after another's; a row's own token is stored in
    ``slot_blocks`` at ``slot_offsets``.
    """

    pages: IntArray
    segments: IntArray
    blocks: IntArray
    slot_blocks: IntArray
    slot_offsets: IntArray

    def kept(self, rows: int, context: int, device: torch.device) -> "NativePlan":
        """See ``KeepablePlan``."""
        assert device.type == "cpu", f"compiled kernels run on the CPU, not on {device}"
        block_size = int(self.pages[2])
        return NativePlan(
            pages=self.pages,
            segments=np.zeros((rows, self.segments.shape[1]), dtype=np.int64),
            blocks=np.zeros(rows * -(-context // block_size), dtype=np.int64),
            slot_blocks=np.zeros(rows, dtype=np.int64),
            slot_offsets=np.zeros(rows, dtype=np.int64),
        )

    def load(self, plan: KeepablePlan, real: int) -> None:
        """See ``KeepablePlan``. All rows are real."""
        assert isinstance(plan, NativePlan)
        assert real == len(plan.segments) == len(self.segments), "a row that stores nothing has no place here"
        self.segments[:] = plan.segments
        self.blocks[: len(plan.blocks)] = plan.blocks
        self.slot_blocks[:] = plan.slot_blocks
        self.slot_offsets[:] = plan.slot_offsets


class NativeAttention:
    """See the module. Of one element type; stateless otherwise, one instance serves every layer."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._attend = kernel(
            "attend", dtype, POINTER, POINTER, INTEGER, POINTER, INTEGER, REAL, POINTER, INTEGER, POINTER, POINTER
        )
        self._write = kernel("write_slots", dtype, POINTER, POINTER, INTEGER, INTEGER, POINTER, POINTER, POINTER)

    def plan(
        self, segments: Sequence[Segment], shape: PageShape, window: int | None, device: torch.device, *, sinks: int = 0
    ) -> NativePlan:
        """Number what every segment sees."""
        assert device.type == "cpu", f"compiled kernels run on the CPU, not on {device}"
        described: list[tuple[int, ...]] = []
        blocks: list[IntArray] = []
        slots: list[tuple[IntArray, IntArray]] = []
        first_block = 0
        for segment in segments:
            visible = Visible.of(segment, window, shape.block_size, sinks)
            own = visible.blocks(shape.block_size)
            # Of a window that reaches beyond the first token, rows begin to leave tokens out one after another.
            begin = 0 if window is None else visible.end - segment.rows - window + 1
            described.append(
                (segment.first_row, segment.rows, begin, visible.end, visible.sinks, window is not None, first_block)
            )
            blocks.append(own)
            slots.append(locate(segment.blocks, segment.context - segment.rows, segment.context, shape.block_size))
            first_block += len(own)
        sizes = (shape.parts, shape.kv_heads, shape.block_size, shape.head_dim, shape.stride)
        return NativePlan(
            pages=np.array(sizes, dtype=np.int64),
            segments=np.array(described, dtype=np.int64),
            blocks=np.concatenate(blocks).astype(np.int64),
            slot_blocks=np.concatenate([block for block, _ in slots]),
            slot_offsets=np.concatenate([offset for _, offset in slots]),
        )

    def write(self, cache: torch.Tensor, key_value: torch.Tensor, plan: AttentionPlan) -> None:
        """Store every row's key and value."""
        assert isinstance(plan, NativePlan)
        rows = key_value if key_value[0].is_contiguous() else key_value.contiguous()
        self._write(
            plan.pages.ctypes.data,
            rows.data_ptr(),
            rows.stride(0),
            len(rows),
            plan.slot_blocks.ctypes.data,
            plan.slot_offsets.ctypes.data,
            cache.data_ptr(),
        )

    def attend(self, query: torch.Tensor, cache: torch.Tensor, plan: AttentionPlan, scale: float) -> torch.Tensor:
        """Causal grouped-query attention, calculated in float32."""
        assert isinstance(plan, NativePlan)
        rows = query if query[0].is_contiguous() else query.contiguous()
        parts, head_dim = int(plan.pages[0]), int(plan.pages[3])
        out = query.new_empty(*query.shape[:2], (parts - 1) * head_dim)
        self._attend(
            plan.pages.ctypes.data,
            plan.segments.ctypes.data,
            len(plan.segments),
            plan.blocks.ctypes.data,
            query.shape[1],
            scale,
            rows.data_ptr(),
            rows.stride(0),
            cache.data_ptr(),
            out.data_ptr(),
        )
        return out
