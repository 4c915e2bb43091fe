"""The table in docs/models.md: one released configuration of every architecture, as ``crosskv inspect`` describes it.

    python -m tests.docs.model_table

writes it anew, between its markers.
"""

import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import transformers

from tests.docs.documents import REPOSITORY
from tests.releases import FULL, RELEASES, SLIDING, Config
from worker.kv_cache.groups import KVCacheGroup
from worker.kv_cache.specs import EveryToken, LastState, LastTokens, MLASpec, SparseMLASpec
from worker.models.outline import ModelOutline, outline_model

COMMAND = "python -m tests.docs.model_table"
DOCUMENT = REPOSITORY / "docs" / "models.md"
BEGIN, END = f"<!-- begin: {COMMAND} -->", "<!-- end -->"
PROMPT = 8192


@dataclass(frozen=True)
class Release:
    """A model of the table; ``architectures`` are those that it stands for."""

    name: str
    config: Config
    architectures: tuple[str, ...]


def _plain(architecture: str, model_type: str, layers: int, kv_heads: int, **more: object) -> Config:
    """A plain decoder with 32 heads of 128, unless ``more`` says otherwise."""
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": layers,
        "num_attention_heads": 32,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 32768,
        "torch_dtype": "bfloat16",
        "vocab_size": 32000,
        **more,
    }


# meta-llama/Llama-3.1-8B, mistralai/Mistral-7B-v0.1, Qwen/Qwen2.5-7B, Qwen/Qwen3-30B-A3B, tencent/Hunyuan-7B-Instruct,
# google/gemma-3-1b-it: what decides their KV.
LLAMA = _plain("LlamaForCausalLM", "llama", 32, 8)
MISTRAL = _plain("MistralForCausalLM", "mistral", 32, 8, sliding_window=4096)
QWEN2 = _plain("Qwen2ForCausalLM", "qwen2", 28, 4, hidden_size=3584, num_attention_heads=28)
QWEN3_MOE = _plain("Qwen3MoeForCausalLM", "qwen3_moe", 48, 4, head_dim=128, hidden_size=2048)
HUNYUAN_DENSE = _plain("HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense", 32, 8, head_dim=128)
GEMMA3_TEXT: Config = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "num_hidden_layers": 26,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "sliding_window": 512,
    "layer_types": [FULL if index % 6 == 5 else SLIDING for index in range(26)],
    "torch_dtype": "bfloat16",
}
# What the architecture's own configuration class says without being told anything.
MISTRAL_LARGE_4: Config = {
    **transformers.MistralLarge4Config().to_dict(),
    "architectures": ["MistralLarge4ForConditionalGeneration"],
}

TABLE = (
    Release("Llama 3.1 8B", LLAMA, ("LlamaForCausalLM",)),
    Release("Mistral 7B v0.1", MISTRAL, ("MistralForCausalLM",)),
    Release("Qwen2.5 7B", QWEN2, ("Qwen2ForCausalLM",)),
    Release("Qwen3 8B", RELEASES["Qwen3-8B"], ("Qwen3ForCausalLM",)),
    Release("Qwen3 30B-A3B", QWEN3_MOE, ("Qwen3MoeForCausalLM",)),
    Release("Gemma 3 1B", GEMMA3_TEXT, ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration")),
    Release("Gemma 3n E2B", RELEASES["Gemma 3n E2B"], ("Gemma3nForCausalLM", "Gemma3nForConditionalGeneration")),
    Release("Gemma 4 E2B", RELEASES["Gemma 4 E2B"], ("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration")),
    Release("Hunyuan 7B", HUNYUAN_DENSE, ("HunYuanDenseV1ForCausalLM",)),
    Release("Hunyuan-A13B", RELEASES["Hunyuan-A13B"], ("HunYuanMoEV1ForCausalLM",)),
    Release("Hunyuan-Large", RELEASES["Hunyuan-Large"], ("HunYuanForCausalLM",)),
    Release("Hymba 1.5B", RELEASES["Hymba-1.5B"], ("HymbaForCausalLM",)),
    Release("DeepSeek V2-Lite", RELEASES["DeepSeek V2-Lite"], ("DeepseekV2ForCausalLM",)),
    Release("DeepSeek V3", RELEASES["DeepSeek V3"], ("DeepseekV3ForCausalLM",)),
    Release("DeepSeek V3.2", RELEASES["DeepSeek V3.2"], ("DeepseekV32ForCausalLM",)),
    Release("Mistral Large 4", MISTRAL_LARGE_4, ("MistralLarge4ForConditionalGeneration",)),
    Release("Qwen3-Next 80B", RELEASES["Qwen3-Next-80B"], ("Qwen3NextForCausalLM",)),
)


def table() -> str:
    """Markdown, one row per model and kind of layer."""
    rows = [
        "| model | architectures | layers and what they store | bytes per token | state bytes per request |",
        "| --- | --- | --- | ---: | ---: |",
    ]
    for release in TABLE:
        outline = outline_of(release.config)
        plan = outline.cache
        cells = (
            release.name,
            ", ".join(f"`{name}`" for name in release.architectures),
            "; ".join(kinds(outline)),
            f"{plan.bytes_per_token:,}",
            f"{plan.state_bytes:,}" if plan.state_bytes else "",
        )
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def outline_of(config: Mapping[str, object]) -> ModelOutline:
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "config.json"
        file.write_text(json.dumps(config))
        return outline_model(file, kv_sharing="model", dtype="bfloat16", block_size=16)


def kinds(outline: ModelOutline) -> Iterator[str]:
    """How many layers own what, and how many use another's."""
    owners: dict[str, int] = {}
    for group in outline.cache.groups:
        for spec in group.specs:
            kind = _kind(group, sparse=isinstance(spec, SparseMLASpec), latent=isinstance(spec, MLASpec))
            owners[kind] = owners.get(kind, 0) + 1
    yield from (f"{count} × {kind}" for kind, count in owners.items())
    sharing = sum(layer.kv_sharing_target_layer_name is not None for layer in outline.layers)
    if sharing:
        yield f"{sharing} share"


def _kind(group: KVCacheGroup, *, sparse: bool, latent: bool) -> str:
    if sparse:
        return "latent and index key"
    if latent:
        return "latent"
    match group.retention:
        case EveryToken():
            return "full"
        case LastTokens(window, sinks):
            return f"window of {window:,}" + (f" and the first {sinks}" if sinks else "")
        case LastState():
            return "state"


def document_with(table: str, document: str) -> str:
    """The document with the table between its markers."""
    before, _, rest = document.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


if __name__ == "__main__":
    DOCUMENT.write_text(document_with(table(), DOCUMENT.read_text()))
