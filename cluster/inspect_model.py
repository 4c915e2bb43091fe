"""What ``crosskv inspect`` says of a model: which layers own KV, what they store, how much fits into a given memory.

A ``ModelSummary`` is computed from the model's outline, without weights, and then shown or written as JSON. ``serve``
and the benchmarks make one too, to refuse what cannot work before anything is started.
"""

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table

from cluster.config import ClusterConfig
from cluster.errors import CrosskvError
from cluster.model_store import resolve_model
from worker.kv_cache.groups import count_blocks
from worker.models.outline import ModelOutline, outline_model


@dataclass(frozen=True, slots=True)
class LayerSummary:
    """One attention layer. An owner has a spec and pages; a sharing layer has a target, no spec, and no bytes."""

    name: str
    target: str | None
    spec: str | None
    kv_heads: int
    head_dim: int
    page_size_bytes: int


@dataclass(frozen=True, slots=True)
class ModelSummary:
    """A model under one sharing rule; ``*_unshared`` is the same model with a cache in every layer."""

    model: str
    architecture: str
    kv_sharing: str
    dtype: str
    vocab_size: int
    longest_context: int
    block_size: int
    memory_bytes: int
    total_layers: int
    owner_layers: int
    bytes_per_token: int
    bytes_per_token_unshared: int
    state_bytes_per_request: int
    num_blocks: int
    num_blocks_unshared: int
    layers: tuple[LayerSummary, ...]

    def to_json(self) -> str:
        """Return the summary for programs."""
        return json.dumps(asdict(self), indent=2)

    @property
    def cache_tokens(self) -> int:
        """Tokens whose KV fits into the memory."""
        return self.num_blocks * self.block_size

    def render(self) -> RenderableType:
        """Return the summary for a terminal."""
        # Both names of a sharing layer fit into 80 columns.
        layers = Table(title=self._title(), title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
        layers.add_column("layer", no_wrap=True)
        layers.add_column("KV cache", no_wrap=True)
        layers.add_column("page bytes", justify="right")
        for layer in self.layers:
            if layer.target is None:
                layers.add_row(
                    layer.name, f"{layer.spec}, {layer.kv_heads} × {layer.head_dim}", f"{layer.page_size_bytes:,}"
                )
            else:
                layers.add_row(layer.name, f"[cyan]that of {layer.target}[/cyan]", "–")
        totals = Table(title_justify="left", title=f"KV sharing {self.kv_sharing}", box=SIMPLE_HEAD, pad_edge=False)
        for title in ("", "as configured", "without sharing"):
            totals.add_column(title, justify="right" if title else "left")
        totals.add_row("layers that own KV", f"{self.owner_layers} of {self.total_layers}", str(self.total_layers))
        totals.add_row("bytes per token", f"{self.bytes_per_token:,}", f"{self.bytes_per_token_unshared:,}")
        totals.add_row("state bytes per request", *[f"{self.state_bytes_per_request:,}"] * 2)
        totals.add_row(
            f"blocks of {self.block_size} tokens in {self.memory_bytes:,} B",
            f"{self.num_blocks:,}",
            f"{self.num_blocks_unshared:,}",
        )
        totals.add_row("tokens in them", f"{self.cache_tokens:,}", f"{self.num_blocks_unshared * self.block_size:,}")
        return Group(layers, totals)

    def _title(self) -> str:
        return f"{self.model} ({self.architecture}, {self.dtype})"


def inspect_model(config: ClusterConfig, sharing_name: str | None = None) -> ModelSummary:
    """Summarize the model that a configuration names, fetching it if it is neither a path nor here already.

    ``sharing_name`` is how to call the sharing rule, if not as it stands in the configuration. Raises the worker's own
    errors for a model or a sharing rule that cannot be served.
    """
    path, name = Path(config.model).expanduser(), config.model
    if not path.exists():
        path = resolve_model(config.model).weights
    elif path.name != "config.json":
        name = path.resolve().name
    outline = outline_model(path, kv_sharing=config.kv_sharing, dtype=config.dtype, block_size=config.block_size)
    unshared = outline_model(path, kv_sharing="none", dtype=config.dtype, block_size=config.block_size)
    layers = tuple(_layer_summaries(outline))
    memory = int(config.kv_cache_memory)
    return ModelSummary(
        model=name,
        architecture=outline.architecture,
        kv_sharing=sharing_name or config.kv_sharing,
        dtype=str(outline.dtype).removeprefix("torch."),
        vocab_size=outline.vocab_size,
        longest_context=outline.longest_context,
        block_size=config.block_size,
        memory_bytes=memory,
        total_layers=len(layers),
        owner_layers=sum(layer.target is None for layer in layers),
        bytes_per_token=_bytes_per_token(outline),
        bytes_per_token_unshared=_bytes_per_token(unshared),
        state_bytes_per_request=0,
        num_blocks=count_blocks(outline.groups, memory),
        num_blocks_unshared=count_blocks(unshared.groups, memory),
        layers=layers,
    )


def require_servable(config: ClusterConfig, summary: ModelSummary, longest_request: int = 2) -> None:
    """Raise ``CrosskvError`` if the model or its cache cannot hold what the configuration promises.

    ``longest_request`` is in tokens, prompt and output.
    """
    wanted = config.max_model_len
    if wanted is not None and wanted > summary.longest_context:
        raise CrosskvError(
            f"--max-model-len {wanted}: {summary.model} is served up to {summary.longest_context} tokens; lower it"
        )
    limit = wanted or summary.longest_context
    if longest_request > limit:
        raise CrosskvError(f"a request of {longest_request} tokens does not fit into the model's {limit}; shorten it")
    least = max(wanted or 2, longest_request)
    if summary.cache_tokens < least:
        raise CrosskvError(
            f"--kv-cache-memory {summary.memory_bytes:,} bytes holds the KV of {summary.cache_tokens} tokens "
            f"({summary.num_blocks} blocks), but one request may need {least}; raise it"
            + ("" if wanted is None else " or lower --max-model-len")
        )


def _layer_summaries(outline: ModelOutline) -> list[LayerSummary]:
    summaries = []
    for layer in outline.layers:
        spec = layer.kv_cache_spec()
        summaries.append(
            LayerSummary(
                name=layer.name,
                target=layer.kv_sharing_target_layer_name,
                spec=None if spec is None else _spec_name(type(spec)),
                kv_heads=layer.kv_heads,
                head_dim=layer.head_dim,
                page_size_bytes=0 if spec is None else spec.page_size_bytes,
            )
        )
    return summaries


def _spec_name(kind: type) -> str:
    """``FullAttentionSpec`` is ``full_attention``."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", kind.__name__.removesuffix("Spec")).lower()


def _bytes_per_token(outline: ModelOutline) -> int:
    return sum(len(group.owners) * group.spec.bytes_per_token for group in outline.groups)
