"""What ``crosskv inspect`` says of a model: which layers own KV, what they store, how much fits into a given memory.

A ``ModelSummary`` is computed from the model's outline, without weights, and then shown or written as JSON. ``serve``
and the benchmarks make one too, to refuse what cannot work before anything is started.
"""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from cluster.config import ClusterConfig, Mode, flag_of
from cluster.errors import CrosskvError
from cluster.model_store import resolve_model
from worker.config import Role
from worker.kv_cache.groups import CachePlan, KVCacheGroup, longest_sequence
from worker.kv_cache.specs import EveryToken, KVCacheSpec, LastState, LastTokens, LayerName, TokenRegion
from worker.models.config_checks import UnsupportedModel
from worker.models.outline import ModelOutline, outline_model

STATE_SPEC = "recurrent_state"


@dataclass(frozen=True, slots=True)
class LayerSummary:
    """One layer with a place in the cache. An owner has a spec and pages; a sharing layer has a target and no bytes.

    ``stores`` describes what an owner's page holds, of each of ``block_size`` tokens: 0 for a state. A sharing layer
    that stores something of its own besides (a sparse indexer's keys) has a target and a spec. Of a model that is split
    over ranks, all this is about one of them; ``copies`` ranks store the same.
    """

    name: str
    target: str | None
    spec: str | None
    stores: str
    block_size: int
    page_size_bytes: int
    copies: int


@dataclass(frozen=True, slots=True)
class GroupSummary:
    """One KV cache group: layers that keep their slots equally long, with one block table.

    ``keeps`` is for people. ``block_bytes`` are those of a block that the group fills, ``padding_bytes`` those that it
    leaves unused; together they are ``bytes_per_block``. ``members`` counts owners and layers that share their caches.
    """

    keeps: str
    block_size: int
    owners: int
    members: int
    block_bytes: int
    padding_bytes: int


@dataclass(frozen=True, slots=True)
class ModelSummary:
    """A model under one sharing rule; ``*_unshared`` is the same model with a cache in every layer.

    ``total_layers`` are those that attend to KV, ``owner_layers`` those of them that own it; ``state_layers`` own a
    recurrent state. ``bytes_per_block`` is one block id over all ``buffers``, of which ``padding_bytes_per_block`` are
    unused by the group that fills a block worst; ``bytes_per_block_separate`` is the same with one set of buffers per
    kind of layer. ``cache_tokens`` are those of one request that has all blocks. ``requests`` fit at once if each has
    ``request_tokens`` tokens, and so ``blocks_per_request``, prompts being computed in steps of ``step_tokens``. The
    ``prefix_tokens`` that a model puts before every prompt are in these blocks, but not in these tokens.

    All this is about a decode (or colocated) replica. Of ``tensor_parallel_size`` ranks, each has ``memory_bytes``, and
    bytes are one rank's; blocks, tokens and requests are the replica's, because all ranks use the same blocks.
    ``prefill_cache_tokens`` are the ``cache_tokens`` of a prefill replica of ``prefill_tensor_parallel_size`` ranks.
    """

    model: str
    architecture: str
    kv_sharing: str
    dtype: str
    vocab_size: int
    longest_context: int
    block_size: int
    memory_bytes: int
    tensor_parallel_size: int
    prefill_tensor_parallel_size: int
    total_layers: int
    owner_layers: int
    state_layers: int
    bytes_per_token: int
    bytes_per_token_unshared: int
    state_bytes_per_request: int
    bytes_per_block: int
    bytes_per_block_separate: int
    padding_bytes_per_block: int
    num_blocks: int
    num_blocks_unshared: int
    cache_tokens: int
    cache_tokens_unshared: int
    prefill_cache_tokens: int
    prefix_tokens: int
    request_tokens: int
    step_tokens: int
    blocks_per_request: int
    requests: int
    requests_unshared: int
    buffers: int
    groups: tuple[GroupSummary, ...]
    layers: tuple[LayerSummary, ...]

    @property
    def longest_request(self) -> int:
        """Tokens of the longest request that every replica of the cluster can hold."""
        return min(self.cache_tokens, self.prefill_cache_tokens)

    def render(self) -> RenderableType:
        """Return the summary for a terminal of 80 columns: every layer, every kind of page, the groups, the totals."""
        parts: list[RenderableType] = [
            _title(f"{self.model} ({self.architecture}, {self.dtype})"),
            self._layer_table(),
            _title("What a page holds: parts × KV heads × head size, or the shapes of a state"),
            self._page_table(),
        ]
        if len(self.groups) > 1:
            parts += [
                _title(f"{len(self.groups)} groups of layers that keep their slots equally long"),
                self._group_table(),
                f"{self.buffers} buffers, each shared by one owner of every group. A block is one page of each, "
                f"{self.bytes_per_block:,} bytes in all, and belongs to one group at a time.\n",
            ]
        ranks = self.tensor_parallel_size
        split = f", bytes of each of {ranks} ranks" if ranks > 1 else ""
        return Group(*parts, _title(f"KV sharing {self.kv_sharing}{split}"), self._totals())

    def _layer_table(self) -> Table:
        table = _table()
        table.add_column("layer", no_wrap=True)
        table.add_column("KV cache", overflow="fold")
        for layer in self.layers:
            shared = [f"[cyan]that of {layer.target}[/cyan]"] if layer.target else []
            own = [f"{layer.spec}, {layer.page_size_bytes:,} B a page"] if layer.spec else []
            table.add_row(layer.name, "\n".join(shared + own))
        return table

    def _page_table(self) -> Table:
        table = _table()
        table.add_column("kind of owner", overflow="fold")
        for title in ("owners", "sharing", "tokens", "bytes"):
            table.add_column(title, justify="right", no_wrap=True)
        # Layers differ in their names; what is left is the kind.
        kinds = Counter(replace(layer, name="", target=None) for layer in self.layers if layer.spec)
        kind_of = {layer.name: replace(layer, name="", target=None) for layer in self.layers}
        sharing = Counter(kind_of[layer.target] for layer in self.layers if layer.target)
        for kind, owners in kinds.items():
            copies = f", the same on {kind.copies} ranks" if kind.copies > 1 else ""
            table.add_row(
                f"{kind.spec}: {kind.stores}{copies}",
                str(owners),
                str(sharing[kind]),
                str(kind.block_size or "–"),
                f"{kind.page_size_bytes:,}",
            )
        return table

    def _group_table(self) -> Table:
        table = _table()
        table.add_column("group", no_wrap=True)
        table.add_column("keeps")
        for title in ("owners", "tokens", "bytes", "unused"):
            table.add_column(title, justify="right", no_wrap=True)
        for first, last, group in _runs(self.groups):
            table.add_row(
                str(first) if first == last else f"{first}–{last}",
                group.keeps,
                str(group.owners) if first == last else f"{last - first + 1} × {group.owners}",
                f"{group.block_size:,}" if group.block_size else "–",
                f"{group.block_bytes:,}",
                f"{group.padding_bytes:,}",
            )
        return table

    def _totals(self) -> Table:
        table = _table()
        for title in ("", "as configured", "without sharing"):
            table.add_column(title, justify="right" if title else "left", no_wrap=bool(title))
        table.add_row(
            "attention layers that own KV", f"{self.owner_layers} of {self.total_layers}", str(self.total_layers)
        )
        table.add_row("bytes per token", f"{self.bytes_per_token:,}", f"{self.bytes_per_token_unshared:,}")
        table.add_row("state bytes per request", *[f"{self.state_bytes_per_request:,}"] * 2)
        blocks = "blocks" if len(self.groups) > 1 else f"blocks of {self.block_size} tokens"
        table.add_row(f"{blocks} in {self.memory_bytes:,} B", f"{self.num_blocks:,}", f"{self.num_blocks_unshared:,}")
        table.add_row(
            "tokens, if one request had them all", f"{self.cache_tokens:,}", f"{self.cache_tokens_unshared:,}"
        )
        if self.prefill_cache_tokens != self.cache_tokens:
            ranks = _ranks(self.prefill_tensor_parallel_size)
            table.add_row(f"… on a prefill replica of {ranks}", f"{self.prefill_cache_tokens:,}", "")
        table.add_row(
            f"requests of {self.request_tokens:,} tokens in them", f"{self.requests:,}", f"{self.requests_unshared:,}"
        )
        if self.bytes_per_block_separate != self.bytes_per_block:
            table.add_row("bytes per block", f"{self.bytes_per_block:,}", "")
            table.add_row("… if each kind of layer had buffers", f"{self.bytes_per_block_separate:,}", "")
            table.add_row("… unused where a block is filled worst", f"{self.padding_bytes_per_block:,}", "")
        return table


def inspect_model(
    config: ClusterConfig, sharing_name: str | None = None, request_tokens: int | None = None
) -> ModelSummary:
    """Summarize the model that a configuration names, fetching it if it is neither a path nor here already.

    ``sharing_name`` is how to call the sharing rule, if not as it stands in the configuration. ``request_tokens`` is
    the length of the requests that are counted, by default the longest that is served. Raises the worker's own errors
    for a model or a sharing rule that cannot be served.
    """
    path, name = find_configuration(config.model)
    outline = _outline(config, path, Role.DECODE)
    ranks, prefill_ranks = config.ranks_of(Role.DECODE), config.ranks_of(Role.PREFILL)
    prefills_apart = Role.PREFILL in config.replicas and prefill_ranks != ranks
    prefill = _outline(config, path, Role.PREFILL) if prefills_apart else outline
    dtype = str(outline.dtype).removeprefix("torch.")
    # From the configuration alone: a checkpoint whose layers share need not have the weights to do without.
    alone = path / "config.json" if path.is_dir() else path
    unshared = _outline(config.replace(kv_sharing="none", dtype=dtype), alone, Role.DECODE)
    unsplit = outline
    if ranks > 1:
        unsplit = _outline(config.replace(tensor_parallel_size=1, dtype=dtype), alone, Role.DECODE)
    layers = tuple(_layer_summaries(outline, unsplit, ranks))
    memory = int(config.kv_cache_memory)
    tokens = request_tokens or config.max_model_len or outline.longest_context
    held, step = tokens + outline.prefix_tokens, config.max_batched_tokens
    plan, unshared_plan = outline.cache, unshared.cache
    return ModelSummary(
        model=name,
        architecture=outline.architecture,
        kv_sharing=sharing_name or config.kv_sharing,
        dtype=dtype,
        vocab_size=outline.vocab_size,
        longest_context=outline.longest_context,
        block_size=config.block_size,
        memory_bytes=memory,
        tensor_parallel_size=ranks,
        prefill_tensor_parallel_size=prefill_ranks,
        total_layers=sum(layer.spec != STATE_SPEC for layer in layers),
        owner_layers=sum(layer.target is None and layer.spec != STATE_SPEC for layer in layers),
        state_layers=sum(layer.spec == STATE_SPEC for layer in layers),
        bytes_per_token=plan.bytes_per_token,
        bytes_per_token_unshared=unshared_plan.bytes_per_token,
        state_bytes_per_request=plan.state_bytes,
        bytes_per_block=plan.bytes_per_block,
        bytes_per_block_separate=plan.bytes_per_block_unshared_buffers,
        padding_bytes_per_block=max(plan.padding(group) for group in plan.groups),
        num_blocks=plan.count_blocks(memory),
        num_blocks_unshared=unshared_plan.count_blocks(memory),
        cache_tokens=_cache_tokens(outline, memory, step),
        cache_tokens_unshared=_cache_tokens(unshared, memory, step),
        prefill_cache_tokens=_cache_tokens(prefill, memory, step),
        prefix_tokens=outline.prefix_tokens,
        request_tokens=tokens,
        step_tokens=step,
        blocks_per_request=plan.blocks_held(held, step),
        requests=plan.count_blocks(memory) // plan.blocks_held(held, step),
        requests_unshared=unshared_plan.count_blocks(memory) // unshared_plan.blocks_held(held, step),
        buffers=len(plan.buffers),
        groups=tuple(_group_summary(plan, group) for group in plan.groups),
        layers=layers,
    )


def require_servable(config: ClusterConfig, summary: ModelSummary, longest_request: int = 2) -> None:
    """Raise ``CrosskvError`` if the model or its cache cannot hold what the configuration promises.

    ``longest_request`` is in tokens, prompt and output.
    """
    ranks_of_none = config.prefill_tensor_parallel_size
    if config.mode is Mode.COLOCATED and ranks_of_none is not None:
        raise CrosskvError(
            f"--prefill-tensor-parallel-size {ranks_of_none}: with --mode {config.mode} there are no prefill replicas; "
            f"leave it out, or use --mode {Mode.DISAGGREGATED}"
        )
    wanted = config.max_model_len
    if wanted is not None and wanted > summary.longest_context:
        raise CrosskvError(
            f"--max-model-len {wanted}: {summary.model} is served up to {summary.longest_context} tokens; lower it"
        )
    limit = wanted or summary.longest_context
    if longest_request > limit:
        raise CrosskvError(f"a request of {longest_request} tokens does not fit into the model's {limit}; shorten it")
    least = max(wanted or 2, longest_request)
    for role, ranks, tokens in (
        (Role.DECODE, summary.tensor_parallel_size, summary.cache_tokens),
        (Role.PREFILL, summary.prefill_tensor_parallel_size, summary.prefill_cache_tokens),
    ):
        if tokens < least:
            each = "" if ranks == 1 else f", each of {ranks} ranks,"
            raise CrosskvError(
                f"--kv-cache-memory {summary.memory_bytes:,} bytes{each} holds the KV of {tokens} tokens on a {role} "
                f"replica, but one request may need {least}; raise it"
                + ("" if wanted is None else " or lower --max-model-len")
            )


def find_configuration(model: str) -> tuple[Path, str]:
    """Where a model's configuration is, with its weights or without, and what to call the model."""
    path = Path(model).expanduser()
    if not path.exists():
        return resolve_model(model).weights, model
    return path, model if path.name == "config.json" else path.resolve().name


def _outline(config: ClusterConfig, path: Path, role: Role) -> ModelOutline:
    """Of one rank of a role's replicas. An error names the flag by which the role has so many ranks."""
    try:
        return outline_model(
            path,
            kv_sharing=config.kv_sharing,
            dtype=config.dtype,
            block_size=config.block_size,
            tensor_parallel_size=config.ranks_of(role),
        )
    except UnsupportedModel as error:
        if role is not Role.PREFILL or config.prefill_tensor_parallel_size is None:
            raise
        own = flag_of("prefill_tensor_parallel_size")
        raise UnsupportedModel(str(error).replace(flag_of("tensor_parallel_size"), own)) from error


def _layer_summaries(outline: ModelOutline, unsplit: ModelOutline, ranks: int) -> list[LayerSummary]:
    specs, whole = _specs(outline), _specs(unsplit)
    return [
        LayerSummary(
            name=layer.name,
            target=layer.kv_sharing_target_layer_name,
            spec=_spec_name(type(specs[layer.name])) if layer.name in specs else None,
            stores=_stores(specs[layer.name]) if layer.name in specs else "",
            block_size=specs[layer.name].tokens_per_block if layer.name in specs else 0,
            page_size_bytes=specs[layer.name].page_size_bytes if layer.name in specs else 0,
            copies=ranks * _size(specs[layer.name]) // _size(whole[layer.name]) if layer.name in specs else 0,
        )
        for layer in outline.layers
    ]


def _specs(outline: ModelOutline) -> dict[LayerName, KVCacheSpec]:
    return {name: spec for group in outline.cache.groups for name, spec in zip(group.owners, group.specs, strict=True)}


def _size(spec: KVCacheSpec) -> int:
    """Bytes of a token or of a state, whatever the block size."""
    return spec.bytes_per_token or spec.state_bytes


def _spec_name(kind: type) -> str:
    """``FullAttentionSpec`` is ``full_attention``, ``SparseMLASpec`` is ``sparse_mla``."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", kind.__name__.removesuffix("Spec")).lower()


def _stores(spec: KVCacheSpec) -> str:
    """``2 × 8 × 128``: keys and values of 8 heads; ``576 + 128``: latent and index key; a state's shapes."""
    parts = []
    for region in spec.regions:
        if isinstance(region, TokenRegion):
            factors = (region.parts, region.kv_heads, region.head_dim)
            parts.append(str(region.head_dim) if factors[:2] == (1, 1) else " × ".join(map(str, factors)))
        else:
            parts.append(str(list(region.shape)).replace(" ", ""))
    return " + ".join(parts)


def _group_summary(plan: CachePlan, group: KVCacheGroup) -> GroupSummary:
    match group.retention:
        case EveryToken():
            keeps = "every token"
        case LastTokens(window, sinks):
            keeps = f"last {window:,} tokens" + (f", first {sinks:,}" if sinks else "")
        case LastState():
            keeps = "last state"
    return GroupSummary(
        keeps=keeps,
        block_size=group.block_size,
        owners=len(group.owners),
        members=len(group.members),
        block_bytes=group.block_bytes,
        padding_bytes=plan.padding(group),
    )


def _runs(groups: tuple[GroupSummary, ...]) -> Iterator[tuple[int, int, GroupSummary]]:
    """First and last number, from 1, of consecutive groups that own alike."""
    alike = [replace(group, members=0) for group in groups]
    first = 0
    for index in range(1, len(alike) + 1):
        if index == len(alike) or alike[index] != alike[first]:
            yield first + 1, index, groups[first]
            first = index


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def _title(text: str) -> Text:
    return Text(text, style="italic")


def _table() -> Table:
    return Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)


def _cache_tokens(outline: ModelOutline, memory: int, chunk: int) -> int:
    """Tokens of the longest request that the memory alone would allow."""
    plan = outline.cache
    blocks = plan.count_blocks(memory)
    longest = longest_sequence(plan, blocks, blocks * plan.largest_block_size, chunk)
    return max(0, longest - outline.prefix_tokens)
