"""The tokens at which a checkpoint's own generation ends."""

from pathlib import Path

from worker.checkpoint.checkpoint_error import CheckpointError


def end_tokens(path: Path, eos_token_id: object) -> tuple[int, ...]:
    """Hugging Face's ``eos_token_id`` (an id, a list of ids, or null) as ids; ``CheckpointError`` for anything else."""
    match eos_token_id:
        case None:
            ids: list[object] = []
        case list():
            ids = list(eos_token_id)
        case _:
            ids = [eos_token_id]
    if not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in ids):
        raise CheckpointError(f"{path}: eos_token_id = {eos_token_id} is neither a token id nor a list of token ids")
    return tuple(dict.fromkeys(int(str(token)) for token in ids))
