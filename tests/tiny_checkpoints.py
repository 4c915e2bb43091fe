"""Tiny random checkpoints for tests: complete model directories and GGUF files, a few hundred KiB each.

Weights are random but not flat: every tensor has values of its own, norms and biases included, so that two tensors
that were mixed up, or a bias that was forgotten, change the logits.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import gguf
import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

Architecture = Literal["llama", "mistral", "qwen2", "qwen3"]

VOCAB_SIZE = 512
BOS, EOS, IM_START, IM_END = "<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = [BOS, EOS, IM_START, IM_END]
"""Ids 0 to 3. Texts end at EOS, turns of a chat at IM_END; both are in generation_config.json."""

CHAT_TEMPLATE = (
    "{% if tools %}{{ '<tool_call> ' + tools | map(attribute='function.name') | join(' ') + '\n' }}{% endif %}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}

_GGUF_NAMES = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, 64)  # all four architectures use its names

_CORPUS = [
    "The quick brown fox jumps over the lazy dog. The dog was not amused; the fox, however, was.",
    "def add(first, second):\n    return first + second\n\n\nprint(add(1, 22) == 23)",
    "What is the capital of France? The capital of France is Paris. And that of Germany? Berlin.",
    "Größe, naïveté, façade, こんにちは, 你好, Привет — and numbers such as 3.14159 or 2,718.",
]


def write_model(model: PreTrainedModel, directory: Path, seed: int = 0, *, spread: float = 0.2) -> Path:
    """Give a model random weights and save it, with a tokenizer; returns the directory.

    Buffers that are saved are weights too. Norms and scales are about 1, everything else is about 0, ``spread`` apart.
    """
    generator = torch.Generator().manual_seed(seed)
    saved = model.state_dict().keys()
    buffers = [(name, buffer) for name, buffer in model.named_buffers() if name in saved]
    with torch.no_grad():
        for name, weight in [*model.named_parameters(), *buffers]:
            noise = torch.randn(weight.shape, generator=generator)
            factor = any(word in name for word in ("norm", "scale", "scalar"))
            weight.copy_(1.0 + spread * noise if factor else spread * noise)
    model.generation_config.eos_token_id = [1, 3]
    model.save_pretrained(directory)
    write_tiny_tokenizer(directory)
    return directory


def write_tiny(
    architecture: Architecture,
    directory: Path,
    *,
    seed: int = 0,
    dtype: str = "float32",
    shards: int = 1,
    **config_overrides: Any,
) -> Path:
    """A Hugging Face checkpoint directory with random weights; returns the directory."""
    own: dict[str, Any] = {"sliding_window": None} if architecture == "mistral" else {}
    config = AutoConfig.for_model(architecture, **{**_SHAPE, **own, **config_overrides})
    write_model(AutoModelForCausalLM.from_config(config).to(getattr(torch, dtype)), directory, seed)
    if shards > 1:
        _split(directory, shards)
    return directory


def write_tiny_tokenizer(directory: Path) -> None:
    """tokenizer.json and its companions: byte-level BPE that can spell any text, with a chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        additional_special_tokens=[IM_START, IM_END],
        chat_template=CHAT_TEMPLATE,
    )
    fast.save_pretrained(directory)


def write_tiny_gguf(
    directory: Path,
    architecture: Architecture,
    quantization: str,
    *,
    seed: int = 0,
    extend: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
    **config_overrides: Any,
) -> Path:
    """A GGUF file whose matrices are stored as ``quantization`` (``F32``, ``Q4_1``, ``Q6_K``, ...); returns its path.

    ``directory / "reference"`` becomes the same model as a Hugging Face directory in float32: what the stored blocks
    mean according to the gguf package, in Hugging Face's order. ``extend`` may add metadata and tensors to the file.
    """
    type_ = GGMLQuantizationType[quantization]
    wide = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64} if GGML_QUANT_SIZES[type_][0] == 256 else {}
    reference = write_tiny(architecture, directory / "reference", seed=seed, **{**wide, **config_overrides})
    weights = load_file(reference / "model.safetensors")
    config = json.loads((reference / "config.json").read_text())
    generator = np.random.default_rng(seed)

    path = directory / f"tiny-{architecture}-{quantization}.gguf"
    writer = gguf.GGUFWriter(path, "llama" if architecture == "mistral" else architecture)
    _add_metadata(writer, config)
    _add_tokenizer(writer, reference)
    for name, weight in weights.items():
        values = weight.float().numpy()
        if values.ndim == 1:
            stored, stored_type, meant = values, GGMLQuantizationType.F32, values
        else:
            stored, stored_type = _quantize(values, type_, generator), type_
            meant = gguf.dequantize(stored, type_)
        weights[name] = torch.from_numpy(np.array(meant, dtype=np.float32).reshape(values.shape))
        if architecture in ("llama", "mistral"):
            stored = _interleave(stored, name, config)
        writer.add_tensor(gguf_name(name), np.ascontiguousarray(stored), raw_dtype=stored_type)
    extend(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    save_file(weights, reference / "model.safetensors", {"format": "pt"})
    return path


def gguf_name(name: str) -> str:
    """The GGUF name of a Hugging Face tensor, by the gguf package's own table."""
    stem, suffix = name.rsplit(".", 1)
    return f"{_GGUF_NAMES.get_name(stem)}.{suffix}"


def _split(directory: Path, shards: int) -> None:
    weights = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    names = sorted(weights)
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: weights[name] for name in names[shard::shards]}
        save_file(part, directory / file, {"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    size = sum(weight.nbytes for weight in weights.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def _add_metadata(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_name("tiny")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config.get("head_dim", 16))
    writer.add_value_length(config.get("head_dim", 16))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])


def _add_tokenizer(writer: gguf.GGUFWriter, reference: Path) -> None:
    model = json.loads((reference / "tokenizer.json").read_text())["model"]
    tokens = [f"[PAD{token}]" for token in range(VOCAB_SIZE)]
    types = [gguf.TokenType.UNUSED] * VOCAB_SIZE
    for text, token in model["vocab"].items():
        tokens[token] = text
        types[token] = gguf.TokenType.CONTROL if text in SPECIAL_TOKENS else gguf.TokenType.NORMAL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_eot_token_id(3)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def _quantize(values: np.ndarray, type_: GGMLQuantizationType, generator: np.random.Generator) -> np.ndarray:
    """Blocks that stand for the values or, where the gguf package cannot quantize, for other values of their size."""
    if not type_.name.endswith("_K"):
        return gguf.quantize(values, type_)
    block, block_bytes = GGML_QUANT_SIZES[type_]
    blocks = generator.integers(0, 256, (values.size // block, block_bytes), dtype=np.uint8)
    # The float16 scales stand first in Q4_K and Q5_K (two of them), last in Q6_K. Everything else may be any bits.
    scales = generator.uniform(1e-4, 1e-3, (len(blocks), 2)).astype(np.float16).view(np.uint8)
    if type_ is GGMLQuantizationType.Q6_K:
        blocks[:, -2:] = scales[:, :2]
    else:
        blocks[:, :4] = scales
    return blocks.reshape(values.shape[0], -1)


def _interleave(stored: np.ndarray, name: str, config: dict[str, Any]) -> np.ndarray:
    """llama.cpp's row order for q and k: the two halves of each head alternate."""
    if "q_proj" in name:
        heads = config["num_attention_heads"]
    elif "k_proj" in name:
        heads = config["num_key_value_heads"]
    else:
        return stored
    halves = stored.reshape(heads, 2, len(stored) // heads // 2, *stored.shape[1:])
    return halves.swapaxes(1, 2).reshape(stored.shape)
