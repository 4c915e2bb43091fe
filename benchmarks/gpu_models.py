"""Cases for ``benchmarks.gpu`` of draws from logits, and of what only some models have: experts, indexers, states."""

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.gpu_case import Case, Place, size_of
from kernels import fused_sampling, sampling
from kernels.attention import latent
from kernels.attention.latent import Selection
from kernels.attention.paged import PagedAttention
from kernels.attention.paged_index import PagedIndexer
from kernels.attention.segments import Segment
from kernels.delta_rule import DeltaRows, delta_rule_chunk, delta_rule_row, unit_vectors
from kernels.experts import routed_experts
from kernels.fused_delta_rule import FusedDeltaRule
from kernels.grouped_experts import GroupedExperts
from kernels.pages import PageShape
from kernels.pointwise import silu_and_multiply
from kernels.sampling import RowFilters

FloatArray = npt.NDArray[np.float64]
Rule = Callable[[DeltaRows, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def draws(place: Place) -> Iterator[Case]:
    """Of a whole vocabulary. Tokens are the same, unless a sum of probabilities hits a threshold to its last bits."""
    for rows, vocab in ((3, 70),) if place.small else ((1, 128_256), (64, 128_256)):
        logits = 3 * torch.randn(rows, vocab, device=place.device)
        numbers = np.random.default_rng(0).random(rows)
        for name, wanted in (
            ("draw", RowFilters(0, 1.0, 0.0)),
            ("draw, top-p", RowFilters(0, 0.9, 0.0)),
            ("draw, all filters", RowFilters(50, 0.9, 0.05)),
        ):
            filters = [wanted] * rows
            # The reference overwrites what it drops.
            plain = partial(_drawn_from_copy, logits, filters, numbers)
            yield Case(
                name,
                f"{rows} of {vocab}",
                partial(fused_sampling.draw_tokens, logits, filters, numbers),
                plain,
                moved=size_of(logits),
                others={"plain": plain},
            )


def _drawn_from_copy(logits: torch.Tensor, filters: list[RowFilters], numbers: FloatArray) -> torch.Tensor:
    return sampling.draw_tokens(logits.clone(), filters, numbers)


def experts(place: Place) -> Iterator[Case]:
    """Mixtures such as Mixtral's, of few large experts, and Qwen3's, of many small ones."""
    sizes: list[tuple[int, int, int, int, int]] = [(5, 2, 4, 32, 16)]
    if not place.small:
        mixtures = ((2, 8, 4096, 14336), (8, 128, 2048, 768))
        sizes = [(rows, *mixture) for rows in (1, 64, 2048) for mixture in mixtures]
    for rows, choices, count, width, inner in sizes:
        hidden = place.random(rows, width)
        gate_up = place.random(count, 2 * inner, width) / width**0.5
        down = place.random(count, width, inner) / inner**0.5
        chosen = torch.rand(rows, count, device=place.device).topk(choices, dim=1).indices
        weights = torch.rand(rows, choices, device=place.device)
        arguments = (hidden, gate_up, down, chosen, weights, silu_and_multiply)
        used = int(torch.bincount(chosen.view(-1), minlength=count).count_nonzero())
        yield Case(
            "experts",
            f"{rows} × {choices} of {count}, {width} → {inner}",
            partial(GroupedExperts(place.gpu), *arguments),
            partial(_wide_experts, hidden, gate_up, down, chosen, weights),
            moved=size_of(hidden, hidden) + used * size_of(gate_up[0], down[0]),
            operations=6 * rows * choices * width * inner,
            others={"loop over experts": partial(routed_experts, *arguments)},
        )


def _wide_experts(
    hidden: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    return routed_experts(hidden.float(), gate_up.float(), down.float(), chosen, weights, silu_and_multiply)


def indexer(place: Place) -> Iterator[Case]:
    """The tokens that a sparse indexer selects. Of whole numbers, which every way of summing adds up alike."""
    heads, head_dim, block_size = (3, 16, 16) if place.small else (64, 128, 64)
    for sequences, rows, context, topk in (
        ((2, 1, 40, 8), (1, 5, 40, 8))
        if place.small
        else ((8, 1, 8000, 2048), (64, 1, 8000, 2048), (1, 512, 8000, 2048))
    ):
        blocks = -(-context // block_size)
        table = np.random.default_rng(0).permutation(sequences * blocks).reshape(sequences, blocks)
        segments = [Segment(i * rows, rows, context, own) for i, own in enumerate(table)]
        cache = place.random(sequences * blocks, 1, 1, block_size, head_dim).round_()
        query = place.random(sequences * rows, heads, head_dim).round_()
        weights = torch.randint(-2, 4, (sequences * rows, heads), device=place.device).float()
        paged = PagedAttention(place.gpu).plan(segments, PageShape.of(cache), None, place.device)
        gathered = latent.plan_latents(segments, PageShape.of(cache), None, place.device).latents
        yield Case(
            "indexer",
            f"{sequences} × {rows}: {topk} of {context}, {heads} heads",
            partial(_selected, PagedIndexer(place.gpu).select_tokens, query, weights, cache, paged, topk),
            partial(_selected, latent.select_tokens, query, weights, cache, gathered, topk),
            moved=size_of(query, weights) + sequences * context * head_dim * cache.element_size(),
            operations=2 * sequences * rows * context * heads * head_dim,
            others={"gathered": partial(_selected, latent.select_tokens, query, weights, cache, gathered, topk)},
        )


def _selected(select: Callable[..., Selection | None], *arguments: object) -> torch.Tensor:
    selection = select(*arguments)
    assert selection is not None, "rows see more than they may select"
    return selection.tokens


def delta_rule(place: Place) -> Iterator[Case]:
    """One row of many sequences, and a prompt; float32 whatever the place's type is, as models have it."""
    key_heads, value_heads, dim = (1, 2, 16) if place.small else (16, 32, 128)
    fused = FusedDeltaRule(place.gpu)
    for count in (2,) if place.small else (1, 64):
        rows = _delta_rows(place, count, key_heads, value_heads, dim)
        state = torch.randn(count, value_heads, dim, dim, device=place.device)
        plain = partial(_joined, delta_rule_row, rows, state)
        yield Case(
            "delta rule, rows",
            f"{count} × {value_heads} × {dim} × {dim}",
            partial(_joined, fused.delta_rule_row, rows, state),
            plain,
            moved=2 * size_of(state, rows.value) + size_of(rows.query, rows.key),
            others={"plain": plain},
        )
    for count in (20,) if place.small else (2000,):
        rows = _delta_rows(place, count, key_heads, value_heads, dim)
        state = torch.randn(value_heads, dim, dim, device=place.device)
        plain = partial(_joined, delta_rule_chunk, rows, state)
        yield Case(
            "delta rule, prompt",
            f"{count} × {value_heads} × {dim} × {dim}",
            partial(_joined, fused.delta_rule_chunk, rows, state),
            plain,
            moved=2 * size_of(state, rows.value) + size_of(rows.query, rows.key),
            others={"plain": plain},
        )


def _delta_rows(place: Place, count: int, key_heads: int, value_heads: int, dim: int) -> DeltaRows:
    def random(*shape: int) -> torch.Tensor:
        return torch.randn(count, *shape, device=place.device)

    return DeltaRows(
        random(key_heads, dim) / dim,
        unit_vectors(random(key_heads, dim)),
        random(value_heads, dim),
        -0.1 * random(value_heads).abs(),
        random(value_heads).sigmoid(),
    )


def _joined(rule: Rule, rows: DeltaRows, state: torch.Tensor) -> torch.Tensor:
    """Outputs and states side by side."""
    out, new_state = rule(rows, state)
    return torch.cat((out.flatten(), new_state.flatten()))
