"""What ``crosskv inspect`` says of a prefill replica: the weights that it holds, and what it computes of a prompt.

Worked out from the model's configuration, by what the model itself does; then shown or written as JSON.
"""

from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from cluster.config import ClusterConfig
from cluster.inspect_model import find_configuration
from worker.models.prefill_outline import outline_prefill


@dataclass(frozen=True, slots=True)
class PrefillSummary:
    """A prefill replica beside a replica with the whole model under the same sharing rule.

    FLOPs are those of matrix products, two per multiply-add, of a mixture of experts those that a token goes to. The
    ``*_flops_per_token`` are of linear layers and the same for every token of a prompt; ``flops_per_token`` is every
    layer, without the head, which takes ``head_flops`` for a token whose logits are wanted. A ``colocated`` engine has
    the whole model, but computes what comes after the last owner's queries, keys and values only for such tokens.
    ``*attention_flops`` are of products of activations with each other, for a token that sees ``attention_tokens``.
    Nothing is divided by ranks.
    """

    parameters: int
    weight_bytes: int
    prefill_parameters: int
    prefill_weight_bytes: int
    prefill_weight_share: float
    flops_per_token: int
    head_flops: int
    colocated_flops_per_token: int
    colocated_flops_share: float
    prefill_flops_per_token: int
    prefill_flops_share: float
    attention_tokens: int
    attention_flops: int
    prefill_attention_flops: int

    def render(self) -> RenderableType:
        """Return the summary for a terminal of 80 columns."""
        table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
        table.add_column("")
        for title in ("prefill", "whole model", "share"):
            table.add_column(title, justify="right", no_wrap=True)

        def row(title: str, part: int, whole: int) -> None:
            table.add_row(title, f"{part:,}", f"{whole:,}", f"{part / whole:.1%}" if whole else "–")

        row("parameters", self.prefill_parameters, self.parameters)
        row("weight bytes", self.prefill_weight_bytes, self.weight_bytes)
        row("FLOPs per prompt token, linear", self.prefill_flops_per_token, self.flops_per_token)
        row("… of a colocated engine", self.colocated_flops_per_token, self.flops_per_token)
        row(f"… attention to {self.attention_tokens:,} tokens", self.prefill_attention_flops, self.attention_flops)
        return Group(
            Text("What a prefill replica holds and computes", style="italic"),
            table,
            f"A FLOP is a multiplication or an addition of a matrix product. The whole model's are every layer on "
            f"every token; its head takes {self.head_flops:,} more where logits are wanted. A colocated engine runs "
            f"what follows the last owner's keys and values only for such tokens.",
        )


def inspect_prefill(config: ClusterConfig, tokens: int) -> PrefillSummary:
    """Summarize the model that a configuration names; ``tokens`` are those that the last token of a prompt sees."""
    path, _ = find_configuration(config.model)
    outline = outline_prefill(
        path, kv_sharing=config.kv_sharing, dtype=config.dtype, block_size=config.block_size, context=tokens
    )
    held, whole = outline.headless_weights, outline.weights
    prefill, colocated, every = outline.headless_operations.layers, outline.operations.stored, outline.operations.layers
    return PrefillSummary(
        parameters=whole.parameters,
        weight_bytes=whole.size_bytes,
        prefill_parameters=held.parameters,
        prefill_weight_bytes=held.size_bytes,
        prefill_weight_share=held.size_bytes / whole.size_bytes,
        flops_per_token=every.weights,
        head_flops=outline.operations.head.weights,
        colocated_flops_per_token=colocated.weights,
        colocated_flops_share=colocated.weights / every.weights,
        prefill_flops_per_token=prefill.weights,
        prefill_flops_share=prefill.weights / every.weights,
        attention_tokens=outline.context,
        attention_flops=every.mixing,
        prefill_attention_flops=prefill.mixing,
    )
