"""The table of released models in docs/kv-cache.md, made from the plans and tensors of the code itself.

    python -m tests.worker.kv_cache.documented_table

writes it anew, between its markers.
"""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from tests.releases import RELEASES
from worker.kv_cache.specs import KVCacheSpec, TokenRegion
from worker.kv_cache.tensors import LayerCache, allocate_kv_cache_tensors, reshape_kv_cache_tensors
from worker.models.outline import ModelOutline, outline_model

COMMAND = "python -m tests.worker.kv_cache.documented_table"
DOCUMENT = Path(__file__).parents[3] / "docs" / "kv-cache.md"
BEGIN, END = f"<!-- begin: {COMMAND} -->", "<!-- end -->"

MODELS = ("Qwen3-8B", "DeepSeek V3", "DeepSeek V3.2", "Qwen3-Next-80B", "Gemma 3n E2B", "Gemma 3n E4B", "Hymba-1.5B")
MEMORY = 40 * 2**30


def table() -> str:
    """Markdown, one row per model and kind of layer."""
    rows = [
        "| model | spec | owners | `page_size_bytes` | caches: the views of a page | number of blocks |",
        "| --- | --- | ---: | --- | --- | --- |",
    ]
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "config.json"
        for model in MODELS:
            file.write_text(json.dumps(RELEASES[model]))
            outline = outline_model(file, kv_sharing="model", dtype="bfloat16", block_size=16)
            rows += [f"| {' | '.join(cells)} |" for cells in _rows(model, outline)]
    return "\n".join(rows)


def document_with(table: str, document: str) -> str:
    """The document with the table between its markers."""
    before, _, rest = document.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


def _rows(model: str, outline: ModelOutline) -> Iterator[tuple[str, ...]]:
    plan = outline.cache
    memory = allocate_kv_cache_tensors(plan, 1, torch.device("meta"))
    views = reshape_kv_cache_tensors(memory, plan, outline.layers, 1)
    owners: dict[KVCacheSpec, list[LayerCache]] = {}
    for group in plan.groups:
        for name, spec in zip(group.owners, group.specs, strict=True):
            owners.setdefault(spec, []).append(views[name])
    blocks = f"40 GiB / {plan.bytes_per_block:,} = {plan.count_blocks(MEMORY):,}"
    for spec, caches in owners.items():
        kind = f"`{type(spec).__name__}`"
        yield model, kind, str(len(caches)), _page(spec), " + ".join(map(_view, caches[0])), blocks
        # What follows is of the same model, in the same blocks.
        model, blocks = "", "the same"


def _page(spec: KVCacheSpec) -> str:
    terms = []
    for region in spec.regions:
        size = region.dtype.itemsize
        if isinstance(region, TokenRegion):
            factors: tuple[int, ...] = (spec.tokens_per_block, region.parts, region.kv_heads, region.head_dim, size)
            # Of a latent there is one part and one head.
            factors = tuple(factor for factor in factors if factor != 1)
        else:
            factors = (*region.shape, size)
        terms.append("·".join(map(str, factors)))
    return f"{' + '.join(terms)} = {spec.page_size_bytes:,}"


def _view(cache: torch.Tensor) -> str:
    return f"`{list(cache.shape[1:])}`" + (" float32" if cache.dtype == torch.float32 else "")


if __name__ == "__main__":
    DOCUMENT.write_text(document_with(table(), DOCUMENT.read_text()))
