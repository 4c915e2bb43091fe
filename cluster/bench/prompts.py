"""Prompts for load tests, made once before a load and the same for the same seed."""

import random
from collections.abc import Sequence
from pathlib import Path

from cluster.errors import CrosskvError


def random_prompts(
    lengths: Sequence[int], count: int, vocabulary: int, seed: int
) -> dict[int, tuple[tuple[int, ...], ...]]:
    """Return ``count`` prompts per length, token ids below ``vocabulary``, no two of which begin with the same token.

    So no prefix cache can help with any of them.
    """
    total = len(lengths) * count
    if total > vocabulary:
        raise CrosskvError(
            f"{total} prompts cannot all begin with different tokens when there are {vocabulary}; ask for fewer"
        )
    generator = random.Random(seed)  # noqa: S311 (a load, not a secret)
    first = iter(generator.sample(range(vocabulary), total))
    return {
        length: tuple(
            (next(first), *(generator.randrange(vocabulary) for _ in range(length - 1))) for _ in range(count)
        )
        for length in lengths
    }


def prompts_from_file(path: Path, count: int) -> tuple[str, ...]:
    """Return ``count`` prompts, the file's lines that are not empty, from the start again when they run out."""
    try:
        lines = [line for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise CrosskvError(f"--prompt-file {path}: {error}") from None
    if not lines:
        raise CrosskvError(f"--prompt-file {path}: holds no line with text")
    return tuple(lines[index % len(lines)] for index in range(count))
