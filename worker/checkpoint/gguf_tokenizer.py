"""Writes the files that Hugging Face keeps beside its weights, from the metadata of a GGUF file.

    python -m worker.checkpoint.gguf_tokenizer MODEL.gguf DIRECTORY

The model store runs this as a process of its own, because transformers converts the tokenizer and imports torch. It
writes tokenizer.json, tokenizer_config.json, chat_template.jinja if the file has a template, config.json and
generation_config.json. A problem with the file is one line on standard error and exit status 1.
"""

import json
import sys
from pathlib import Path

from worker.checkpoint.checkpoint_error import CheckpointError
from worker.checkpoint.gguf_config import hugging_face_config
from worker.checkpoint.gguf_file import GgufFile


def write_tokenizer(source: Path, directory: Path) -> None:
    """Convert; raises ``CheckpointError`` if the file is no sound GGUF model or its tokenizer is not supported."""
    file = GgufFile.open(source)  # refuses what transformers' reader would trust
    config = hugging_face_config(file)

    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415 - only a sound file is worth these seconds

    try:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(source.parent, gguf_file=source.name)
    except Exception as error:  # whatever transformers makes of metadata that is sound but not what it expects
        raise CheckpointError(f"{source}: its tokenizer cannot be converted: {error!r}") from error
    tokenizer.save_pretrained(directory)
    generation = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    for name, content in (("config.json", config), ("generation_config.json", generation)):
        (directory / name).write_text(json.dumps(content, indent=2) + "\n")


def main() -> int:
    """Run the conversion; the exit status."""
    source, directory = map(Path, sys.argv[1:])
    try:
        write_tokenizer(source, directory)
    except CheckpointError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
