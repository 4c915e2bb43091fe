"""A byte-level BPE tokenizer of 424 tokens, trained on the spot, in the files that a checkpoint has."""

import json
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CORPUS = [
    "Hello, world! How are you today? The quick brown fox jumps over the lazy dog. STOP. ",
    "Größe, façade, naïve, 中文字符, 日本語, emoji 😀👍🏽, math ∑∫√, user system assistant",
    "def main():\n    return [x for x in range(10)]\n\n\n",
] * 4


def byte_level_backend() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def write_checkpoint(directory: Path) -> Path:
    backend = byte_level_backend()
    backend.enable_truncation(8)  # some checkpoints carry their training's
    backend.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "bos_token": "<|endoftext|>",
                "eos_token": {"content": "<|im_end|>", "special": True},
                "model_max_length": int(1e30),
                "chat_template": CHATML,
            }
        )
    )
    (directory / "config.json").write_text(json.dumps({"max_position_embeddings": 256, "eos_token_id": 2}))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
    return directory
