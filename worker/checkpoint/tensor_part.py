"""Which part of a stored tensor a reader wants, checked against where it shall go."""

from pathlib import Path

from worker.checkpoint.checkpoint_error import CheckpointError


def resolve_part(
    path: Path, name: str, shape: tuple[int, ...], part: tuple[slice, ...] | None, destination: tuple[int, ...]
) -> tuple[slice, ...]:
    """``part`` with a start and a stop for every dimension of ``shape``; missing trailing slices mean everything.

    Raises ``CheckpointError`` that names the tensor and both shapes unless the part has the destination's shape.
    """
    given = part or ()
    assert len(given) <= len(shape)
    assert all(one.step in (None, 1) for one in given)
    bounds = [one.indices(size)[:2] for one, size in zip(given, shape, strict=False)]
    bounds += [(0, size) for size in shape[len(given) :]]
    wanted = tuple(max(0, stop - start) for start, stop in bounds)
    if wanted != destination:
        stored = (
            f"shape {list(shape)}" if part is None else f"shape {list(shape)}, of which the part {list(wanted)} is read"
        )
        raise CheckpointError(
            f"{path}: tensor {name!r} has {stored}, but the model's configuration asks for {list(destination)}"
        )
    return tuple(slice(start, stop) for start, stop in bounds)
