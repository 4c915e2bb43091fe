"""Triton kernel of ``kernels.experts``: one launch multiplies every row with the matrix of the expert it goes to.

Rows are sorted by expert, so that an expert's are neighbours. A program takes a tile of them and a tile of its expert's
matrix; which expert that is it finds in the experts' last places, so the host learns no count and waits for nothing
(the grouping is that of MegaBlocks, Gale et al. 2023, without padded copies). Two such products with the activation
between them make the experts, and one batched product weighs and adds what a row's choices gave.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from kernels.launch import INTERPRETED, SUPPORTED_DTYPES, Kernel, next_power_of_two
from kernels.tuning import EXPERT_TILES, ExpertTable, Gpu, expert_tile


class GroupedExperts:
    """See the module. Stateless; one instance serves every layer of one device."""

    def __init__(self, gpu: Gpu, tiles: ExpertTable = EXPERT_TILES) -> None:
        self._gpu = gpu
        self._tiles = tiles

    def __call__(
        self,
        hidden: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        experts: torch.Tensor,
        weights: torch.Tensor,
        activate: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """The contract of ``kernels.experts.routed_experts``, for float32, bfloat16 and float16; sums are float32.

        ``hidden`` ``[rows, hidden]``, ``gate_up`` ``[experts, 2 * width, hidden]``, ``down``
        ``[experts, hidden, width]``, all of one dtype; ``experts`` int64 and ``weights`` of any float dtype, both
        ``[rows, k]``. Returns a new tensor like ``hidden``.
        """
        for matrices in (gate_up, down):
            if hidden.dtype not in SUPPORTED_DTYPES or matrices.dtype != hidden.dtype:
                raise ValueError(
                    f"hidden is {hidden.dtype}, experts are {matrices.dtype}: both must be one of "
                    f"{', '.join(map(str, SUPPORTED_DTYPES))}"
                )
        rows, choices = experts.shape
        sorted_experts, order = experts.reshape(-1).sort(stable=True)
        every = torch.arange(len(down), device=experts.device)
        ends = torch.searchsorted(sorted_experts, every, right=True, out_int32=True)
        inner = hidden.new_empty(rows * choices, gate_up.shape[1])
        self._multiply(hidden, gate_up, ends, order, inner, choices, is_gathering=True)
        outputs = hidden.new_empty(rows * choices, hidden.shape[1])
        self._multiply(activate(inner), down, ends, order, outputs, choices, is_gathering=False)
        return torch.bmm(weights.to(hidden.dtype)[:, None, :], outputs.view(rows, choices, -1))[:, 0]

    def _multiply(
        self,
        inputs: torch.Tensor,
        matrices: torch.Tensor,
        ends: torch.Tensor,
        order: torch.Tensor,
        out: torch.Tensor,
        choices: int,
        *,
        is_gathering: bool,
    ) -> None:
        if inputs.stride(-1) != 1:
            inputs = inputs.contiguous()
        experts, outer, inner = matrices.shape
        count = len(order)
        tile = expert_tile(self._tiles, self._gpu.architecture, inputs.element_size(), count // experts)
        # An expert's last tile may be partial, if it has any.
        tiles = min(experts, count) + count // tile.rows
        multiply_by_expert.launch(
            (tiles, triton.cdiv(outer, tile.outer)),
            inputs,
            inputs.stride(0),
            matrices,
            matrices.stride(0),
            matrices.stride(1),
            ends,
            order,
            out,
            choices=choices,
            experts=experts,
            padded_experts=next_power_of_two(experts),
            outer=outer,
            inner=inner,
            widen=INTERPRETED,
            is_gathering=is_gathering,
            row_tile=tile.rows,
            outer_tile=tile.outer,
            inner_tile=tile.inner,
            warps=tile.warps,
            stages=tile.stages,
        )


@Kernel
def multiply_by_expert(
    inputs: tl.tensor,
    input_stride: tl.tensor,
    matrices: tl.tensor,
    expert_stride: tl.tensor,
    outer_stride: tl.tensor,
    ends: tl.tensor,
    order: tl.tensor,
    out: tl.tensor,
    choices: tl.constexpr,
    experts: tl.constexpr,
    padded_experts: tl.constexpr,
    outer: tl.constexpr,
    inner: tl.constexpr,
    widen: tl.constexpr,
    is_gathering: tl.constexpr,
    row_tile: tl.constexpr,
    outer_tile: tl.constexpr,
    inner_tile: tl.constexpr,
) -> None:
    """One program per ``row_tile`` places of one expert in the sorted order, and ``outer_tile`` of its outputs.

    Gathering, a place's input is the row that it came from, and its result stays at the place; if not, its input is at
    the place, and its result goes where it came from.
    """
    expert = tl.arange(0, padded_experts)
    end = tl.load(ends + expert, mask=expert < experts, other=0)
    begin = tl.load(ends + expert - 1, mask=(expert > 0) & (expert < experts), other=0)
    tiles = (end - begin + row_tile - 1) // row_tile
    last_tiles = tl.cumsum(tiles, 0)
    # It is the expert of this tile that has no tile after it and some at it or before it.
    is_mine = (last_tiles > tl.program_id(0)) & (last_tiles - tiles <= tl.program_id(0))
    mine = tl.sum(tl.where(is_mine, expert, 0), 0).to(tl.int64)
    first = tl.sum(tl.where(is_mine, begin + (tl.program_id(0) - last_tiles + tiles) * row_tile, 0), 0)
    last = tl.sum(tl.where(is_mine, end, 0), 0)
    # Experts without rows leave tiles without an expert.
    if first >= last:
        return

    place = first + tl.arange(0, row_tile)
    is_row = place < last
    origin = tl.load(order + place, mask=is_row, other=0)
    column = tl.program_id(1) * outer_tile + tl.arange(0, outer_tile)
    dim = tl.arange(0, inner_tile)
    source = origin // choices if is_gathering else place.to(tl.int64)
    rows = inputs + source[:, None] * input_stride + dim[None, :]
    columns = matrices + mine * expert_stride + column.to(tl.int64)[None, :] * outer_stride + dim[:, None]
    total = tl.zeros([row_tile, outer_tile], tl.float32)
    for step in range(0, inner, inner_tile):
        left = tl.load(rows + step, mask=is_row[:, None] & (dim + step < inner)[None, :], other=0.0)
        right = tl.load(columns + step, mask=(dim + step < inner)[:, None] & (column < outer)[None, :], other=0.0)
        if widen:
            left = left.to(tl.float32)
            right = right.to(tl.float32)
        total = tl.dot(left, right, total, input_precision="ieee")
    target = place.to(tl.int64) if is_gathering else origin
    tl.store(
        out + target[:, None] * outer + column[None, :],
        total.to(out.dtype.element_ty),
        mask=is_row[:, None] & (column < outer)[None, :],
    )
