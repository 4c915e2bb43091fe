"""A GGUF file's metadata as the content of a Hugging Face ``config.json``.

What the metadata says about the computation is carried over or refused by name, never dropped.
"""

import numpy as np
from gguf.constants import GGMLQuantizationType

from worker.checkpoint.checkpoint_error import CheckpointError
from worker.checkpoint.gguf_file import GgufFile, StringArray
from worker.checkpoint.gguf_metadata import GgufMetadata
from worker.checkpoint.gguf_rope import ROPE_FACTORS, Floats, rope_scaling

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
"""The supported values of ``general.architecture``."""

# Keys that change the computation in ways that these architectures do not know, with the value that changes nothing.
_NEUTRAL = {
    "expert_count": 0,
    "nextn_predict_layers": 0,
    "use_parallel_residual": 0,
    "logit_scale": 1,
    "residual_scale": 1,
    "embedding_scale": 1,
    "attn_logit_softcapping": 0,
    "final_logit_softcapping": 0,
    "attention.causal": 1,
    "attention.max_alibi_bias": 0,
    "attention.clamp_kqv": 0,
    "attention.scale": 0,
    "attention.output_scale": 1,
    "attention.temperature_scale": 0,
    "attention.temperature_length": 0,
    "attention.kv_lora_rank": 0,
    "attention.shared_kv_layers": 0,
    "rope.scaling.alpha": 0,
    "rope.scaling.attn_factor": 1,
    "rope.scaling.yarn_ext_factor": 1,
    "rope.scaling.yarn_log_multiplier": 0,
}


def hugging_face_config(file: GgufFile) -> dict[str, object]:
    """The configuration; raises ``CheckpointError`` for a model that is not supported or not described completely."""
    metadata = GgufMetadata(file)
    architecture = metadata.architecture
    if architecture not in ARCHITECTURES:
        raise CheckpointError(
            f"{file.path}: GGUF architecture {architecture!r} is not supported; {', '.join(ARCHITECTURES)} are"
        )
    for key, neutral in _NEUTRAL.items():
        metadata.refuse_unless(key, neutral)
    _check_whole(file)

    hidden_size = metadata.size("embedding_length")
    heads = metadata.size("attention.head_count")
    vocab_size = _vocab_size(file, hidden_size)
    theta = metadata.number("rope.freq_base", 10000.0)
    head_dim = _head_dim(metadata, hidden_size, heads)
    config: dict[str, object] = {
        "architectures": [ARCHITECTURES[architecture]],
        "model_type": architecture,
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": metadata.size("feed_forward_length"),
        "num_hidden_layers": metadata.size("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.size("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": metadata.size("context_length"),
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": theta,
        "rope_scaling": rope_scaling(metadata, theta, head_dim, _rope_factors(file)),
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": metadata.token_id("bos", vocab_size),
        "eos_token_id": _ends(metadata, vocab_size),
        "pad_token_id": metadata.token_id("padding", vocab_size),
    }
    if metadata.has("attention.sliding_window"):
        # Among the models that are stored as llama, only Mistral's have a window.
        if architecture != "llama":
            raise CheckpointError(f"{file.path}: {architecture}.attention.sliding_window is not supported")
        config |= {
            "architectures": ["MistralForCausalLM"],
            "model_type": "mistral",
            "sliding_window": metadata.size("attention.sliding_window"),
        }
    return config


def _check_whole(file: GgufFile) -> None:
    parts = file.metadata.get("split.count")
    if isinstance(parts, int) and parts > 1:
        raise CheckpointError(f"{file.path} is one of {parts} parts of a model: merge them first (llama-gguf-split)")


def _ends(metadata: GgufMetadata, vocab_size: int) -> int | list[int] | None:
    """The tokens that end a text: end of sequence, of turn, of message, as far as the file names them."""
    named = (metadata.token_id(key, vocab_size) for key in ("eos", "eot", "eom"))
    ends = list(dict.fromkeys(token for token in named if token is not None))
    return ends[0] if len(ends) == 1 else ends or None


def _vocab_size(file: GgufFile, hidden_size: int) -> int:
    """The rows of the embedding; the tokenizer may have fewer tokens, because converters pad the embedding."""
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(f"{file.path} has no tensor token_embd.weight")
    if len(embedding.shape) != 2 or embedding.shape[1] != hidden_size:
        raise CheckpointError(
            f"{file.path}: token_embd.weight has shape {list(embedding.shape)}, its rows should be {hidden_size} long"
        )
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, StringArray) and tokens.count > embedding.shape[0]:
        raise CheckpointError(f"{file.path}: {tokens.count} tokens, but only {embedding.shape[0]} embeddings")
    return embedding.shape[0]


def _head_dim(metadata: GgufMetadata, hidden_size: int, heads: int) -> int:
    rotary = metadata.size("rope.dimension_count", max(1, hidden_size // heads))
    key = metadata.size("attention.key_length", rotary)
    value = metadata.size("attention.value_length", key)
    if not key == value == metadata.size("rope.dimension_count", key) or key % 2:
        raise CheckpointError(
            f"{metadata.path}: heads with keys of {key}, values of {value} and {rotary} rotated dimensions are not "
            "supported: the three must be equal and even"
        )
    return key


def _rope_factors(file: GgufFile) -> Floats | None:
    tensor = file.tensors.get(ROPE_FACTORS)
    if tensor is None:
        return None
    if tensor.type is not GGMLQuantizationType.F32 or len(tensor.shape) != 1:
        raise CheckpointError(f"{file.path}: {ROPE_FACTORS} is not a vector of F32")
    return file.data(tensor).view(np.float32).astype(np.float64)
