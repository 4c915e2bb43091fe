"""What ``benchmarks.gpu`` runs: every Triton kernel in sizes of models that are in use, with its reference.

With ``small`` sizes Triton's interpreter can run them all on a CPU.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.gpu_attention import attention, latent_attention
from benchmarks.gpu_case import Case, Place, size_of
from benchmarks.gpu_models import delta_rule, draws, experts, indexer
from kernels import fused_pointwise, page_copies, pages, pointwise
from kernels.pages import KEY_VALUE, Slots


def cases(place: Place) -> Iterator[Case]:
    """All of them."""
    for family in (
        writes,
        transfers,
        attention,
        latent_attention,
        small_operations,
        draws,
        experts,
        indexer,
        delta_rule,
    ):
        yield from family(place)


def writes(place: Place) -> Iterator[Case]:
    """New tokens into their slots."""
    for rows, kv_heads, head_dim in ((2, 1, 16),) if place.small else ((1, 8, 128), (64, 8, 128), (2048, 8, 128)):
        blocks = -(-rows // 16)
        table = np.random.default_rng(0).permutation(blocks)
        slots = Slots.of_range(table, 0, rows, 16, place.device)
        values = place.random(rows, KEY_VALUE, kv_heads, head_dim)
        own, other = (place.random(blocks, KEY_VALUE, kv_heads, 16, head_dim).zero_() for _ in range(2))
        yield Case(
            "write",
            f"{rows} × {kv_heads} × {head_dim}",
            partial(_result, own, page_copies.write_slots, own, slots, values),
            partial(_result, other, pages.write_slots, other, slots, values),
            moved=2 * size_of(values),
            others={"index_put": partial(_result, other, pages.write_slots, other, slots, values)},
        )


def transfers(place: Place) -> Iterator[Case]:
    """A range of tokens and heads of many layers out of their pages and into them."""
    for layers, tokens, kv_heads in ((2, 20, 3),) if place.small else ((1, 512, 8), (32, 512, 8), (32, 4096, 8)):
        head_dim, heads = (16, slice(1, 3)) if place.small else (128, slice(0, 4))
        table = np.random.default_rng(0).permutation(tokens // 16 + 2)
        begin, end = 5, 5 + tokens
        whole = [place.random(len(table), KEY_VALUE, kv_heads, 16, head_dim) for _ in range(layers)]
        caches = [cache[:, :, heads] for cache in whole]
        shape = (layers, KEY_VALUE, caches[0].shape[2], tokens, head_dim)
        size = f"{layers} layers, {tokens} × {shape[2]} × {head_dim}"
        packed, expected = place.random(*shape), place.random(*shape)
        yield Case(
            "gather",
            size,
            partial(_result, packed, page_copies.gather_tokens, caches, table, begin, end, list(packed)),
            partial(_result, expected, pages.gather_tokens, caches, table, begin, end, list(expected)),
            moved=2 * size_of(packed),
            others={"index_select": partial(pages.gather_tokens, caches, table, begin, end, list(expected))},
        )
        others = [cache.clone() for cache in whole]
        plain = partial(pages.scatter_tokens, [cache[:, :, heads] for cache in others], table, begin, end, list(packed))
        yield Case(
            "scatter",
            size,
            partial(_result, whole[-1], page_copies.scatter_tokens, caches, table, begin, end, list(packed)),
            partial(_result, others[-1], plain),
            moved=2 * size_of(packed),
            others={"index_copy": plain},
        )


def _result(written: torch.Tensor, call: Callable[..., None], *arguments: Any) -> torch.Tensor:
    """For calls that write into what they are given."""
    call(*arguments)
    return written


def small_operations(place: Place) -> Iterator[Case]:
    """Norms, rotary positions, activations."""
    width, head_dim = (64, 16) if place.small else (4096, 128)
    for rows in (3,) if place.small else (1, 64, 2048):
        hidden, residual, weight = place.random(rows, width), place.random(rows, width), place.random(width)
        heads = place.random(rows, width // head_dim, head_dim)
        angles = torch.rand(rows, 1, head_dim // 2, device=place.device)
        rotary = (heads, angles.cos().to(place.dtype), angles.sin().to(place.dtype))
        gate_up = place.random(rows, 4 * width)
        for name, operation, arguments, written in (
            ("norm", _norm, (hidden, weight), size_of(hidden)),
            ("added norm", _added_norm, (hidden, residual, weight), size_of(hidden, residual)),
            ("rotary", _rotary, rotary, size_of(heads)),
            ("rotary, neighbours", _rotary_interleaved, rotary, size_of(heads)),
            ("silu", _silu, (gate_up,), size_of(gate_up) // 2),
            ("gelu", _gelu, (gate_up,), size_of(gate_up) // 2),
        ):
            wide = tuple(tensor.float() for tensor in arguments)
            own, other = (tuple(tensor.clone() for tensor in arguments) for _ in range(2))
            yield Case(
                name,
                f"{rows} × {width}",
                partial(operation, fused_pointwise, *own),
                partial(operation, pointwise, *wide),
                moved=size_of(*arguments) + written,
                others={"plain": partial(operation, pointwise, *other)},
            )


def _norm(kernels: Any, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = kernels.rms_norm(hidden, weight, 1e-5)
    return out


def _added_norm(kernels: Any, hidden: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """In place, so the residual grows from run to run."""
    if kernels is fused_pointwise:
        return fused_pointwise.add_rms_norm(hidden, residual, weight, 1e-5)
    return pointwise.rms_norm(residual.add_(hidden), weight, 1e-5)


def _rotary(kernels: Any, heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    kernels.apply_rotary(heads, cos, sin)
    return heads


def _rotary_interleaved(kernels: Any, heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    kernels.apply_rotary_interleaved(heads, cos, sin)
    return heads


def _silu(kernels: Any, gate_up: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = kernels.silu_and_multiply(gate_up)
    return out


def _gelu(kernels: Any, gate_up: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = kernels.gelu_and_multiply(gate_up)
    return out
