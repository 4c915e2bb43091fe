"""Triton kernels of ``kernels.delta_rule``.

One row of many sequences is one launch: a program has some columns of one head's state, for columns of values don't
depend on each other. Consecutive rows of one sequence are two launches. The first, parallel over blocks of rows, solves
every block's triangular system, as the reference does; the second walks over the blocks and advances the state (the
split is that of Yang et al. 2024, "Parallelizing Linear Transformers with the Delta Rule over Sequence Length").

Everything is float32. Products are sums of three TF32 products, which keeps float32's precision but for the last bits.
"""

import torch
import triton
import triton.language as tl

from kernels.delta_rule import DeltaRows
from kernels.launch import LEAST_PRODUCT, Kernel, inlined, next_power_of_two
from kernels.tuning import DELTA_TILES, DeltaTable, Gpu, delta_tile

STRIP: tl.constexpr = tl.constexpr(8)
"""Rows that are solved first, each strip for itself: longer ones lose precision, see ``inverse_of_unit_lower``."""


class FusedDeltaRule:
    """See the module. Stateless; one instance serves every layer of one device."""

    def __init__(self, gpu: Gpu, tiles: DeltaTable = DELTA_TILES) -> None:
        self._tile = delta_tile(tiles, gpu.architecture)

    def delta_rule_row(self, rows: DeltaRows, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """One row of each of many sequences: the contract of ``kernels.delta_rule.delta_rule_row``.

        ``state`` is ``[rows, value_heads, key_dim, value_dim]``, all is float32. Returns outputs
        ``[rows, value_heads, value_dim]`` and the new states; nothing is changed in place.
        """
        check_dtypes(rows, state)
        count, value_heads, key_dim, value_dim = state.shape
        state = state.contiguous()
        new_state = torch.empty_like(state)
        out = state.new_empty(count, value_heads, value_dim)
        tile = min(self._tile.row_values, next_power_of_two(value_dim))
        advance_rows.launch(
            (count, value_heads, triton.cdiv(value_dim, tile)),
            *_arguments(rows),
            state,
            new_state,
            out,
            group=rows.group,
            value_heads=value_heads,
            key_dim=key_dim,
            value_dim=value_dim,
            padded_key=next_power_of_two(key_dim),
            value_tile=tile,
            warps=self._tile.row_warps,
        )
        return out, new_state

    def delta_rule_chunk(self, rows: DeltaRows, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Consecutive rows of one sequence: the contract of ``kernels.delta_rule.delta_rule_chunk``.

        ``state`` is ``[value_heads, key_dim, value_dim]``, all is float32. Returns outputs
        ``[rows, value_heads, value_dim]`` and the state after the last row; nothing is changed in place.
        """
        check_dtypes(rows, state)
        value_heads, key_dim, value_dim = state.shape
        tile, count = self._tile, len(rows.value)
        blocks = triton.cdiv(count, tile.rows)
        arguments = _arguments(rows)
        corrections = state.new_empty(count, value_heads, value_dim)
        recalls = state.new_empty(count, value_heads, key_dim)
        sizes = {
            "group": rows.group,
            "value_heads": value_heads,
            "key_dim": key_dim,
            "value_dim": value_dim,
            "block_rows": tile.rows,
            "key_tile": max(LEAST_PRODUCT, min(tile.keys, next_power_of_two(key_dim))),
            "value_tile": max(LEAST_PRODUCT, min(tile.values, next_power_of_two(value_dim))),
        }
        solve_blocks.launch(
            (blocks, value_heads),
            *arguments[1:],
            corrections,
            recalls,
            count,
            **sizes,
            warps=tile.warps,
            stages=1,
        )
        out, new_state = torch.empty_like(corrections), state.clone(memory_format=torch.contiguous_format)
        advance_blocks.launch(
            (value_heads, triton.cdiv(value_dim, sizes["value_tile"])),
            arguments[0],
            arguments[1],
            arguments[3],
            corrections,
            recalls,
            new_state,
            out,
            count,
            **sizes,
            warps=tile.warps,
            stages=1,
        )
        return out, new_state


def check_dtypes(rows: DeltaRows, state: torch.Tensor) -> None:
    """Raise ``ValueError`` unless all is float32."""
    for tensor in (*_arguments(rows), state):
        if tensor.dtype != torch.float32:
            raise ValueError(f"the delta rule's kernels take torch.float32, not {tensor.dtype}")


def _arguments(rows: DeltaRows) -> tuple[torch.Tensor, ...]:
    tensors = (rows.query, rows.key, rows.value, rows.log_decay, rows.beta)
    return tuple(tensor.contiguous() for tensor in tensors)


@Kernel
def advance_rows(
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    log_decay: tl.tensor,
    beta: tl.tensor,
    state: tl.tensor,
    new_state: tl.tensor,
    out: tl.tensor,
    group: tl.constexpr,
    value_heads: tl.constexpr,
    key_dim: tl.constexpr,
    value_dim: tl.constexpr,
    padded_key: tl.constexpr,
    value_tile: tl.constexpr,
) -> None:
    """One program per row, value head and ``value_tile`` columns of the head's state."""
    lane = tl.program_id(0).to(tl.int64) * value_heads + tl.program_id(1)
    dim = tl.arange(0, padded_key)
    column = tl.program_id(2) * value_tile + tl.arange(0, value_tile)
    inside = (dim < key_dim)[:, None] & (column < value_dim)[None, :]
    place = (lane * key_dim + dim)[:, None] * value_dim + column[None, :]
    in_key = lane // group * key_dim + dim
    keys = tl.load(key + in_key, mask=dim < key_dim, other=0.0)
    queries = tl.load(query + in_key, mask=dim < key_dim, other=0.0)
    values = tl.load(value + lane * value_dim + column, mask=column < value_dim, other=0.0)
    memory = tl.load(state + place, mask=inside, other=0.0) * tl.exp(tl.load(log_decay + lane))
    correction = (values - tl.sum(keys[:, None] * memory, 0)) * tl.load(beta + lane)
    memory += keys[:, None] * correction[None, :]
    tl.store(new_state + place, memory, mask=inside)
    tl.store(out + lane * value_dim + column, tl.sum(queries[:, None] * memory, 0), mask=column < value_dim)


@inlined
def product(left: tl.tensor, right: tl.tensor) -> tl.tensor:
    """As exact as float32's, on matrix units."""
    return tl.dot(left, right, input_precision="tf32x3")


@inlined
def inverse_of_unit_lower(lower: tl.tensor, identity: tl.tensor) -> tl.tensor:
    """The inverse of ``identity + lower``, for a ``lower`` whose eighth power is zero.

    It is ``(1 - x)(1 + x^2)(1 + x^4)``. Numbers in powers grow like binomial coefficients and cancel each other, which
    costs precision: one digit here, all of them with a long block of equal keys.
    """
    squared = product(lower, lower)
    inverse = identity - lower
    inverse += product(inverse, squared)
    return inverse + product(inverse, product(squared, squared))


@Kernel
def solve_blocks(
    key: tl.tensor,
    value: tl.tensor,
    log_decay: tl.tensor,
    beta: tl.tensor,
    corrections: tl.tensor,
    recalls: tl.tensor,
    count: int,
    group: tl.constexpr,
    value_heads: tl.constexpr,
    key_dim: tl.constexpr,
    value_dim: tl.constexpr,
    block_rows: tl.constexpr,
    key_tile: tl.constexpr,
    value_tile: tl.constexpr,
) -> None:
    """One program per block of rows and value head.

    It leaves every row's correction as if the block's incoming state were zero, and what that state is multiplied with
    to know what to subtract. Strips of rows are solved first, then the block, whose strips are then like single rows.
    """
    at = tl.arange(0, block_rows)
    row = tl.program_id(0) * block_rows + at
    lane = row.to(tl.int64) * value_heads + tl.program_id(1)
    is_row = row < count
    since_begin = tl.cumsum(tl.load(log_decay + lane, mask=is_row, other=0.0), 0)
    strength = tl.load(beta + lane, mask=is_row, other=0.0)
    dim = tl.arange(0, key_tile)
    in_key = (lane // group * key_dim)[:, None] + dim[None, :]

    matches = tl.zeros([block_rows, block_rows], tl.float32)
    for step in range(0, key_dim, key_tile):
        keys = tl.load(key + in_key + step, mask=is_row[:, None] & (dim + step < key_dim)[None, :], other=0.0)
        matches += product(keys, tl.trans(keys))
    passed = tl.where(at[:, None] > at[None, :], since_begin[:, None] - since_begin[None, :], float("-inf"))
    system = matches * tl.exp(passed) * strength[:, None]
    identity = tl.where(at[:, None] == at[None, :], 1.0, 0.0)
    within = tl.where(at[:, None] // STRIP == at[None, :] // STRIP, system, 0.0)
    by_strip = inverse_of_unit_lower(within, identity)
    solution = product(inverse_of_unit_lower(product(by_strip, system - within), identity), by_strip)

    column = tl.arange(0, value_tile)
    in_value = (lane * value_dim)[:, None] + column[None, :]
    for step in range(0, value_dim, value_tile):
        is_value = is_row[:, None] & (column + step < value_dim)[None, :]
        values = tl.load(value + in_value + step, mask=is_value, other=0.0) * strength[:, None]
        tl.store(corrections + in_value + step, product(solution, values), mask=is_value)
    decayed = strength * tl.exp(since_begin)
    for step in range(0, key_dim, key_tile):
        is_key = is_row[:, None] & (dim + step < key_dim)[None, :]
        keys = tl.load(key + in_key + step, mask=is_key, other=0.0) * decayed[:, None]
        in_recalls = (lane * key_dim)[:, None] + (dim + step)[None, :]
        tl.store(recalls + in_recalls, product(solution, keys), mask=is_key)


@Kernel
def advance_blocks(
    query: tl.tensor,
    key: tl.tensor,
    log_decay: tl.tensor,
    corrections: tl.tensor,
    recalls: tl.tensor,
    state: tl.tensor,
    out: tl.tensor,
    count: int,
    group: tl.constexpr,
    value_heads: tl.constexpr,
    key_dim: tl.constexpr,
    value_dim: tl.constexpr,
    block_rows: tl.constexpr,
    key_tile: tl.constexpr,
    value_tile: tl.constexpr,
) -> None:
    """One program per value head and ``value_tile`` columns of its state, block after block.

    The state stays in memory, that is in the cache of the program's multiprocessor: registers hold none beside what a
    product of this precision takes. It is read and written ``key_tile`` rows at a time.
    """
    head = tl.program_id(0)
    at = tl.arange(0, block_rows)
    dim = tl.arange(0, key_tile)
    column = tl.program_id(1) * value_tile + tl.arange(0, value_tile)
    in_state = (head * key_dim + dim)[:, None] * value_dim + column[None, :]
    for begin in range(0, count, block_rows):
        is_row = begin + at < count
        lane = (begin + at).to(tl.int64) * value_heads + head
        decay = tl.load(log_decay + lane, mask=is_row, other=0.0)
        since_begin, whole = tl.cumsum(decay, 0), tl.sum(decay, 0)
        in_key = (lane // group * key_dim)[:, None] + dim[None, :]
        in_recalls = (lane * key_dim)[:, None] + dim[None, :]

        recalled = tl.zeros([block_rows, value_tile], tl.float32)
        read = tl.zeros([block_rows, value_tile], tl.float32)
        matches = tl.zeros([block_rows, block_rows], tl.float32)
        for step in range(0, key_dim, key_tile):
            is_key = is_row[:, None] & (dim + step < key_dim)[None, :]
            in_memory = (dim + step < key_dim)[:, None] & (column < value_dim)[None, :]
            memory = tl.load(state + in_state + step * value_dim, mask=in_memory, other=0.0)
            recalled += product(tl.load(recalls + in_recalls + step, mask=is_key, other=0.0), memory)
            queries = tl.load(query + in_key + step, mask=is_key, other=0.0)
            read += product(queries, memory)
            matches += product(queries, tl.trans(tl.load(key + in_key + step, mask=is_key, other=0.0)))
        is_value = is_row[:, None] & (column < value_dim)[None, :]
        in_value = (lane * value_dim)[:, None] + column[None, :]
        correction = tl.load(corrections + in_value, mask=is_value, other=0.0) - recalled
        # From after a row until a later one, or the row itself.
        passed = tl.where(at[:, None] >= at[None, :], since_begin[:, None] - since_begin[None, :], float("-inf"))
        read = read * tl.exp(since_begin)[:, None] + product(matches * tl.exp(passed), correction)
        tl.store(out + in_value, read, mask=is_value)

        until_end = tl.exp(whole - since_begin)[:, None]
        # Other threads of the program have read what this one writes, and the reverse in the next block.
        tl.debug_barrier()
        for step in range(0, key_dim, key_tile):
            is_key = is_row[:, None] & (dim + step < key_dim)[None, :]
            in_memory = (dim + step < key_dim)[:, None] & (column < value_dim)[None, :]
            keys = tl.load(key + in_key + step, mask=is_key, other=0.0) * until_end
            memory = tl.load(state + in_state + step * value_dim, mask=in_memory, other=0.0) * tl.exp(whole)
            memory += product(tl.trans(keys), correction)
            tl.store(state + in_state + step * value_dim, memory, mask=in_memory)
        tl.debug_barrier()
