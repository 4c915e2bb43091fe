"""Small JSON files of a checkpoint directory."""

import json
from pathlib import Path

from worker.checkpoint.checkpoint_error import CheckpointError

_MAX_BYTES = 64 << 20


def read_json_object(path: Path) -> dict[str, object]:
    """The object in the file. Raises ``CheckpointError`` if it is missing, too large, or holds anything else."""
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise CheckpointError(f"{path} is larger than {_MAX_BYTES >> 20} MiB, which no such file should be")
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent} has no {path.name}") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} does not hold a JSON object")
    return content
